"""Log-probs and entropy straight from hidden states and the head's weight: no logits in memory (CUDA only).

The forward pass makes the logits of a tile of positions and words in registers, and keeps the log-sum-exp and the
entropy of every position. The logits of the labels are products of their own, so a position may have any number of
labels. The backward pass makes the logits again and writes their gradient for a block of positions and a part of the
vocabulary at a time, in the dtype of the hidden states; two ordinary products take it from there.
docs/gradient_restoration.md has the formulas and what this costs beside the chunked path.

Legend: P positions, X hidden size, V vocabulary, K (position, label) pairs, C kinds of scores, S spans of the
vocabulary.
"""

import functools
import importlib
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_tree.functional.linear_arguments import (
    LABEL_BLOCK,
    LABEL_HIDDEN_BLOCK,
    PAIR_BLOCK,
    LabelledPairs,
    LinearSizes,
    choose_config,
    inverse_temperature,
    logit_arguments,
    transform_arguments,
)


def linear_log_probs(
    hidden_PX: Tensor,
    weight_VX: Tensor,
    bias_V: Tensor | None,
    pairs: LabelledPairs,
    *,
    sizes: LinearSizes | None = None,
) -> Tensor:
    """Score pairs, float32 (C, K): log-probs and, if asked for, the entropy of their positions.

    Differentiable once by hidden states, weight and bias. Under autocast these take its dtype, as in `F.linear`.
    `sizes` None: those for the device and the head (`choose_config`).
    """
    device_type = hidden_PX.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        hidden_PX, weight_VX = hidden_PX.to(dtype), weight_VX.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    if sizes is None:
        sizes = LinearSizes(choose_config(hidden_PX, bias_V, pairs.transform))
    return _LinearLogProbs.apply(hidden_PX, weight_VX, bias_V, pairs, sizes)


def plain_log_probs(hidden_PX: Tensor, weight_VX: Tensor, bias_V: Tensor | None, pairs: LabelledPairs) -> Tensor:
    """Compute what `linear_log_probs` does with all logits in memory: the reference of its self-test."""
    raw_PV = torch.nn.functional.linear(hidden_PX, weight_VX, bias_V)
    raw_PV = raw_PV if raw_PV.dtype == torch.float64 else raw_PV.float()
    temperature = pairs.temperature_P
    logits_PV = pairs.transform(raw_PV) / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    log_probs_PV = logits_PV.log_softmax(-1)
    log_probs_K = log_probs_PV[pairs.position_K, pairs.label_K]
    if not pairs.calculate_entropy:
        return log_probs_K.unsqueeze(0)
    entropy_P = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
    entropy_P = entropy_P if pairs.entropy_requires_grad else entropy_P.detach()
    return torch.stack((log_probs_K, entropy_P[pairs.position_K]))


