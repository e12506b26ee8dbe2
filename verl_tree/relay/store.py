"""What calls keep for later calls, and the gradients that these hand back up.

The store has two buffers for every attention layer: the keys and values of the spine's tokens, and the sums of their
gradients in float32 (in float64 for a float64 model). `verl_tree.relay.context` puts them before those of a call. A
recurrent layer has the same two buffers for the states after the cut tokens, and for the inputs of its convolution
(`verl_tree.relay.states`).

With `on_host` the buffers are in host memory (`verl_tree.relay.host`).

Legend: K tokens of the spine, X cut tokens, P tokens of a call's context, H key-value heads, D head dim.
"""

from collections.abc import Hashable, Mapping
from typing import Self

import torch
from torch import Tensor

from verl_tree.relay.host import Buffer, HostBuffer, HostCopies, Kept


class ContextStore:
    """The buffers of all layers for a spine of `num_rows` tokens, of which `num_cut_tokens` are cut tokens.

    An attention layer is itself the key of its keys and values. A recurrent layer has a key of another type for each
    kind of its states.
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
            store._kept[key] = Buffer(tensors)
        return store

    def layers(self) -> dict[Hashable, Kept]:
        """Return what every layer keeps, as `get` does."""
        return {key: self.get(key) for key in self._kept}

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, wherever they are."""
        return sum(buffer.num_bytes for kind in (self._kept, self._gradients) for buffer in kind.values())

    def put(self, key: Hashable, rows: slice, given: Kept) -> None:
        """Store tensors (n, ...) in some rows."""
        if key not in self._kept:
            self._kept[key] = self._make(key, given)
        self._kept[key].put(rows, given)

    def get(self, key: Hashable) -> Kept:
        """Return what is kept on the layer's device, (K, H, D) or (X, ...) each; not to be changed."""
        return self._kept[key].fetch()

    def add(self, key: Hashable, rows: Tensor | slice, gradients: Kept) -> Kept:
        """Add the gradients (n, ...) of some rows, and return the sums of all rows; not to be changed."""
        if key not in self._gradients:
            self._gradients[key] = self._make(key, gradients, of_gradients=True)
        sums = self._gradients[key].fetch()
        if len(gradients[0]):
            for total, gradient in zip(sums, gradients, strict=True):
                _add(total, rows, gradient)
            self._gradients[key].put_back(sums)
        return sums

    def added(self, key: Hashable) -> Kept | None:
        """Return the sums of the gradients of all rows, not to be changed; None if nothing was added."""
        return self._gradients[key].fetch() if key in self._gradients else None

    def _make(self, key: Hashable, like: Kept, *, of_gradients: bool = False) -> Buffer:
        """Make a buffer of zeros for tensors whose rows are like these. Gradients are added in float32 at least."""
        num_rows = self.num_rows if isinstance(key, torch.nn.Module) else self._num_cut_tokens
        device = torch.device("cpu") if self._on_host else like[0].device
        pinned = self._on_host and like[0].device.type == "cuda"
        zeros = tuple(
            torch.zeros(
                (num_rows, *each.shape[1:]),
                dtype=torch.promote_types(each.dtype, torch.float32) if of_gradients else each.dtype,
                device=device,
                pin_memory=pinned,
            )
            for each in like
        )
        if not self._on_host:
            return Buffer(zeros)
        return HostBuffer(zeros, device=like[0].device, copies=self._copies[of_gradients])


def _add(total: Tensor, rows: Tensor | slice, gradient: Tensor) -> None:
    """Add to some rows, each of which is there once."""
    if isinstance(rows, slice):
        total[rows] += gradient
    else:
        total.index_add_(0, rows, gradient.to(total.dtype))
