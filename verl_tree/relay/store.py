"""Keys and values of the spine, handed down to later sections, and their gradients, handed back up.

The store has two buffers for every attention layer: the keys and values of the spine's tokens, and the sums of their
gradients in float32 (in float64 for a float64 model). One autograd function in front of attention relays them. Forward,
it puts the keys and values of the context before those of the call. Backward, it adds the context's gradients to the
store, and it takes from the store what later sections have added for the call's own tokens. Sections run backward last
to first, so by then all of them have.

Attention would save what it got for its backward pass: a copy of the context in every layer. So it saves the call's own
keys and values, and the context is put before them once more when the layer runs backward.

With `on_host` the buffers are in host memory (`verl_tree.relay.host`).

Legend: K tokens of the spine, P tokens of a call's context, Q the call's own tokens, H key-value heads, D head dim.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_tree.relay.calls import RelayCall
from verl_tree.relay.host import HostBuffer, HostCopies
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.transfer import to_device


class Buffer(Protocol):
    """Two tensors (K, H, D) of one layer: keys and values, or their gradients."""

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        ...

    def fetch(self) -> tuple[Tensor, Tensor]:
        """Return both on the layer's device. After a change in place, `put_back` stores it."""
        ...

    def put(self, rows: slice, given: tuple[Tensor, Tensor]) -> None:
        """Store some rows, (n, H, D) each."""
        ...

    def put_back(self, fetched: tuple[Tensor, Tensor]) -> None:
        """Store what `fetch` returned and the caller changed."""
        ...


class DeviceBuffer:
    """A buffer on the layer's device: it hands out its own tensors."""

    def __init__(self, tensors: tuple[Tensor, Tensor]) -> None:
        self._tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(each.nbytes for each in self._tensors)

    def fetch(self) -> tuple[Tensor, Tensor]:
        """Return both tensors themselves."""
        return self._tensors

    def put(self, rows: slice, given: tuple[Tensor, Tensor]) -> None:
        """Store some rows, (n, H, D) each."""
        for tensor, each in zip(self._tensors, given, strict=True):
            tensor[rows] = each

    def put_back(self, fetched: tuple[Tensor, Tensor]) -> None:
        """Do nothing, because the change in place is the change of the buffer."""


