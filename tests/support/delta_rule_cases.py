"""Inputs of the delta rule, and a kernel for sequences of several lengths, segment by segment in torch."""

from itertools import pairwise

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from verl_tree.attention import AttentionPlan
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.delta_rule import tree_gated_delta_rule

HEADS, KEY_DIM, VALUE_DIM = 3, 5, 4


def inputs_of(num_tokens, *, dtype=torch.float64):
    """Draw queries, keys, values, log decays and betas; some decays leave nothing of the state."""
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*shape):
        return torch.randn(num_tokens, HEADS, *shape, dtype=torch.float64, generator=generator)

    g = -(draw().exp() * 0.3)
    g[::17] = -200.0
    tensors = (draw(KEY_DIM), draw(KEY_DIM), draw(VALUE_DIM), g, draw().sigmoid())
    return [each.to(dtype).requires_grad_() for each in tensors]


def on_tree(inputs, layout, *, size):
    q, k, v, g, beta = inputs
    chunks = TreeChunks.of_plan(AttentionPlan.from_layout(layout), size=size)
    return tree_gated_delta_rule(q, k, v, g_TH=g, beta_TH=beta, chunks=chunks)


def varlen_gated_delta_rule(
    q, k, v, *, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices
):
    """Run transformers' own rule on each segment; arguments and results are those of flash-linear-attention's."""
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == q.shape[1]
    assert chunk_indices.tolist() == [
        [segment, chunk]
        for segment, (start, end) in enumerate(pairwise(bounds))
        for chunk in range(-(-(end - start) // 64))
    ]
    outs, states = [], []
    for segment, (start, end) in enumerate(pairwise(bounds)):
        out, state = torch_chunk_gated_delta_rule(
            *(each[:, start:end] for each in (q, k, v, g, beta)),
            chunk_size=64,
            initial_state=None if initial_state is None else initial_state[segment : segment + 1],
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        outs.append(out)
        states.append(state)
    return torch.cat(outs, dim=1), torch.cat(states) if output_final_state else None
