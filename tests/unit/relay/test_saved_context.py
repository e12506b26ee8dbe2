"""Attention with a context saves for its backward pass what it was given, not the context: that is in the store."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from verl_tree.attention import tree_attention
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.context import RelayContext
from verl_tree.relay.store import ContextStore
from verl_tree.tree.plan import AttentionPlan

NUM_CONTEXT, NUM_TOKENS, NUM_HEADS, HEAD_DIM = 1000, 8, 2, 16
COPY_BYTES = 2 * NUM_CONTEXT * NUM_HEADS * HEAD_DIM * 8  # keys and values of the context in float64


class Layer:
    """One attention layer of a section whose context is a path, with the store that holds it."""

    def __init__(self, *, on_host: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def draw(num_rows: int) -> Tensor:
            return torch.randn(num_rows, NUM_HEADS, HEAD_DIM, generator=generator, dtype=torch.float64)

        alone = RelayCall.of_pack(np.full(NUM_TOKENS, NUM_TOKENS), scorer_T=np.full(NUM_TOKENS, -1))
        call = dataclasses.replace(alone, context_rows_P=np.arange(NUM_CONTEXT))
        self.module = torch.nn.Identity()
        self.store = ContextStore(NUM_CONTEXT, on_host=on_host)
        self.store.put(self.module, slice(0, NUM_CONTEXT), (draw(NUM_CONTEXT), draw(NUM_CONTEXT)))
        self.context = RelayContext(self.store, call, writes=False, device=torch.device("cpu"))
        every = NUM_CONTEXT + NUM_TOKENS
        self.plan = AttentionPlan.from_subtree_end(np.full(every, every), num_context=NUM_CONTEXT)
        self.query, self.key, self.value = (draw(NUM_TOKENS).requires_grad_() for _ in range(3))

    def attend(self, *, saves_own: bool) -> Tensor:
        own = (self.key, self.value)
        extended = self.context.extend(self.module, *own)
        with self.context.save_own(self.module, own, extended) if saves_own else nullcontext():
            return tree_attention(self.query, *extended, self.plan)

    def gradients(self, out: Tensor) -> list[Tensor]:
        """Return those of queries, keys and values, and what was handed up for the context."""
        own = torch.autograd.grad(out.square().sum(), (self.query, self.key, self.value))
        return [*own, *self.store.added(self.module)]


def kept_bytes(compute: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Return the bytes that are still allocated after a computation, its result included, and the result."""
    with profile(profile_memory=True) as profiled:
        out = compute()
    events: Any = profiled  # torch's stubs lack `nbytes`
    results = events.kineto_results
    return sum(event.nbytes() for event in results.events() if event.name() == "[memory]"), out


@pytest.mark.parametrize("on_host", [False, True])
def test_the_copy_of_the_context_is_not_kept_and_gradients_are_the_same(on_host: bool) -> None:
    plain, saving = Layer(on_host=on_host), Layer(on_host=on_host)
    plain_bytes, want = kept_bytes(lambda: plain.attend(saves_own=False))
    saving_bytes, got = kept_bytes(lambda: saving.attend(saves_own=True))
    assert plain_bytes > COPY_BYTES
    assert saving_bytes < COPY_BYTES / 10
    assert torch.equal(got, want)
    for mine, its in zip(saving.gradients(got), plain.gradients(want), strict=True):
        assert its.abs().max() > 1e-6
        assert torch.equal(mine, its)


def test_other_hooks_on_saved_tensors_are_left_alone() -> None:
    """Gradient checkpointing drops what its hooks get; a tensor that passes them by would be kept."""
    num_packed = []
    for saves_own in (False, True):
        packed: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda each, to=packed: to.append(each) or each, lambda each: each
        ):
            Layer().attend(saves_own=saves_own)
        num_packed.append(len(packed))
    assert num_packed[0] == num_packed[1] > 0
