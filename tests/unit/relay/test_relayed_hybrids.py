"""Relayed trees of hybrids against flat rows, in float64, and that the states which cross the cuts matter.

`test_recurrent_families.py` has random forests of every family.
"""

from functools import cache

import pytest
import torch
from tiny_models import VOCAB_SIZE, tiny_model

pytest.importorskip("verl")

from float64_mode import Float64
from hybrid_cases import assert_equals_flat, chain_of_one_token_nodes, oracle
from relay_cases import (
    LossCase,
    assert_a_token_changes_its_subtree_only,
    flat_result,
    flat_rows,
    lay_out,
    relayed_result,
    verl_rows,
    worst_error,
)
from tree_cases import DEEP

from verl_tree.recurrence import stand_ins
from verl_tree.recurrence.bind import RecurrentLayers
from verl_tree.relay.states import StateRelay
from verl_tree.testing.synthetic import random_forest


@pytest.fixture(autouse=True)
def _chunks_of_a_few_tokens(monkeypatch):
    monkeypatch.setattr(stand_ins, "CHUNK_SIZE", 5)


def test_sections_of_a_chain_of_one_token_nodes():
    """A section is entered after many tokens of its context."""
    for capacity in (3, 12):
        assert_equals_flat(tiny_model("qwen3_5_text"), [chain_of_one_token_nodes(16)], capacity=capacity)


def test_a_convolution_wider_than_a_section():
    model = tiny_model("qwen3_next", linear_conv_kernel_dim=6)
    for capacity in (2, 3):
        assert_equals_flat(model, [[[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9], [4]]], capacity=capacity)


@pytest.mark.parametrize("trained", ["in_proj_b", "A_log", "conv1d", "in_proj_qkv"])
def test_one_trained_parameter_of_the_first_layer(trained):
    """Nothing before it has a gradient, so the states are differentiable through this parameter alone."""
    model = tiny_model("qwen3_5_text")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"layers.0.linear_attn.{trained}" in name)
    assert_equals_flat(model, [DEEP], capacity=6)


@cache
def forest(seed):
    return random_forest(
        100 + seed, num_leaves=7, mean_len=3, root_probability=0.15, prefix_probability=0.15, vocab_size=VOCAB_SIZE
    )


def result_of_flat_rows(model, case, *, seed):
    model.set_attn_implementation("sdpa")
    with oracle(model):
        scores = flat_rows(model, forest(seed))
        data = verl_rows(forest(seed), scores, case, seed=seed)
        rows = lay_out(data, capacity=2, mode="rows").rows
        return data, flat_result(model, data, scores, case, rows=rows)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vanilla", {}),
        ("gspo", {"recomputes": False, "max_loss_terms": 7}),
        ("gspo", {"recomputes": True, "on_host": True}),
        ("kl_cov", {"recomputes": False, "on_host": True}),
    ],
)
# What torch says of a layer that it will recompute, but whose forward runs without gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_losses_of_rows_and_losses_that_couple_them(name, options):
    """Spine first and joint, with the store on the device and the host, with both kinds of gradient checkpointing."""
    model, case = tiny_model("qwen3_5_text"), LossCase(name)
    options = dict(options)
    use_reentrant = options.pop("recomputes", None)
    with Float64():
        data, want = result_of_flat_rows(model, case, seed=0)
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.train()
        RecurrentLayers(model).bind()
        for capacity in (3, 9):
            got = relayed_result(model, data, case, capacity=capacity, **options)
            assert worst_error(got, want) < 1e-10, capacity


@pytest.mark.parametrize("function", ["chunk_gated_delta_rule", "causal_conv1d_fn"])
@pytest.mark.parametrize("direction", ["down", "up"])
def test_states_that_are_not_handed_on_are_missed(function, direction, monkeypatch):
    """Guards the tests above: without the states of one kind, or their gradients, the result is another one."""
    model, case = tiny_model("qwen3_5_text"), LossCase("vanilla")
    name = {"down": "entered", "up": "handed_up"}[direction]
    relayed, lost = getattr(StateRelay, name), []

    def forget(states):
        found = relayed(states)
        if found is None or states._key[1] != function:
            return found
        lost.append(found.abs().max().item())
        return torch.zeros_like(found)

    with Float64():
        data, want = result_of_flat_rows(model, case, seed=0)
        monkeypatch.setattr(StateRelay, name, forget)
        with RecurrentLayers(model).bound():
            got = relayed_result(model, data, case, capacity=5)
    assert max(lost) > 1e-4
    assert worst_error(got, want) > 1e-3


@pytest.mark.parametrize(("mode", "capacity"), [("forward", 8), ("rows", 4)])
def test_a_token_changes_no_score_outside_its_subtree_bit_for_bit(mode, capacity):
    """In float32."""
    model = tiny_model("qwen3_5_text").float()
    data = verl_rows(forest(2), flat_rows(model, forest(2)), LossCase("vanilla"), seed=0)
    micro = lay_out(data, capacity=capacity, mode=mode)
    with RecurrentLayers(model).bound():
        tokens = range(0, micro.layout.num_tokens, 5)
        assert_a_token_changes_its_subtree_only(model, micro, mode=mode, tokens=tokens)
