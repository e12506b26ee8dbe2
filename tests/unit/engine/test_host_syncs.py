"""How often the host waits for a device in an update, counted without a GPU (`pretend_device`)."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from pretend_device import DEVICE, HostEvents, held, to_pretended
from process_groups import group_of_one
from relay_cases import CPU, WeightedLoss
from sync_cases import Update, pretend
from tiny_models import tiny_model
from tree_cases import DEEP, layout_of

from verl_tree.attention import AttentionPlan
from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.fa4 import BlockTables
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.attention.row_cuts import KeyRows
from verl_tree.attention.varlen_providers import few_calls
from verl_tree.engine.losses.session_weights import weigh_sessions
from verl_tree.engine.rows import micro_batch
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.tree import transfer

WHOLE, SECTIONS = 10**6, 60
"""Capacities: the rows of `Update` are one pack, or a tree in five sections and one call for its spine."""


@pytest.fixture
def events(monkeypatch):
    pretend(monkeypatch)
    return HostEvents()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 1],
        lambda x: x.masked_select(x > 1),
        lambda x: x.unique(),
        lambda x: x.unique_consecutive(),
        lambda x: x.repeat_interleave(x),
        lambda x: x[torch.tensor([1, 0])],
        lambda x: x.index_put((x > 1,), x[:1]),
        lambda _: torch.tensor([1, 2], device=DEVICE),
        lambda _: torch.arange(3).to(DEVICE),
        lambda _: torch.arange(3).to(DEVICE, non_blocking=True),
        lambda _: torch.empty(3, pin_memory=True).to(DEVICE),
        lambda x: torch.zeros_like(x).copy_(torch.arange(3)),
    ],
)
def test_the_counter_sees_each_kind_of_wait(events, wait):
    with events.noted():
        x = torch.arange(3, device=DEVICE)
        wait(x)
    assert (len(events.syncs), len(events.copies)) == (1, 0)


def test_what_the_host_does_not_wait_for_is_no_sync(events):
    with events.noted():
        x = torch.arange(3, device=DEVICE)
        buffer = torch.empty(3, dtype=torch.int64, pin_memory=True)
        buffer.numpy()[:] = [2, 0, 1]
        index = buffer.to(DEVICE, non_blocking=True)
        x.repeat_interleave(x, output_size=3)[index].float().softmax(0).masked_fill(x > 1, 0.0)
        assert held(x[index]).tolist() == [2, 0, 1]
    assert (events.syncs, len(events.copies)) == ([], 1)


def test_tensors_of_host_and_device_do_not_mix(events):
    with events.noted(), pytest.raises(AssertionError, match="add got tensors of the host and of the device"):
        torch.arange(3, device=DEVICE) + torch.arange(3)


@pytest.mark.parametrize("capacity", [WHOLE, SECTIONS])
@pytest.mark.parametrize("backend", ["dense", "fa4"])
def test_an_update_waits_for_its_losses_once(events, capacity, backend):
    """Neither a layer nor a model call nor a micro-batch of ours waits; only verl's losses do, for their metrics."""
    update = Update()
    micro = update.micro_batch(capacity=capacity)
    events, result = update.run([micro, micro], backend=backend)
    num_losses = len(result["loss"])
    assert num_losses == 2 * micro.cut.num_sections == (2 if capacity == WHOLE else 10)
    assert [(each.kind, each.place.split(":")[0]) for each in events.syncs_of("verl_tree")] == [
        ("copy to the host", "engine/rows/results.py")
    ]
    assert events.syncs_of("transformers", "") == []
    assert len(events.syncs_of("verl")) == 5 * num_losses


@pytest.mark.parametrize("rows_of_a_session", [1, 2])
def test_weights_of_sessions_are_read_on_the_host(events, rows_of_a_session):
    """Where all rows of a call weigh the same, they go through verl's loss as without weights."""
    update = Update(case=WeightedLoss())
    num_sessions, rest = divmod(len(update.sequences), rows_of_a_session)
    assert rest == 0
    with group_of_one():
        weigh_sessions(update.data, [*range(num_sessions)] * rows_of_a_session, group=None)
    events, _ = update.run([update.micro_batch(capacity=WHOLE)], backend="fa4")
    places = Counter((each.package, each.place.split(":")[0]) for each in events.syncs)
    assert places.pop(("verl_tree", "engine/rows/results.py")) == 1
    assert {package for package, _ in places} == {"verl"}
    assert places.total() == 5