class ContextStore:
    """The buffers of all attention layers for a spine of `num_rows` tokens."""

    # Neither a dataclass nor a dict: FSDP copies and casts what it finds in those among a module's arguments.

    def __init__(self, num_rows: int, *, on_host: bool = False) -> None:
        self.num_rows = num_rows
        self._on_host = on_host
        self._keys_values: dict[torch.nn.Module, Buffer] = {}
        self._gradients: dict[torch.nn.Module, Buffer] = {}
        # One order of layers for each kind, because the next layer is fetched ahead.
        self._copies = (HostCopies(), HostCopies())

    @classmethod
    def of_layers(cls, keys_values: Mapping[torch.nn.Module, tuple[Tensor, Tensor]], *, num_rows: int) -> Self:
        """Return a store on the device that holds these keys and values, (K, H, D) each, and no gradients yet."""
        store = cls(num_rows)
        for layer, pair in keys_values.items():
            store._keys_values[layer] = DeviceBuffer(pair)
        return store

    def layers(self) -> dict[torch.nn.Module, tuple[Tensor, Tensor]]:
        """Return the keys and values of every layer, as `keys_values` does."""
        return {layer: self.keys_values(layer) for layer in self._keys_values}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, wherever they are."""
        return sum(buffer.num_bytes for kind in (self._keys_values, self._gradients) for buffer in kind.values())

    def keys_values(self, layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer on its device, (K, H, D) each; not to be changed."""
        return self._keys_values[layer].fetch()

    def write(self, layer: torch.nn.Module, rows: slice, keys_values: tuple[Tensor, Tensor]) -> None:
        """Store keys and values, (n, H, D) each, in some rows of a layer."""
        if layer not in self._keys_values:
            self._keys_values[layer] = self._make(keys_values, copies=self._copies[0])
        self._keys_values[layer].put(rows, keys_values)

    def hand_up(
        self,
        layer: torch.nn.Module,
        gradients: tuple[Tensor, Tensor],
        *,
        context_rows: Tensor | slice,
        own_rows: slice,
    ) -> tuple[Tensor, Tensor]:
        """Add the gradients of a call's context, (P, H, D) each; return the sums for its own spine tokens, (n, H, D).

        No row is both in the context and the call's own.
        """
        if layer not in self._gradients:
            wide = tuple(torch.promote_types(each.dtype, torch.float32) for each in gradients)
            self._gradients[layer] = self._make(gradients, copies=self._copies[1], dtypes=wide)
        buffer = self._gradients[layer]
        sums = buffer.fetch()
        own = (sums[0][own_rows], sums[1][own_rows])
        if len(gradients[0]):
            for total, gradient in zip(sums, gradients, strict=True):
                if isinstance(context_rows, slice):
                    total[context_rows] += gradient
                else:
                    total.index_add_(0, context_rows, gradient.to(total.dtype))
            buffer.put_back(sums)
        return own

    def _make(
        self,
        like: tuple[Tensor, Tensor],
        *,
        copies: HostCopies,
        dtypes: tuple[torch.dtype, ...] | None = None,
    ) -> Buffer:
        """Make a buffer of zeros for tensors with these heads, head dims and, unless given, dtypes."""
        shapes = [(self.num_rows, *each.shape[1:]) for each in like]
        dtypes = tuple(each.dtype for each in like) if dtypes is None else dtypes
        if self._on_host:
            return HostBuffer(shapes, dtypes=dtypes, device=like[0].device, copies=copies)
        key, value = (
            torch.zeros(shape, dtype=dtype, device=like[0].device) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return DeviceBuffer((key, value))


class RelayContext:
    """What one call sees of the store; it travels with the call's `AttentionPlan` (`verl_tree.attention.plan.Context`).

    With `writes`, the call stores the keys and values of its own spine tokens. It then must run without gradient.
    """

    def __init__(self, store: ContextStore, call: RelayCall, *, writes: bool, device: torch.device) -> None:
        self._store = store
        self._writes = writes
        self._num_context = call.num_context
        self._context_rows = _slice_or_index(call.context_rows_P, device=device)
        self._own_places = _slice_or_index(call.spine_places, device=device)
        self._own_rows = call.spine_rows
        self._relays = call.num_context > 0 or len(call.spine_places) > 0

    def extend(self, layer: torch.nn.Module, key_QHD: Tensor, value_QHD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the context followed by those given, (P + Q, H, D) each; differentiable.

        `layer` is the attention module. Called again in the recomputation of a layer, it returns the same.
        """
        if not self._relays:
            return key_QHD, value_QHD
        if self._writes:
            assert not torch.is_grad_enabled(), "a section's context must not change before its backward pass"
            own = (key_QHD[self._own_places], value_QHD[self._own_places])
            self._store.write(layer, self._own_rows, own)
        return _Relay.apply(key_QHD, value_QHD, self, layer)

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
        key_KHD, value_KHD = self._store.keys_values(layer)
        rows = self._context_rows
        return torch.cat((_take(key_KHD, rows), key_QHD)), torch.cat((_take(value_KHD, rows), value_QHD))

    def hand_up(self, layer: torch.nn.Module, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, Tensor]:
        """Do the backward half: from gradients of (P + Q, H, D) keys and values to those of the call's own."""
        above = (grad_key[: self._num_context], grad_value[: self._num_context])
        sums = self._store.hand_up(layer, above, context_rows=self._context_rows, own_rows=self._own_rows)
        # Autograd may share the incoming tensors, so the sums go into copies.
        own_key, own_value = grad_key[self._num_context :].clone(), grad_value[self._num_context :].clone()
        for gradient, total in ((own_key, sums[0]), (own_value, sums[1])):
            gradient[self._own_places] = (gradient[self._own_places] + total).to(gradient.dtype)
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
