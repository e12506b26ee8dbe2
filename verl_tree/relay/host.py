"""Buffers of the store: on the device, or in host memory, from where they visit the device while their layer runs.

On CUDA host memory is pinned and all copies run on one stream, in the order in which they were asked for. So a copy to
the device sees every earlier copy to the host. While a layer computes, the buffer that comes next is fetched: the one
above on the way up through the layers, the one below on the way down. On a CPU the same copies are made one by one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

Kept = tuple[Tensor, ...]
"""Keys and values of one layer, its states or the inputs of its convolution, or the gradients of these."""


class Buffer:
    """Tensors of one layer with as many rows, on its device: keys and values, states, or gradients of these."""

    def __init__(self, tensors: Kept) -> None:
        self.tensors = tensors

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors)

    def fetch(self) -> Kept:
        """Return them on the layer's device. After a change in place, `put_back` stores it."""
        return self.tensors

    def put(self, rows: slice, given: Kept) -> None:
        """Store some rows of each tensor."""
        for tensor, each in zip(self.tensors, given, strict=True):
            tensor[rows] = each

    def put_back(self, fetched: Kept) -> None:
        """Store what `fetch` returned and the caller changed: here it returned the tensors themselves."""


class _Fetched(NamedTuple):
    """Copies on the device, and the event after which they are complete (None on a CPU)."""

    tensors: Kept
    done: torch.cuda.Event | None


class HostCopies:
    """The copies of all layers' buffers of one kind: what is kept, or its gradients."""

    def __init__(self) -> None:
        self._buffers: list[HostBuffer] = []
        self._stream: torch.cuda.Stream | None = None
        self._ahead: tuple[int, _Fetched] | None = None
        self._last_place = 0
        self._goes_up = True

    def add(self, buffer: "HostBuffer") -> int:
        """Add the next buffer and return its place. Buffers are added in the order in which their layers run."""
        if buffer.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def fetch(self, place: int) -> Kept:
        """Return copies of a buffer on its device, and start to fetch the one that comes next."""
        buffer = self._buffers[place]
        if self._stream is None:
            return self._start(buffer).tensors
        fetched = self._ahead[1] if self._ahead is not None and self._ahead[0] == place else self._start(buffer)
        following = self._place_after(place)
        self._ahead = None if following is None else (following, self._start(self._buffers[following]))
        current = torch.cuda.current_stream(buffer.device)
        assert fetched.done is not None
        current.wait_event(fetched.done)
        for tensor in fetched.tensors:
            tensor.record_stream(current)
        return fetched.tensors

    def to_host(self, home: Tensor, given: Tensor) -> None:
        """Copy a tensor to its place in host memory, after the work that makes it."""
        if self._stream is None:
            home.copy_(given)
            return
        self._stream.wait_stream(torch.cuda.current_stream(given.device))
        with torch.cuda.stream(self._stream):
            home.copy_(given, non_blocking=True)
        given.record_stream(self._stream)

    def _start(self, buffer: "HostBuffer") -> _Fetched:
        """Start to copy a buffer to its device."""
        if self._stream is None:
            return _Fetched(tuple(home.to(buffer.device, copy=True) for home in buffer.tensors), None)
        with torch.cuda.stream(self._stream):
            tensors = tuple(home.to(buffer.device, non_blocking=True) for home in buffer.tensors)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Fetched(tensors, done)

    def _place_after(self, place: int) -> int | None:
        """Return the place of the buffer that comes next, if any. The way turns at the first and the last layer."""
        last = len(self._buffers) - 1
        if place in (0, last):
            self._goes_up = place == 0
        elif place != self._last_place:
            self._goes_up = place > self._last_place
        self._last_place = place
        following = place + (1 if self._goes_up else -1)
        return following if 0 <= following <= last else None


class HostBuffer(Buffer):
    """A buffer in host memory, which hands out copies on the layer's device."""

    def __init__(self, tensors: Kept, *, device: torch.device, copies: HostCopies) -> None:
        super().__init__(tensors)
        self.device = device
        self._copies = copies
        self._place = copies.add(self)

    @override
    def fetch(self) -> Kept:
        return self._copies.fetch(self._place)

    @override
    def put(self, rows: slice, given: Kept) -> None:
        for home, each in zip(self.tensors, given, strict=True):
            self._copies.to_host(home[rows], each)

    @override
    def put_back(self, fetched: Kept) -> None:
        self.put(slice(None), fetched)
