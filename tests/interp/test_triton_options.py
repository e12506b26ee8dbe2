"""Sliding windows, softcaps and sinks in the Triton kernels, interpreted: against the dense backend in float64."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it among a kernel's globals)
from model_cases import flat_logits, loss_of, tree_logits
from tiny_models import tiny_model
from tree_cases import DEEP, gradients, relative_error
from triton_cases import TOLERANCE, Case, draw_inputs, draw_plan, run, worst_error

from verl_tree.attention import AttentionPlan, triton_kernels, triton_key_kernels
from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.dense import dense_attention
from verl_tree.attention.row_cuts import KeyRows
from verl_tree.attention.self_test import KernelVariant, self_test, subtree_ends
from verl_tree.attention.triton_backend import triton_attention
from verl_tree.attention.triton_configs import KernelConfig, KernelConfigs

NAMES = ("window", "softcap", "sinks")
COMBINATIONS = [names for count in (1, 2, 3) for names in itertools.combinations(NAMES, count)]
NUM_CASES = 2 * len(COMBINATIONS)
CONTEXT_LENS = (*[0] * len(COMBINATIONS), 1, 7, 16, 20, 25, 31, 33)


def draw_small_case(seed, *, num_context=0):
    """Draw a trunk with branches and a second root, in tiles so small that a window leaves some out and others full.

    The trunk has 34 tokens or more; its first `num_context` are context.
    """
    rng = np.random.default_rng(seed)
    trunk, long = rng.integers(34, 56), rng.integers(12, 30)
    a, b, c, d, root = rng.integers(1, 10, size=5)
    trees = ((trunk, ((a, ()), (long, ((b, ()), (c, ()))), (d, ()))), (root, ()))
    plan = AttentionPlan.from_subtree_end(np.array(subtree_ends(trees)), num_context=num_context)
    num_groups, head_dim = int(rng.choice([1, 2])), int(rng.choice([16, 24, 32]))
    configs = [KernelConfig(*rng.choice([16, 32], size=2).tolist(), 4, 1) for _ in range(3)]
    sizes = {"num_groups": num_groups, "num_kv_heads": 1, "head_dim": head_dim}
    inputs = draw_inputs(rng, num_tokens=plan.num_tokens, num_context=num_context, **sizes)
    return Case(plan, KernelConfigs(*configs), inputs, scale=float(rng.uniform(0.5, 1.5) * head_dim**-0.5))


def draw_option_case(index):
    """Draw a layer that asks for one combination of options; every combination comes twice, once behind a context."""
    case = draw_small_case(index, num_context=CONTEXT_LENS[index])
    names = COMBINATIONS[index % len(COMBINATIONS)]
    rng = np.random.default_rng(index)
    sinks = torch.from_numpy(2 * rng.standard_normal(case.inputs[0].shape[1])).float()
    return dataclasses.replace(
        case,
        window=(45, 1, 33, 40)[index % 4] if "window" in names else None,
        softcap=float(np.exp(rng.uniform(np.log(0.3), np.log(60)))) if "softcap" in names else None,
        sinks_H=sinks if "sinks" in names else None,
    )


@pytest.mark.parametrize("index", range(NUM_CASES))
def test_options_equal_dense_in_float64(index, run_triton):
    case = draw_option_case(index)
    want = run(dense_attention, case, dtype=torch.float64)
    # The gradient of a sink may be a small sum of large terms, whose rounding differs from processor to processor.
    plain = worst_error(run(dense_attention, case), want, case)
    assert worst_error(run_triton(case), want, case) < max(TOLERANCE, 4 * plain)
    assert plain < TOLERANCE, "or a wrong kernel would pass"


def test_the_cases_reach_every_kind_of_tile_and_option():
    """Guards the test above: tiles that only the window skips, masks or leaves full; windows, softcaps that bite."""
    skipped = masked = full = 0
    cases = [draw_option_case(index) for index in range(NUM_CASES)]
    for case in cases:
        for config in (case.configs.forward, case.configs.dkv, case.configs.dq) if case.window else ():
            sizes = {"query_block": config.query_block, "key_block": config.key_block}
            tree, windowed = (
                BlockLists.of_plan(case.plan, **sizes, window=window).by_query for window in (None, case.window)
            )
            num_full, num_full_in_window = (
                int((rows.rows_R4[:, 2] - rows.rows_R4[:, 1]).sum()) for rows in (tree, windowed)
            )
            skipped += len(windowed.indices) < len(tree.indices)
            masked += num_full_in_window < num_full and len(windowed.indices) == len(tree.indices)
            full += num_full_in_window > 0
    assert min(skipped, masked, full) > 2, (skipped, masked, full)
    caps = [case.softcap for case in cases if case.softcap is not None]
    assert min(caps) < 1
    assert max(caps) > 20
    assert len({(case.window is None, case.softcap is None, case.sinks_H is None) for case in cases}) == 7


@triton.jit
def _sees_one_too_many(query_position, key_position, window):
    return query_position - key_position <= window


@pytest.mark.parametrize("mutation", ["window + 1", "window - 1", "distance <= window"])
@pytest.mark.parametrize("num_context", [0, 21])
def test_a_mutated_window_is_found(mutation, num_context, run_triton, monkeypatch):
    """A window that is off by one, for the kernels and their tiles or inside the kernels, is far out of tolerance."""
    case = dataclasses.replace(draw_small_case(0, num_context=num_context), window=7)
    assert case.plan.max_path_len > 8
    want = run(dense_attention, case, dtype=torch.float64)
    if mutation == "distance <= window":
        for module in (triton_kernels, triton_key_kernels):
            monkeypatch.setattr(module, "is_within", _sees_one_too_many)
    mutated = dataclasses.replace(case, window={"window + 1": 8, "window - 1": 6}.get(mutation, 7))
    assert worst_error(run_triton(mutated), want, case) > 1000 * TOLERANCE


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # which is how tanh reaches -1
def test_scores_far_beyond_the_cap_and_sinks_far_beyond_the_scores(run_triton):
    """Neither tanh nor its gradient overflows; one sink takes all, another nothing."""
    rng = np.random.default_rng(0)
    q, k, v, grad_out = draw_inputs(rng, num_tokens=40, num_groups=2, num_kv_heads=1, head_dim=16)
    case = Case(
        plan=draw_plan(rng, num_tokens=40),
        configs=KernelConfigs(*(KernelConfig(32, 32, 4, 1),) * 3),
        inputs=(100 * q, k, v, grad_out),
        scale=1.0,
        softcap=3.0,
        sinks_H=torch.tensor([40.0, -90.0]),
    )
    got, want = run_triton(case), run(dense_attention, case, dtype=torch.float64)
    assert worst_error(got, want, case) < TOLERANCE
    assert got[0][:, 0].abs().max() < 1e-10
    assert got[0][:, 1].abs().max() > 0.1


def test_the_self_test_accepts_bfloat16_with_every_option():
    """The limits hold for what rounding does; heads as few as they get, as the forest has 703 tokens."""
    variant = KernelVariant(torch.device("cpu"), torch.bfloat16, 16, 1, 1, True, True, True)
    assert self_test(triton_attention, variant) == []


def test_the_op_with_options_is_registered_in_full():
    """Schema, fake implementation and autograd agree with the op (torch.library.opcheck)."""
    rng = np.random.default_rng(0)
    plan = AttentionPlan.from_subtree_end(torch.tensor([8, 8, 5, 5, 5, 8, 8, 8]))
    q, k, v, _ = draw_inputs(rng, num_tokens=8, num_groups=2, num_kv_heads=1, head_dim=16)
    lists = BlockLists.of_plan(plan, query_block=16, key_block=16, window=3)
    by_query, (*by_key, num_slots) = list(lists.by_query), KeyRows.from_rows(lists.by_key, bound=None)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, torch.zeros(2))]
    args = (*leaves[:3], plan.subtree_end_T, by_query, by_key, by_query, [16, 16, 4, 1] * 3, num_slots, 0.25)
    options = (leaves[3], plan.position_T, 3, 2.0)
    torch.library.opcheck(torch.ops.verl_tree.tree_attention_triton.default, (*args, *options))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_a_model_gives_the_logits_and_gradients_of_flat_sequences(name):
    """In float32 against transformers' eager attention in float64: at most three times the error of `dense`."""
    model = tiny_model(name)
    want = flat_logits(model, DEEP)
    wanted = gradients(model, loss_of(want))
    model.float()
    errors = {}
    for backend in ("dense", "triton"):
        logits = [x.double() for x in tree_logits(model, DEEP, backend=backend)]
        found = gradients(model, loss_of(logits))
        assert found.keys() == wanted.keys()
        assert len(found) > 10
        errors[backend] = {name: relative_error(found[name].double(), wanted[name]) for name in wanted}
        errors[backend]["logits"] = max(map(relative_error, logits, want))
    for name, plain in errors["dense"].items():
        assert errors["triton"][name] <= max(3 * plain, 5e-6) < 1e-3, name


def test_layers_may_ask_for_different_options_of_one_plan(run_triton):
    """Full, sliding and full layers share the plan; the tiles of one must not serve the other."""
    case = draw_small_case(1)
    sliding = dataclasses.replace(case, window=2)
    before = run_triton(case)
    assert worst_error(run_triton(sliding), run(dense_attention, sliding, dtype=torch.float64), sliding) < TOLERANCE
    assert all(torch.equal(one, other) for one, other in zip(run_triton(case), before, strict=True))
