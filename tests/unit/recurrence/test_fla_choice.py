"""Where flash-linear-attention serves, its self-test, and models by levels; tests/interp runs its kernels."""

import logging
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from delta_rule_cases import varlen_gated_delta_rule
from hybrid_cases import assert_equals_flat, gradients_of_packs, loss_of
from tiny_models import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cases import DEEP, random_sequences

from verl_tree.attention import AttentionPlan
from verl_tree.functional import tree_log_probs
from verl_tree.recurrence import fla, stand_ins
from verl_tree.recurrence.delta_rule import tree_gated_delta_rule
from verl_tree.recurrence.levels import TreeLevels, rule_by_levels
from verl_tree.tree import kernel_test

CPU_VARIANT = fla.DeltaRuleVariant(torch.device("cpu"), torch.float32, num_heads=2, key_dim=8, value_dim=6)
by_segments = partial(rule_by_levels, varlen_gated_delta_rule, normalizes=True)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(kernel_test, "_results", {})
    monkeypatch.setattr(kernel_test, "_told", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # a torch without CUDA raises


@pytest.fixture
def on_gpu(monkeypatch):
    """Ask for inputs that say they are on a GPU, where the package is installed and its self-test finds `faults`."""

    def serves(*, node_lens=(64, 64, 64), dtype=torch.bfloat16, is_installed=True, faults=()):
        tested = []
        monkeypatch.setattr(fla.importlib.util, "find_spec", lambda _name: object() if is_installed else None)
        fla.installation_reasons.cache_clear()
        monkeypatch.setattr(fla, "self_test", lambda _rule, variant: tested.append(variant) or list(faults))
        ends = [sum(node_lens), *np.cumsum(node_lens)[1:].tolist()]
        plan = AttentionPlan.from_subtree_end(np.repeat(ends, node_lens))
        with FakeTensorMode():
            q, k, v = (torch.empty(sum(node_lens), 4, 16, dtype=dtype, device="cuda") for _ in range(3))
            beta = torch.empty(sum(node_lens), 4, dtype=dtype, device="cuda")
        return fla.serves(q, k, v, beta_TH=beta, plan=plan), tested

    return serves


def test_on_a_gpu_it_serves_once_it_agrees_with_torch(on_gpu, caplog):
    caplog.set_level(logging.INFO)
    served, tested = on_gpu()
    assert served
    assert tested == [fla.DeltaRuleVariant(torch.device("cuda", 0), torch.bfloat16, 4, 16, 16)]
    assert on_gpu() == (True, [])
    assert caplog.messages == ["recurrent layers: flash-linear-attention, level by level"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"is_installed": False}, "install the extra fla (pip install 'verl-tree[fla]')"),
        ({"dtype": torch.float32}, "dtype float32 is none of bfloat16, float16"),
        ({"node_lens": (64, 64, 63)}, "fewer than 64 tokens per node"),
        ({"faults": ["self-test: worst relative error of dk"]}, "worst relative error of dk"),
    ],
)
def test_elsewhere_torch_serves_and_the_log_says_why_once(on_gpu, caplog, options, reason):
    for _ in range(2):
        assert not on_gpu(**options)[0]
    (record,) = [record for record in caplog.records if record.name == "verl_tree.recurrence.fla"]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("recurrent layers: torch, as flash-linear-attention does not serve: ")
    assert reason in record.getMessage()


def test_on_a_cpu_torch_serves_and_nothing_is_asked(caplog):
    q = torch.zeros(3, 2, 8)
    assert not fla.serves(q, q, q, beta_TH=q[..., 0], plan=AttentionPlan.from_subtree_end(np.full(3, 3)))
    assert not caplog.records


def test_self_test_passes_a_right_kernel():
    assert fla.self_test(by_segments, CPU_VARIANT) == []


def test_its_forest_has_nodes_around_a_chunk_on_several_levels():
    plan = AttentionPlan.from_subtree_end(np.repeat(fla.RUN_ENDS, fla.RUN_LENS))
    levels = TreeLevels.of_plan(plan, chunk_size=64)
    assert [len(call.cu_seqlens_N) - 1 for call in levels.inner] == [2, 2]
    assert levels.num_root_leaves == 1
    assert {1, 64, 65} <= set(fla.RUN_LENS)
    assert levels.num_nodes == len(fla.RUN_LENS)


def wrong_states(*inputs, initial_state, **options):
    """Start every node with the state of its neighbour."""
    if initial_state is not None:
        initial_state = initial_state.roll(1, dims=0)
    return varlen_gated_delta_rule(*inputs, initial_state=initial_state, **options)


def no_initial_gradient(*inputs, initial_state, **options):
    """Lose the gradient of initial states."""
    if initial_state is not None:
        initial_state = initial_state.detach()
    return varlen_gated_delta_rule(*inputs, initial_state=initial_state, **options)


def late_state(*inputs, **options):
    """Return states that lack a part of what the last token wrote."""
    out, state = varlen_gated_delta_rule(*inputs, **options)
    return out, None if state is None else state * 0.9


@pytest.mark.parametrize(
    ("kernel", "wrong"),
    [
        (wrong_states, {"output", "dq", "dk", "dv", "dg", "dbeta"}),
        (no_initial_gradient, {"dk", "dv", "dg", "dbeta"}),
        (late_state, {"output", "dq", "dk", "dv", "dg", "dbeta"}),
    ],
)
def test_self_test_sees_a_wrong_kernel(kernel, wrong):
    reasons = fla.self_test(partial(rule_by_levels, kernel, normalizes=True), CPU_VARIANT)
    assert {reason.split("error of ")[1].split()[0] for reason in reasons} == wrong


@pytest.fixture
def by_levels(monkeypatch):
    """Let models run by levels, with a stand-in for the package: transformers' own rule on each node."""
    stand_in = SimpleNamespace(chunk_gated_delta_rule=varlen_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", stand_in)
    monkeypatch.setattr(fla, "serves", lambda *_, **__: True)
    monkeypatch.setattr(stand_ins, "tree_gated_delta_rule", lambda *_, **__: pytest.fail("torch was chosen"))


@pytest.mark.usefixtures("by_levels")
def test_a_model_by_levels_equals_the_flat_path():
    model = tiny_model("qwen3_5_text")
    sequences = random_sequences(np.random.default_rng(2), num_sequences=9, mean_len=12)
    assert_equals_flat(model, [sequences])


def test_a_pack_is_computed_again_by_the_backend_of_its_forward(monkeypatch):
    """A self-test that found no memory runs again, and may pass at the next call."""
    asked, used = [], []
    monkeypatch.setattr(fla, "serves", lambda *_, **__: asked.append(1) or len(asked) > 1)
    monkeypatch.setattr(
        stand_ins, "tree_gated_delta_rule", lambda *_, **__: used.append("torch") or tree_gated_delta_rule(*_, **__)
    )
    model = tiny_model("qwen3_5_text").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    scores = tree_log_probs(model, DEEP, calculate_entropy=True)
    loss_of(scores.log_probs, scores.entropy).backward()
    assert asked == [1]
    assert used == ["torch"] * 4  # two layers, twice


@pytest.mark.usefixtures("by_levels")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_by_levels(use_reentrant):
    model = tiny_model("qwen3_5_text").train()
    want = gradients_of_packs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    torch.testing.assert_close(gradients_of_packs(model), want, rtol=1e-12, atol=1e-12)
