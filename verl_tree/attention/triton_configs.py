"""How the Triton kernels are compiled: tiles, warps and stages, by device, dtype, head dim and options of the layer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl_tree.attention.options import ScoreOptions

HOPPER = (9, 0)


class KernelConfig(NamedTuple):
    """How one kernel is compiled: tokens of a tile, warps of a program, stages of the pipeline of loads."""

    query_block: int
    key_block: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class KernelConfigs:
    """The configurations of the three kernels of one call."""

    forward: KernelConfig
    dkv: KernelConfig
    dq: KernelConfig


HOPPER_CONFIGS = {
    64: KernelConfigs(KernelConfig(128, 64, 4, 3), KernelConfig(64, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
    128: KernelConfigs(KernelConfig(128, 64, 8, 3), KernelConfig(32, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
    256: KernelConfigs(KernelConfig(128, 32, 8, 4), KernelConfig(32, 64, 8, 3), KernelConfig(128, 32, 8, 3)),
}
"""For 16-bit dtypes on compute capability 9.0 (227 KB of shared memory), by padded head dim.

Chosen from machine code, not from timings: the largest tiles whose accumulators and scores stay in 255 registers, with
every product on wgmma, none of them waiting for the one before, and copies in flight meanwhile. That takes three
stages. `dkv` keeps two accumulators and spills a little for D = 256: 72 bytes of stack a thread, with a window 80. The
next larger tiles spill with Triton 3.6.0: for D = 128, `forward` 148 bytes with 128 keys, `dkv` 108 with 64 queries
(192 with 3.7.1), `dq` 148 with 128 keys. For D = 256 with a window and a softcap, `forward` spills with three stages,
and with four not.
"""

HOPPER_CAPPED_CONFIGS = {
    64: KernelConfigs(KernelConfig(128, 64, 8, 3), KernelConfig(64, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
    128: HOPPER_CONFIGS[128],
    256: KernelConfigs(KernelConfig(128, 32, 8, 4), KernelConfig(32, 64, 8, 2), KernelConfig(128, 32, 8, 3)),
}
"""Like `HOPPER_CONFIGS`, for softcapped scores, whose tanh takes registers.

For D = 64, `forward` has eight warps instead of four. For D = 256, `dkv` would take 136 bytes of stack with three
stages, and 144 where there is a window; with two it takes 128 at most.
"""

SMALL_CONFIGS = {
    64: KernelConfigs(KernelConfig(128, 64, 8, 2), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
    128: KernelConfigs(KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(64, 32, 4, 2)),
    256: KernelConfigs(KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 4, 2)),
}
"""For 16-bit dtypes elsewhere, by padded head dim. They fit the 99 KB of shared memory of compute capability 8.6."""

FLOAT32_CONFIGS = {
    64: KernelConfigs(KernelConfig(32, 16, 4, 1), KernelConfig(16, 32, 4, 1), KernelConfig(32, 16, 4, 1)),
    128: KernelConfigs(KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    256: KernelConfigs(KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
}
"""For float32 on any device. Exact products do not use the tensor cores, so these are for checks, not for speed."""


def choose_configs(q_QHD: torch.Tensor, *, options: ScoreOptions) -> KernelConfigs:
    """Return the configurations for the dtype, head dim and device of the queries, and for the layer's options."""
    is_hopper = q_QHD.device.type == "cuda" and torch.cuda.get_device_capability(q_QHD.device) == HOPPER
    if q_QHD.dtype == torch.float32:
        table = FLOAT32_CONFIGS
    elif is_hopper:
        table = HOPPER_CONFIGS if options.softcap is None else HOPPER_CAPPED_CONFIGS
    else:
        table = SMALL_CONFIGS
    return table[max(64, padded_dim(q_QHD.shape[-1]))]


def padded_dim(head_dim: int) -> int:
    """Return the power of two that a tile's head dim is padded to; a matrix product needs at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def num_processors(device: torch.device) -> int:
    """Return the number of processors (SMs) of a GPU. Elsewhere one program runs after the other: 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
