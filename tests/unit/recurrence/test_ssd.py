"""Mamba-2's recurrence on forests: against each path alone, token by token."""

import numpy as np
import torch
from path_cases import assert_equals_each_path, on_forests_and_chunk_sizes
from tree_cases import layout_of, random_sequences, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.ssd import tree_ssd

GROUPS, HEADS, STATE_DIM, HEAD_DIM = 2, 3, 5, 4


def inputs_of(num_tokens, *, dtype=torch.float64):
    """Draw c, b, x and log decays; some decays leave nothing of the state."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape):
        return torch.randn(num_tokens, GROUPS, *shape, dtype=torch.float64, generator=generator)

    g = -(draw(HEADS).exp() * 0.3)
    g[::17] = -200.0
    tensors = (draw(STATE_DIM), draw(STATE_DIM), draw(HEADS, HEAD_DIM), g)
    return [each.to(dtype).requires_grad_() for each in tensors]


def on_tree(inputs, layout, *, size):
    c, b, x, g = inputs
    return tree_ssd(c, b, x, g_TGJ=g, chunks=TreeChunks.of_plan(AttentionPlan.from_layout(layout), size=size))


def by_path(inputs, layout):
    """Compute every path of a leaf alone; each token's output comes from the first path that holds it."""
    c, b, x, g = inputs
    outs = {}
    for path in layout.tree_index_F.split(np.diff(layout.leaf_offsets).tolist()):
        state = x.new_zeros(GROUPS, HEADS, HEAD_DIM, STATE_DIM)
        for token in path.tolist():
            state = state * g[token].exp()[..., None, None] + torch.einsum("gjp,gn->gjpn", x[token], b[token])
            outs.setdefault(token, torch.einsum("gjpn,gn->gjp", state, c[token]))
    return torch.stack([outs[token] for token in range(layout.num_tokens)])


@on_forests_and_chunk_sizes
def test_equals_the_recurrence_along_each_path(sequences, size):
    assert_equals_each_path(sequences, size, inputs_of=inputs_of, on_tree=on_tree, by_path=by_path)


def test_bfloat16_is_computed_in_float32_also_under_autocast():
    layout = layout_of(random_sequences(np.random.default_rng(0), num_sequences=20, mean_len=9))
    low = [each.detach() for each in inputs_of(layout.num_tokens, dtype=torch.bfloat16)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = on_tree(low, layout, size=16)
    assert got.dtype == torch.float32
    assert 0 < relative_error(got.double(), by_path([each.double() for each in low], layout)) < 1e-6
