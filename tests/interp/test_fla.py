"""flash-linear-attention's kernels by levels, in Triton's interpreter: against float64, and no branch sees another.

The interpreter has no bfloat16 beyond dots and conversions, so half precision is float16 here.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from delta_rule_cases import on_tree
from fla.ops.common import chunk_delta_h
from hybrid_cases import chain_of_one_token_nodes, loss_of
from tiny_models import tiny_model
from tree_cases import DEEP, gradients, layout_of, random_sequences, relative_error
from triton.runtime.autotuner import Autotuner

from verl_tree.attention import AttentionPlan
from verl_tree.functional import tree_log_probs
from verl_tree.recurrence import fla, stand_ins
from verl_tree.recurrence.levels import TreeLevels

HEADS, DIM = 2, 16

LONG = [*range(50)] * 2
FORESTS = {
    "deep": DEEP,
    "chain": chain_of_one_token_nodes(4),
    "longer than a chunk": [LONG, [*LONG[:70], 7], [*LONG[:70], 8, 9], [5, 5]],
    "random": random_sequences(np.random.default_rng(4), num_sequences=6, mean_len=9),
}


class LoopIndex(int):
    """A number that a kernel may cast, as it may the index of a compiled loop."""

    def to(self, dtype):
        return tl.full((), int(self), dtype)


@pytest.fixture(autouse=True)
def interpretable(monkeypatch):
    """Make up for two things that the interpreter lacks.

    Its loops count in Python's numbers, which have no `to`. And it has no device to time configurations on, so the
    first one of each kernel serves.
    """

    def loop(*bounds):
        return map(LoopIndex, range(*map(int, bounds)))

    monkeypatch.setattr(chunk_delta_h, "range", loop, raising=False)
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0])


def inputs_of(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)

    def draw(*dims):
        return torch.randn(num_tokens, HEADS, *dims, generator=generator)

    g = -(draw().exp() * 0.3)
    g[::17] = -20.0
    inputs = [draw(DIM), draw(DIM), draw(DIM), g, draw().sigmoid()]
    return [each.requires_grad_() for each in inputs]


def by_levels(inputs, layout):
    q, k, v, g, beta = inputs
    levels = TreeLevels.of_plan(AttentionPlan.from_layout(layout), chunk_size=fla.CHUNK_SIZE)
    return fla.fla_gated_delta_rule(q, k, v, g_TH=g, beta_TH=beta, levels=levels)


@pytest.mark.parametrize("name", FORESTS)
def test_levels_equal_torch_in_float64(name):
    layout = layout_of(FORESTS[name])
    inputs = inputs_of(layout.num_tokens)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    got, want = by_levels(inputs, layout), on_tree(exact, layout, size=16)
    assert got.dtype == torch.float32
    assert relative_error(got.double(), want) < 1e-5
    weight = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got_gradients = torch.autograd.grad((weight.float() * got).sum(), inputs)
    want_gradients = torch.autograd.grad((weight * want).sum(), exact)
    for got_one, want_one in zip(got_gradients, want_gradients, strict=True):
        assert relative_error(got_one.double(), want_one) < 1e-4


@pytest.mark.parametrize(("dtype", "value_dim"), [(torch.float32, 16), (torch.float16, 32)])
def test_it_passes_its_self_test(dtype, value_dim):
    variant = fla.DeltaRuleVariant(torch.device("cpu"), dtype, num_heads=1, key_dim=32, value_dim=value_dim)
    assert fla.self_test(fla.fla_gated_delta_rule, variant) == []


def test_no_branch_sees_another_bit_for_bit():
    layout = layout_of(FORESTS["longer than a chunk"])
    inputs = [each.detach() for each in inputs_of(layout.num_tokens)]
    before, is_on_path = by_levels(inputs, layout), layout.materialize()
    for token in (3, 72, layout.num_tokens - 3):
        changed = [each.clone() for each in inputs]
        for each in changed:
            each[token] = 0.5 * each[token] - 0.25
        after, sees = by_levels(changed, layout), is_on_path[:, token]
        assert torch.equal(after[~sees], before[~sees])
        assert not torch.equal(after[sees], before[sees])


def test_what_is_kept_for_a_backward_pass_goes_by_nodes():
    """A state for each node of a call that starts with states, and none for the roots of the first call."""
    layout, kept = layout_of(FORESTS["longer than a chunk"]), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        by_levels(inputs_of(layout.num_tokens), layout)
    states = [each for each in kept if each.shape[1:] == (HEADS, DIM, DIM)]
    # Below the first 70 tokens are 30, 1 and 2; the tree of two tokens is in the same call.
    assert [len(each) for each in states] == [4]
    assert {each.dtype for each in states} == {torch.float32}


def test_a_model_by_levels_equals_the_same_model_in_torch(monkeypatch):
    model = tiny_model("qwen3_5_text", linear_key_head_dim=16, linear_value_head_dim=16).float()

    def trained():
        scores = tree_log_probs(model, DEEP[:4], calculate_entropy=True)
        return scores.log_probs, gradients(model, loss_of(scores.log_probs, scores.entropy))

    want, want_gradients = trained()
    monkeypatch.setattr(fla, "serves", lambda *_, **__: True)
    monkeypatch.setattr(stand_ins, "tree_gated_delta_rule", lambda *_, **__: pytest.fail("torch was chosen"))
    got, got_gradients = trained()
    for got_one, want_one in zip(got, want, strict=True):
        torch.testing.assert_close(got_one, want_one, rtol=1e-5, atol=1e-5)
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < 1e-4, name
