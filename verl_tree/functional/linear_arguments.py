"""What the fused log-probs of `linear_log_probs` take: pairs to score, sizes of what a kernel computes at a time.

Legend: P positions, X hidden size, V vocabulary, K (position, label) pairs.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

HOPPER = (9, 0)

SPAN = 4096
"""Words that a program of the forward pass walks over."""

GRADIENT_POSITIONS = 2**14
"""Positions whose logits have a gradient in memory at a time. Weight gradients of such blocks add up in the weight's
dtype, and the gradient of a block's hidden states in float32."""

GRADIENT_BYTES = 2**29
"""Bytes that the gradient of logits may take."""

PAIR_BLOCK = 128
LABEL_BLOCK, LABEL_HIDDEN_BLOCK = 16, 128

GROUP = 16
"""Position blocks that are computed side by side, so that they share the weight in L2."""


class LinearConfig(NamedTuple):
    """How a kernel that makes logits is compiled: sizes of a tile, warps of a program, stages of the pipeline."""

    position_block: int
    word_block: int
    hidden_block: int
    num_warps: int
    num_stages: int


HOPPER_CONFIG = LinearConfig(128, 256, 64, 8, 3)
"""For compute capability 9.0 (227 KB of shared memory).

Chosen from machine code, not from timings: the widest tile that spills nothing, also with entropy.
"""

HOPPER_NARROW_CONFIG = LinearConfig(128, 128, 64, 8, 4)
"""The same for heads with a bias or a softcap. With the wider tile they spill up to 360 bytes a thread."""

SMALL_CONFIG = LinearConfig(128, 128, 64, 8, 2)
"""Elsewhere. It fits the 99 KB of shared memory of compute capability 12.0."""


@dataclass(frozen=True, slots=True)
class LinearSizes:
    """How the kernels that make logits are compiled, and how much is computed at a time."""

    config: LinearConfig
    span: int = SPAN
    gradient_positions: int = GRADIENT_POSITIONS
    gradient_bytes: int = GRADIENT_BYTES


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What an architecture does to its head's output `x`: `softcap * tanh(scale * x / softcap)`, or `scale * x`."""

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, raw: Tensor) -> Tensor:
        """Return the logits."""
        scaled = raw if self.scale == 1.0 else raw * self.scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


@dataclass(frozen=True, slots=True, eq=False)
class LabelledPairs:
    """What is scored, and how."""

    position_K: Tensor  # (K,) int64, index into P, ascending
    label_K: Tensor  # (K,) int64
    temperature_P: float | Tensor = 1.0  # a number, or (P,)
    transform: LogitTransform = LogitTransform()
    calculate_entropy: bool = False
    entropy_requires_grad: bool = True


def choose_config(hidden_PX: Tensor, bias_V: Tensor | None, transform: LogitTransform) -> LinearConfig:
    """Return how the kernels that make logits are compiled for the device of the hidden states and the head."""
    if hidden_PX.device.type != "cuda" or torch.cuda.get_device_capability(hidden_PX.device) != HOPPER:
        return SMALL_CONFIG
    return HOPPER_CONFIG if bias_V is None and transform.softcap is None else HOPPER_NARROW_CONFIG


def logit_arguments(
    hidden_PX: Tensor,
    weight_VX: Tensor,
    bias_V: Tensor | None,
    inverse_P: Tensor,
    transform: LogitTransform,
    config: LinearConfig,
) -> dict[str, Any]:
    """Return what the kernels that make logits have in common."""
    descriptor = _tensor_descriptor()
    return {
        "hidden": descriptor.from_tensor(hidden_PX, [config.position_block, config.hidden_block]),
        "weight": descriptor.from_tensor(weight_VX, [config.word_block, config.hidden_block]),
        "bias": bias_V,
        "inverse_temperature": inverse_P,
        "num_positions": len(hidden_PX),
        "num_words": len(weight_VX),
        "hidden_size": hidden_PX.shape[1],
        **transform_arguments(transform),
        "POSITION_BLOCK": config.position_block,
        "WORD_BLOCK": config.word_block,
        "HIDDEN_BLOCK": config.hidden_block,
        "GROUP": GROUP,
        "PRECISION": "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def transform_arguments(transform: LogitTransform) -> dict[str, float | None]:
    """Return the arguments of a kernel that makes logits of the head's outputs, or knows the slope."""
    return {"scale": float(transform.scale), "softcap": None if transform.softcap is None else float(transform.softcap)}


def inverse_temperature(temperature_P: float | Tensor, hidden_PX: Tensor) -> Tensor:
    """Return the factor of every position's logits, float32 (P,)."""
    if isinstance(temperature_P, Tensor):
        return temperature_P.float().expand(len(hidden_PX)).reciprocal()
    return hidden_PX.new_full((len(hidden_PX),), 1.0 / temperature_P, dtype=torch.float32)


@functools.cache
def _tensor_descriptor() -> Any:
    # Not imported at the top, because triton is an extra and reads TRITON_INTERPRET at its first import.
    return importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
