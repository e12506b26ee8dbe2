"""What calls keep for later calls, and the gradients that these hand back up.

The store has two buffers for every attention layer: the keys and values of the spine's tokens, and the sums of their
gradients in float32 (in float64 for a float64 model). `verl_tree.relay.context` puts them before those of a call. A
recurrent layer has the same two buffers for the states after the cut tokens, and for the inputs of its convolution
(`verl_tree.relay.states`).

With `on_host` the buffers are in host memory (`verl_tree.relay.host`).

Legend: K tokens of the spine, X cut tokens, P tokens of a call's context, H key-value heads, D head dim.
"""

from collections.abc import Hashable, Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from verl_tree.relay.host import HostBuffer, HostCopies, Kept


class Buffer(Protocol):
    """Tensors of one layer with as many rows: keys and values, states, or gradients of these."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        ...

    def fetch(self) -> Kept:
        """Return them on the layer's device. After a change in place, `put_back` stores it."""
        ...

    def put(self, rows: slice, given: Kept) -> None:
        """Store some rows of each tensor."""
        ...

    def put_back(self, fetched: Kept) -> None:
        """Store what `fetch` returned and the caller changed."""
        ...


class DeviceBuffer:
    """A buffer on the layer's device: it hands out its own tensors."""

    def __init__(self, tensors: Kept) -> None:
        self._tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self._tensors)

    def fetch(self) -> Kept:
        """Return the tensors themselves."""
        return self._tensors

    def put(self, rows: slice, given: Kept) -> None:
        """Store some rows of each tensor."""
        for tensor, each in zip(self._tensors, given, strict=True):
            tensor[rows] = each

    def put_back(self, fetched: Kept) -> None:
        """Do nothing, because the change in place is the change of the buffer."""


class ContextStore:
    """The buffers of all layers for a spine of `num_rows` tokens, of which `num_cut_tokens` are cut tokens.

    Attention layers are keys of their own. A recurrent layer takes a key for each thing that it keeps.
    """

    # Neither a dataclass nor a dict: FSDP copies and casts what it finds in those among a module's arguments.

    def __init__(self, num_rows: int, *, num_cut_tokens: int = 0, on_host: bool = False) -> None:
        self.num_rows = num_rows
        self._num_cut_tokens = num_cut_tokens
        self._on_host = on_host
        self._kept: dict[Hashable, Buffer] = {}
        self._gradients: dict[Hashable, Buffer] = {}
        # One order of layers for each kind, because the next layer is fetched ahead.
        self._copies = (HostCopies(), HostCopies())

    @classmethod
    def of_layers(cls, kept: Mapping[Hashable, Kept], *, num_rows: int, num_cut_tokens: int) -> Self:
        """Return a store on the device that holds what `layers` returned, and no gradients yet."""
        store = cls(num_rows, num_cut_tokens=num_cut_tokens)
        for key, tensors in kept.items():
            store._kept[key] = DeviceBuffer(tensors)
        return store

    def layers(self) -> dict[Hashable, Kept]:
        """Return what every layer keeps, on its device: keys and values, (K, H, D) each, or states (X, ...)."""
        return {key: buffer.fetch() for key, buffer in self._kept.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, wherever they are."""
        return sum(buffer.num_bytes for kind in (self._kept, self._gradients) for buffer in kind.values())

    def keys_values(self, layer: torch.nn.Module) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer on its device, (K, H, D) each; not to be changed."""
        key_KHD, value_KHD = self._kept[layer].fetch()
        return key_KHD, value_KHD

    def write(self, layer: torch.nn.Module, rows: slice, keys_values: tuple[Tensor, Tensor]) -> None:
        """Store keys and values, (n, H, D) each, in some rows of a layer."""
        if layer not in self._kept:
            self._kept[layer] = self._make(keys_values, num_rows=self.num_rows)
        self._kept[layer].put(rows, keys_values)

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
            self._gradients[layer] = self._make(gradients, num_rows=self.num_rows, of_gradients=True)
        buffer = self._gradients[layer]
        sums = buffer.fetch()
        own = (sums[0][own_rows], sums[1][own_rows])
        if len(gradients[0]):
            for total, gradient in zip(sums, gradients, strict=True):
                _add(total, context_rows, gradient)
            buffer.put_back(sums)
        return own

    def states(self, key: Hashable) -> Tensor:
        """Return the states of a recurrent layer on its device, (X, ...); not to be changed."""
        return self._kept[key].fetch()[0]

    def write_states(self, key: Hashable, rows: slice, states: Tensor) -> None:
        """Store states (n, ...) in some rows."""
        if key not in self._kept:
            self._kept[key] = self._make((states,), num_rows=self._num_cut_tokens)
        self._kept[key].put(rows, (states,))

    def add_state_gradients(self, key: Hashable, rows: Tensor | slice, gradients: Tensor) -> None:
        """Add the gradients (n, ...) of some states."""
        if key not in self._gradients:
            self._gradients[key] = self._make((gradients,), num_rows=self._num_cut_tokens, of_gradients=True)
        (sums,) = self._gradients[key].fetch()
        _add(sums, rows, gradients)
        self._gradients[key].put_back((sums,))

    def state_gradients(self, key: Hashable, rows: slice) -> Tensor | None:
        """Return the sums of the gradients of some states, (n, ...); None if nothing was added."""
        return self._gradients[key].fetch()[0][rows] if key in self._gradients else None

    def _make(self, like: Kept, *, num_rows: int, of_gradients: bool = False) -> Buffer:
        """Make a buffer of zeros for tensors whose rows are like these. Gradients are added in float32 at least."""
        shapes = [(num_rows, *each.shape[1:]) for each in like]
        dtypes = [torch.promote_types(each.dtype, torch.float32) if of_gradients else each.dtype for each in like]
        device = like[0].device
        if self._on_host:
            return HostBuffer(shapes, dtypes=dtypes, device=device, copies=self._copies[of_gradients])
        return DeviceBuffer(
            tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True))
        )


def _add(total: Tensor, rows: Tensor | slice, gradient: Tensor) -> None:
    """Add to some rows, each of which is there once."""
    if isinstance(rows, slice):
        total[rows] += gradient
    else:
        total.index_add_(0, rows, gradient.to(total.dtype))