class _LinearLogProbs(torch.autograd.Function):
    """The kernels as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PX: Tensor,
        weight_VX: Tensor,
        bias_V: Tensor | None,
        pairs: LabelledPairs,
        sizes: LinearSizes,
    ) -> Tensor:
        hidden_PX = hidden_PX.contiguous()
        inverse_P = inverse_temperature(pairs.temperature_P, hidden_PX)
        with torch.cuda.device_of(hidden_PX):
            lse_P, entropy_P = _normalizers(hidden_PX, weight_VX, bias_V, inverse_P, pairs, sizes)
            log_prob_K = _label_log_probs(hidden_PX, weight_VX, bias_V, inverse_P, lse_P, pairs)
        # The weight itself, not a copy: FSDP2 frees its memory after the forward pass and fills it for the backward.
        ctx.save_for_backward(hidden_PX, weight_VX, bias_V, inverse_P, lse_P, entropy_P, log_prob_K)
        ctx.pairs, ctx.sizes = pairs, sizes
        if entropy_P is None:
            return log_prob_K.unsqueeze(0)
        return torch.stack((log_prob_K, entropy_P[pairs.position_K]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_PX, weight_VX, bias_V, inverse_P, lse_P, entropy_P, log_prob_K = ctx.saved_tensors
        backward = _Backward(hidden_PX, weight_VX, bias_V, inverse_P, lse_P, entropy_P, ctx.pairs, ctx.sizes)
        with torch.cuda.device_of(hidden_PX):
            gradients = backward.pair_gradients(log_prob_K, grad_outputs[0])
            return *backward.run(gradients, ctx.needs_input_grad[:3]), None, None


def _normalizers(
    hidden_PX: Tensor,
    weight_VX: Tensor,
    bias_V: Tensor | None,
    inverse_P: Tensor,
    pairs: LabelledPairs,
    sizes: LinearSizes,
) -> tuple[Tensor, Tensor | None]:
    """Return log-sum-exp and, if asked for, entropy of the positions, float32 (P,)."""
    (num_positions, _), num_words = hidden_PX.shape, len(weight_VX)
    config, num_spans = sizes.config, -(-num_words // sizes.span)
    max_SP, sum_SP, moment_SP = (inverse_P.new_empty(num_spans, num_positions) for _ in range(3))
    if num_positions:
        _kernels().normalizer_kernel[(-(-num_positions // config.position_block) * num_spans,)](
            **logit_arguments(hidden_PX, weight_VX, bias_V, inverse_P, pairs.transform, config),
            max_out=max_SP,
            sum_out=sum_SP,
            moment_out=moment_SP if pairs.calculate_entropy else None,
            span=sizes.span,
        )
    max_P = max_SP.amax(0)
    rescale_SP = torch.exp2(max_SP - max_P)
    sum_P = (sum_SP * rescale_SP).sum(0)
    log_sum_P = sum_P.log()
    lse_P = max_P * math.log(2) + log_sum_P
    if not pairs.calculate_entropy:
        return lse_P, None
    moment_P = (rescale_SP * (moment_SP + sum_SP * (max_SP - max_P))).sum(0)
    return lse_P, log_sum_P - moment_P / sum_P * math.log(2)


def _label_log_probs(
    hidden_PX: Tensor,
    weight_VX: Tensor,
    bias_V: Tensor | None,
    inverse_P: Tensor,
    lse_P: Tensor,
    pairs: LabelledPairs,
) -> Tensor:
    num_pairs = len(pairs.label_K)
    log_prob_K = lse_P.new_empty(num_pairs)
    if num_pairs:
        _kernels().label_kernel[(-(-num_pairs // LABEL_BLOCK),)](
            hidden=hidden_PX,
            weight=weight_VX,
            bias=bias_V,
            position=pairs.position_K,
            label=pairs.label_K,
            inverse_temperature=inverse_P,
            lse=lse_P,
            log_prob=log_prob_K,
            num_pairs=num_pairs,
            hidden_size=hidden_PX.shape[1],
            stride_p=hidden_PX.stride(0),
            stride_v=weight_VX.stride(0),
            **transform_arguments(pairs.transform),
            BLOCK=LABEL_BLOCK,
            HIDDEN_BLOCK=LABEL_HIDDEN_BLOCK,
        )
    return log_prob_K


class _PairGradients(NamedTuple):
    """What the gradients of the scores say of the logits."""

    label_value_K: Tensor  # (K,) gradient of the raw logit of the pair's label
    sum_P: Tensor  # (P,) sum of the gradients of the log-probs of a position
    entropy_sum_P: Tensor | None  # (P,) the same of the entropy, or None if it has no gradient


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """The backward pass of one call, from what its forward pass saved."""

    hidden_PX: Tensor
    weight_VX: Tensor
    bias_V: Tensor | None
    inverse_P: Tensor
    lse_P: Tensor
    entropy_P: Tensor | None
    pairs: LabelledPairs
    sizes: LinearSizes

    def pair_gradients(self, log_prob_K: Tensor, grad_CK: Tensor) -> _PairGradients:
        """Add up the gradients of the pairs of every position."""
        pairs, num_pairs, num_positions = self.pairs, len(log_prob_K), len(self.lse_P)
        has_entropy = self.entropy_P is not None and pairs.entropy_requires_grad
        places = torch.arange(num_positions + 1, device=log_prob_K.device)
        gradients = _PairGradients(
            torch.empty_like(log_prob_K),
            torch.zeros_like(self.lse_P),
            torch.zeros_like(self.lse_P) if has_entropy else None,
        )
        if num_pairs:
            grad_CK = grad_CK.float().contiguous()
            _kernels().pair_gradient_kernel[(-(-num_pairs // PAIR_BLOCK),)](
                position=pairs.position_K,
                label=pairs.label_K,
                pair_start=torch.searchsorted(pairs.position_K, places),
                log_prob=log_prob_K,
                grad_log_prob=grad_CK[0],
                grad_entropy=grad_CK[1] if has_entropy else None,
                lse=self.lse_P,
                entropy=self.entropy_P,
                inverse_temperature=self.inverse_P,
                label_value=gradients.label_value_K,
                grad_sum=gradients.sum_P,
                grad_entropy_sum=gradients.entropy_sum_P,
                num_pairs=num_pairs,
                **transform_arguments(pairs.transform),
                BLOCK=PAIR_BLOCK,
            )
        return gradients

    def run(self, gradients: _PairGradients, wanted: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, or None for those that are not wanted."""
        wants_hidden, wants_weight, wants_bias = wanted
        hidden_PX, weight_VX = self.hidden_PX, self.weight_VX
        (num_positions, hidden_size), num_words = hidden_PX.shape, len(weight_VX)
        grad_hidden_PX = torch.zeros_like(hidden_PX) if wants_hidden else None
        grad_weight_VX = torch.zeros_like(weight_VX) if wants_weight else None
        grad_bias_V = hidden_PX.new_zeros(num_words, dtype=torch.float32) if wants_bias else None
        block = max(1, min(self.sizes.gradient_positions, num_positions))
        num_columns = min(num_words, max(1, self.sizes.gradient_bytes // (block * hidden_PX.element_size())))
        buffer = hidden_PX.new_empty(block * num_columns)
        for start in range(0, num_positions, block):
            end = min(start + block, num_positions)
            sum_LX = hidden_PX.new_zeros(end - start, hidden_size, dtype=torch.float32) if wants_hidden else None
            for first in range(0, num_words, num_columns):
                words = slice(first, min(first + num_columns, num_words))
                num_wanted = words.stop - first
                grad_LW = buffer[: (end - start) * num_wanted].view(end - start, num_wanted)
                self._write_grad_logits(grad_LW, gradients, positions=slice(start, end), words=words)
                if sum_LX is not None:
                    sum_LX += grad_LW @ weight_VX[words]
                if grad_weight_VX is not None and start == 0:
                    torch.mm(grad_LW.T, hidden_PX[start:end], out=grad_weight_VX[words])
                elif grad_weight_VX is not None:
                    grad_weight_VX[words] += grad_LW.T @ hidden_PX[start:end]
                if grad_bias_V is not None:
                    grad_bias_V[words] += grad_LW.sum(0, dtype=torch.float32)
            if grad_hidden_PX is not None and sum_LX is not None:
                grad_hidden_PX[start:end] = sum_LX
        grad_bias_V = None if grad_bias_V is None or self.bias_V is None else grad_bias_V.to(self.bias_V.dtype)
        return grad_hidden_PX, grad_weight_VX, grad_bias_V

    def _write_grad_logits(self, grad_LW: Tensor, gradients: _PairGradients, *, positions: slice, words: slice) -> None:
        """Write the gradient of the raw logits of some positions and words."""
        (num_positions, num_columns), pairs = grad_LW.shape, self.pairs
        hidden_LX, inverse_L = self.hidden_PX[positions], self.inverse_P[positions]
        config = self.sizes.config
        num_programs = -(-num_positions // config.position_block) * -(-num_columns // config.word_block)
        sum_P, entropy_sum_P, entropy_P = gradients.sum_P, gradients.entropy_sum_P, self.entropy_P
        _kernels().grad_logits_kernel[(num_programs,)](
            **logit_arguments(hidden_LX, self.weight_VX, self.bias_V, inverse_L, pairs.transform, config),
            lse=self.lse_P[positions],
            entropy=None if entropy_P is None else entropy_P[positions],
            grad_sum=sum_P[positions],
            grad_entropy_sum=None if entropy_sum_P is None else entropy_sum_P[positions],
            grad_logits=grad_LW,
            word_start=words.start,
            num_columns=num_columns,
        )
        num_pairs = len(pairs.label_K)
        assert num_pairs, "every position has a pair"
        _kernels().label_gradient_kernel[(-(-num_pairs // PAIR_BLOCK),)](
            position=pairs.position_K,
            label=pairs.label_K,
            label_value=gradients.label_value_K,
            grad_logits=grad_LW,
            num_pairs=num_pairs,
            position_start=positions.start,
            num_positions=num_positions,
            word_start=words.start,
            num_columns=num_columns,
            BLOCK=PAIR_BLOCK,
        )


@functools.cache
def _kernels() -> ModuleType:
    # Not imported at the top, because triton is an extra and reads TRITON_INTERPRET at its first import.
    return importlib.import_module("verl_tree.functional.linear_log_probs_kernels")
