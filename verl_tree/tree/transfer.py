"""From the host to the device: what planning makes there goes over in one copy, for which the host does not wait."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

PINNED_DEVICE_TYPES = ("cuda",)
"""Devices that copy from pinned memory by themselves."""

ALIGNMENT_BYTES = 128
"""Where each tensor starts on the device, as if it had been copied alone: kernels are compiled for aligned pointers."""


def to_device(tensors: Sequence[Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return tensors of the host on `device`; those that are there already, and all if that is the host, as they are.

    The others are parts of one buffer. It is pinned, because CUDA copies from other memory only after all work that was
    started before, and the host would wait for it. torch keeps the pinned memory until the copy has run.
    """
    device = torch.device(device)
    moved = [each for each in tensors if each.device.type != device.type]
    if not moved:
        return tuple(tensors)
    assert all(each.device.type == "cpu" for each in moved), "to bring tensors back to the host is to wait for them"
    lens = [-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in moved]
    starts = list(itertools.accumulate(lens, initial=0))
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type in PINNED_DEVICE_TYPES)
    for each, part in zip(moved, _parts(buffer, moved, starts), strict=True):
        part.copy_(each)
    there = iter(_parts(buffer.to(device, non_blocking=True), moved, starts))
    return tuple(next(there) if each.device.type != device.type else each for each in tensors)


def _parts(buffer: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Return views of a buffer of bytes with the dtypes and shapes of some tensors."""
    return [
        buffer[start : start + each.nbytes].view(each.dtype).view(each.shape)
        for start, each in zip(starts, like, strict=False)
    ]
