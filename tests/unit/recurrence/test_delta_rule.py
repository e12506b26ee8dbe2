"""The delta rule and the causal convolution on forests: against each path alone, and no branch sees another."""

import numpy as np
import pytest
import torch
from delta_rule_cases import HEADS, VALUE_DIM, inputs_of, on_tree
from hybrid_cases import chain_of_one_token_nodes, recurrence_by_token
from path_cases import assert_equals_each_path, on_forests_and_chunk_sizes
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from tree_cases import DEEP, layout_of, random_sequences, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.recurrence.causal_conv import ConvSeams, tree_causal_conv


def by_path(inputs, layout):
    """Compute every path of a leaf alone; each token's output comes from the first path that holds it."""
    out = torch.zeros(layout.num_tokens, HEADS, VALUE_DIM, dtype=torch.float64)
    for path in layout.tree_index_F.split(np.diff(layout.leaf_offsets).tolist()):
        one, _ = recurrence_by_token(*(each[path][None] for each in inputs))
        out = out.index_copy(0, path, one[0])
    return out


@on_forests_and_chunk_sizes
def test_equals_the_recurrence_along_each_path(sequences, size):
    assert_equals_each_path(sequences, size, inputs_of=inputs_of, on_tree=on_tree, by_path=by_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_as_near_to_float64_as_transformers_own_kernel(dtype):
    """Also under autocast, which would round the factors of every product."""
    layout = layout_of(random_sequences(np.random.default_rng(0), num_sequences=20, mean_len=9))
    low = [each.detach().to(dtype) for each in inputs_of(layout.num_tokens)]
    low[3] = low[3].float()  # log decays, as in the layers
    exact = [each.double() for each in low]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = on_tree(low, layout, size=16)
    assert got.dtype == dtype
    want, flat = by_path(exact, layout), torch.zeros(got.shape, dtype=torch.float64)
    for path in layout.tree_index_F.split(np.diff(layout.leaf_offsets).tolist()):
        q, k, v, g, beta = (each[path][None] for each in low)
        one, _ = torch_chunk_gated_delta_rule(q, k, v, g, beta, chunk_size=16, use_qk_l2norm_in_kernel=True)
        flat[path] = one[0].double()
    assert 0 < relative_error(got.double(), want) < 1.5 * relative_error(flat, want)


def test_no_branch_sees_another_bit_for_bit():
    layout = layout_of(random_sequences(np.random.default_rng(5), num_sequences=25, mean_len=7))
    inputs = [each.detach() for each in inputs_of(layout.num_tokens, dtype=torch.float32)]
    convolved = torch.randn(6, layout.num_tokens, generator=torch.Generator().manual_seed(2))
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    seams = ConvSeams.of_plan(AttentionPlan.from_layout(layout), width=4)
    before = on_tree(inputs, layout, size=16), tree_causal_conv(convolved, weight, None, seams=seams)
    is_on_path = layout.materialize()
    for token in range(0, layout.num_tokens, 7):
        changed = [each.clone() for each in inputs]
        for each in changed:
            each[token] = 0.5 * each[token] - 0.25  # decays stay negative
        convolved_too = convolved.clone()
        convolved_too[:, token] += 100.0
        after = on_tree(changed, layout, size=16), tree_causal_conv(convolved_too, weight, None, seams=seams)
        sees = is_on_path[:, token]
        assert torch.equal(after[0][~sees], before[0][~sees])
        assert torch.equal(after[1][:, ~sees], before[1][:, ~sees])
        assert not torch.equal(after[0][sees], before[0][sees])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution_equals_that_of_each_path(width, has_bias):
    layout = layout_of(DEEP + chain_of_one_token_nodes(9))
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((6, layout.num_tokens), (6, width), (6,))
    )
    bias_or_none = bias if has_bias else None
    seams = ConvSeams.of_plan(AttentionPlan.from_layout(layout), width=width)
    got = tree_causal_conv(x, weight, bias_or_none, seams=seams)
    want = torch.zeros_like(got)
    for path in layout.tree_index_F.split(np.diff(layout.leaf_offsets).tolist()):
        one = F.conv1d(F.pad(x[:, path], (width - 1, 0)), weight[:, None], bias_or_none, groups=6)
        want = want.index_copy(1, path, one)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    inputs = [x, weight] + [bias] * has_bias
    for got_one, want_one in zip(
        torch.autograd.grad((got**2).sum(), inputs), torch.autograd.grad((want**2).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(got_one, want_one, rtol=1e-11, atol=1e-11)