def test_forward_only_waits_once_for_each_kind_of_score(events):
    update = Update()
    micro = update.micro_batch(capacity=SECTIONS)
    with torch.no_grad():
        events, _ = update.run([micro, micro], backend="fa4", forward_only=True)
    assert Counter((each.kind, each.place.split(":")[0]) for each in events.syncs) == {
        ("copy to the host", "engine/rows/results.py"): 2
    }


@pytest.mark.parametrize("checkpoints", [False, True])
def test_nothing_goes_over_for_a_layer_or_its_recomputation(events, checkpoints):
    found = []
    for num_layers in (1, 3):
        update = Update(num_layers=num_layers, checkpoints=checkpoints)
        events, _ = update.run([update.micro_batch(capacity=WHOLE)], backend="fa4")
        found.append((len(events.syncs), len(events.copies)))
    assert found[0] == found[1]
    # The layout, the plan, the tables of both directions, the inputs of the model, its scored tokens, the rows of the
    # loss, and where they read the scores.
    assert found[0][1] == 7


def test_the_pretended_update_is_the_one_of_the_host(monkeypatch):
    """Losses and gradients, so that what is counted is what is computed."""
    found = []
    for device in (CPU, DEVICE):
        with monkeypatch.context() as patched:
            pretend(patched)
            patched.setattr(micro_batch, "device_of_rank", lambda device=device: device)
            update = Update(device=device)
            micro = update.micro_batch(capacity=SECTIONS)
            _, result = update.run([micro], backend="dense" if device == CPU else "fa4")
            found.append((result["loss"], update.gradients()))
    (want_losses, want), (losses, got) = found
    assert losses == pytest.approx(want_losses, rel=1e-10)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-9, atol=1e-12)


def test_log_probs_of_a_pack_wait_for_nothing(events):
    """The path of `tree_log_probs`: the plan of a layout on the device, and a temperature by position."""
    model = tiny_model()
    model.set_attn_implementation(ATTENTION_NAME)
    host = layout_of(DEEP)
    temperature_T = torch.linspace(0.5, 1.5, host.num_tokens)
    want = tree_forward_log_probs(
        model, host, plan=AttentionPlan.from_layout(host, backend="dense"), temperature=temperature_T
    )
    to_pretended(model)
    with events.noted():
        layout = host.to(DEVICE)
        plan = AttentionPlan.from_layout(layout, backend="dense")
        got = tree_forward_log_probs(model, layout, plan=plan, temperature=temperature_T, chunk_size=4)
        got.log_probs_T.sum().backward()
    assert events.syncs == []
    torch.testing.assert_close(held(got.log_probs_T), want.log_probs_T, rtol=1e-10, atol=1e-12)
    assert layout.to("cpu") is host


KEY_ROWS = {"query_block": 4, "key_block": 2, "window": None, "num_groups": 2, "num_kv_heads": 1, "num_processors": 3}


@pytest.mark.parametrize(
    ("make", "num_copies"),
    [
        (partial(BlockTables.of_plan, head_dim=64), 1),
        (partial(BlockTables.of_plan, head_dim=256), 1),
        (partial(KeyRows.of_plan, **KEY_ROWS), 1),
        (lambda plan: BlockLists.of_plan(plan, query_block=4, key_block=2).by_key, 1),
        (lambda plan: few_calls(plan, None), 3),
        (lambda plan: few_calls(plan, 3), 1),
    ],
)
def test_tables_of_a_plan_go_over_once(events, make, num_copies):
    """Tokens 0 1 | 2 | 3 4 | 5 | 6 | 7 8 | 9: `few_calls` are the triangles, and rectangles on two levels."""
    with events.noted():
        plan = AttentionPlan.from_subtree_end(np.array([10, 10, 6, 5, 5, 6, 10, 9, 9, 10]), device=DEVICE)
        num_before = len(events.copies)
        made = make(plan)
        assert make(plan) is made
    assert (events.syncs, len(events.copies) - num_before) == ([], num_copies)


def test_one_copy_keeps_values_shapes_and_alignment(events):
    given = (torch.arange(5), torch.tensor([True, False]), torch.ones(2, 3), torch.empty(0, 4), torch.tensor(7))
    with events.noted():
        moved = transfer.to_device(given, DEVICE)
    assert (events.syncs, len(events.copies)) == ([], 1)
    for each, there in zip(given, moved, strict=True):
        assert (there.dtype, there.shape, there.device) == (each.dtype, each.shape, DEVICE)
        assert held(there).equal(each)
        assert held(there).storage_offset() * each.itemsize % transfer.ALIGNMENT_BYTES == 0
    assert transfer.to_device(given, "cpu") == given
