"""What a model call sees of the store: the keys and values of its context, and states of recurrent layers.

One autograd function in front of attention relays keys and values. Forward, it puts those of the context before those
of the call. Backward, it adds the context's gradients to the store, and it takes from the store what later sections
have added for the call's own tokens. Sections run backward last to first, so by then all of them have.

Attention would save what it got for its backward pass: a copy of the context in every layer. So it saves the call's own
keys and values, and the context is put before them once more when the layer runs backward.

Legend: P tokens of a call's context, Q the call's own tokens, H key-value heads, D head dim.
"""

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_tree.relay.calls import RelayCall
from verl_tree.relay.states import StateRelay
from verl_tree.relay.store import ContextStore
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.transfer import to_device


class RelayContext:
    """What one call sees of the store; it travels with the call's `AttentionPlan` (`verl_tree.tree.plan.Context`).

    With `writes`, the call stores the keys and values of its own spine tokens, and the states after its cut tokens. It
    then must run without gradient.

    Attributes:
        cut_places: int64, the tokens of the call that are cut tokens, ascending.
    """

    def __init__(self, store: ContextStore, call: RelayCall, *, writes: bool, device: torch.device) -> None:
        self._store = store
        self._writes = writes
        self._num_context = call.num_context
        self._context_rows = _slice_or_index(call.context_rows_P, device=device)
        self._own_places = _slice_or_index(call.spine_places, device=device)
        self._own_rows = call.spine_rows
        self._relays = call.num_context > 0 or len(call.spine_places) > 0
        self._call, self._device = call, device
        self.cut_places = call.cut_places

    def extend(self, layer: torch.nn.Module, key_QHD: Tensor, value_QHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the context followed by those given, (P + Q, H, D) each; differentiable.

        `layer` is the attention module. Called again in the recomputation of a layer, it returns the same.
        """
        if not self._relays:
            return key_QHD, value_QHD
        if self._writes:
            assert not torch.is_grad_enabled(), "a section's context must not change before its backward pass"
            own = (key_QHD[self._own_places], value_QHD[self._own_places])
            self._store.put(layer, self._own_rows, own)
        return _Relay.apply(key_QHD, value_QHD, self, layer)

    def states(self, key: Hashable) -> StateRelay:
        """Return what relays the states that a recurrent layer keeps under `key`."""
        return StateRelay(
            self._store, key, entered_rows=self._entered_rows, cut_rows=self._call.cut_rows, writes=self._writes
        )

    @cached_property
    def _entered_rows(self) -> Tensor | slice:
        return _slice_or_index(self._call.entered_rows_E, device=self._device)

    def save_own(
        self, layer: torch.nn.Module, own: tuple[Tensor, Tensor], extended: tuple[Tensor, Tensor]
    ) -> AbstractContextManager[object]:
        """Let autograd save `own` where the body saves `extended = extend(layer, *own)` as it is.

        Where other hooks look after saved tensors nothing is done, because hooks do not add up. Gradient checkpointing
        has such hooks; it holds the context of one layer at a time anyway.
        """
        internals: Any = torch._C  # torch's stubs lack `_autograd`
        others = internals._autograd._top_saved_tensors_default_hooks(True)
        if self._num_context == 0 or not torch.is_grad_enabled() or others is not None:
            return nullcontext()
        number_of = {_identity(each): number for number, each in enumerate(extended)}
        own_key, own_value = (each.detach() for each in own)
        again: dict[int, Tensor] = {}

        def pack(saved: Tensor) -> Tensor | int:
            number = number_of.get(_identity(saved))
            return saved if number is None else number

        def unpack(packed: Tensor | int) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            if packed not in again:
                again.update(enumerate(self.hand_down(layer, own_key, own_value)))
            return again.pop(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def hand_down(self, layer: torch.nn.Module, key_QHD: Tensor, value_QHD: Tensor) -> tuple[Tensor, Tensor]:
        """Do the forward half of `extend`."""
        if self._num_context == 0:
            return key_QHD.view_as(key_QHD), value_QHD.view_as(value_QHD)
        key_KHD, value_KHD = self._store.get(layer)
        rows = self._context_rows
        return torch.cat((_take(key_KHD, rows), key_QHD)), torch.cat((_take(value_KHD, rows), value_QHD))

    def hand_up(self, layer: torch.nn.Module, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Do the backward half: from gradients of (P + Q, H, D) keys and values to those of the call's own."""
        above = (grad_key[: self._num_context], grad_value[: self._num_context])
        # No row is both in the context and the call's own.
        sums = self._store.add(layer, self._context_rows, above)
        # Autograd may share the incoming tensors, so the sums go into copies.
        own_key, own_value = grad_key[self._num_context :].clone(), grad_value[self._num_context :].clone()
        for gradient, total in zip((own_key, own_value), sums, strict=True):
            summed = gradient[self._own_places] + total[self._own_rows]
            gradient[self._own_places] = summed.to(gradient.dtype)
        return own_key, own_value


class _Relay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key_QHD: Tensor, value_QHD: Tensor, context: RelayContext, layer: torch.nn.Module
    ) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.layer = context, layer
        return context.hand_down(layer, key_QHD, value_QHD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
    return *ctx.context.hand_up(ctx.layer, grad_key, grad_value), None, None


def _identity(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """Return what tells living tensors apart that autograd hands out as other objects."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _take(tensor: Tensor, rows: Tensor | slice) -> Tensor:
    """Return some rows; on a CPU twice as fast as `tensor[rows]` where they are an index."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _slice_or_index(rows: IntArray, *, device: torch.device) -> Tensor | slice:
    """Return ascending rows as a slice, which copies nothing, if they are neighbours, else as an index."""
    if len(rows) == 0:
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == len(rows):
        return slice(first, last + 1)
    (index,) = to_device((torch.from_numpy(np.ascontiguousarray(rows)),), device)
    return index
