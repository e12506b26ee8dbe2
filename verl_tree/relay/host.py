"""Buffers of the store in host memory: a layer's keys and values, or their gradients, visit the device while it runs.

On CUDA the memory is pinned and all copies run on one stream, in the order in which they were asked for. So a copy to
the device sees every earlier copy to the host. While a layer computes, the buffer that comes next is fetched: the one
above on the way up through the layers, the one below on the way down. On a CPU the same copies are made one by one.

Legend: K tokens of the spine, H key-value heads, D head dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer, or their gradients."""


class _Fetched(NamedTuple):
    """Copies on the device, and the event after which they are complete (None on a CPU)."""

    pair: Pair
    done: torch.cuda.Event | None


class HostCopies:
    """The copies of all layers' buffers of one kind: keys and values, or gradients."""

    def __init__(self) -> None:
        self._buffers: list[HostBuffer] = []
        self._stream: torch.cuda.Stream | None = None
        self._ahead: tuple[int, _Fetched] | None = None
        self._last_place = 0
        self._goes_up = True

    def add(self, buffer: "HostBuffer") -> int:
        """Add the buffer of the next layer and return its place. Layers are added in the order in which they run."""
        if buffer.device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(buffer.device)
        self._buffers.append(buffer)
        return len(self._buffers) - 1

    def fetch(self, place: int) -> Pair:
        """Return copies of a buffer on its device, and start to fetch the one that comes next."""
        buffer = self._buffers[place]
        if self._stream is None:
            return self._start(buffer).pair
        fetched = self._ahead[1] if self._ahead is not None and self._ahead[0] == place else self._start(buffer)
        following = self._place_after(place)
        self._ahead = None if following is None else (following, self._start(self._buffers[following]))
        current = torch.cuda.current_stream(buffer.device)
        assert fetched.done is not None
        current.wait_event(fetched.done)
        for tensor in fetched.pair:
            tensor.record_stream(current)
        return fetched.pair

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
            key, value = (home.to(buffer.device, copy=True) for home in buffer.home)
            return _Fetched((key, value), None)
        with torch.cuda.stream(self._stream):
            key, value = (home.to(buffer.device, non_blocking=True) for home in buffer.home)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _Fetched((key, value), done)

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


class HostBuffer:
    """Two tensors (K, H, D) of one layer in host memory."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        copies: HostCopies,
    ) -> None:
        pinned = device.type == "cuda"
        key, value = (
            torch.zeros(shape, dtype=dtype, pin_memory=pinned) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        self.home: Pair = (key, value)
        self.device = device
        self._copies = copies
        self._place = copies.add(self)

    @property
    def num_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(each.nbytes for each in self.home)

    def fetch(self) -> Pair:
        """Return copies of both tensors on the layer's device."""
        return self._copies.fetch(self._place)

    def put(self, rows: slice, given: Pair) -> None:
        """Store some rows, (n, H, D) each."""
        for home, each in zip(self.home, given, strict=True):
            self._copies.to_host(home[rows], each)

    def put_back(self, fetched: Pair) -> None:
        """Store copies that `fetch` returned and the caller changed."""
        self.put(slice(None), fetched)
