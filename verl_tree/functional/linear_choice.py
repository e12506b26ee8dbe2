"""Where the fused log-probs of `linear_log_probs` serve, and their self-test on a device.

They serve a head that is a plain linear layer, on CUDA, once they have agreed with logits in memory there. Elsewhere
`scorer` keeps logits in memory. On CUDA the reason is logged once.

Legend: P positions, X hidden size, V vocabulary, K (position, label) pairs.
"""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType

import torch
from torch import Tensor

from verl_tree.attention.refusals import HALF_DTYPES, gpu_reasons
from verl_tree.functional.linear_arguments import HOPPER, SPAN, LabelledPairs, LinearSizes, LogitTransform
from verl_tree.functional.linear_log_probs import linear_log_probs, plain_log_probs
from verl_tree.tree.first_run import reasons_of_first_run

logger = logging.getLogger(__name__)

SCORE_LIMIT = 1e-4
"""Allowed error of a score, in nats. Products of 16-bit numbers are exact in float32, and their sums nearly so."""

GRADIENT_LIMIT = 4.0
"""Allowed error of a gradient, as a multiple of the error with logits in memory in the same dtype."""

LEAST_LIMIT = 1e-5
"""Error of a gradient that is always allowed."""

DESCRIPTOR_BYTES = 16
"""What the address and the row stride of a tensor behind a descriptor are multiples of."""

_logged: set[str] = set()


@dataclass(frozen=True, slots=True)
class LinearVariant:
    """What selects the compiled kernels. Each combination is tested by itself."""

    device: torch.device
    dtype: torch.dtype
    has_bias: bool
    is_capped: bool
    has_entropy: bool


def fused_log_probs(
    head: torch.nn.Module, project: Callable[[Tensor], Tensor], hidden_PX: Tensor, pairs: LabelledPairs
) -> Tensor | None:
    """Score pairs as `linear_log_probs` if it can serve, inside the head's forward, where FSDP2 has its whole weight.

    `project` is the head's own forward.
    """
    reasons = not_supported_reasons(head, project, hidden_PX, pairs)
    log_choice(reasons, device=hidden_PX.device)
    if reasons or not isinstance(head, torch.nn.Linear):
        return None
    return linear_log_probs(hidden_PX, head.weight, head.bias, pairs)


def not_supported_reasons(
    head: torch.nn.Module, project: Callable[[Tensor], Tensor], hidden_PX: Tensor, pairs: LabelledPairs
) -> list[str]:
    """Return why the fused log-probs cannot serve; empty if they can. On CUDA the first call of a kind tests them.

    On a CPU Triton's interpreter serves, if `TRITON_INTERPRET=1` is set before triton is first imported.
    """
    device = hidden_PX.device
    if device.type != "cuda" and (device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1"):
        return [f"tensors are on {device}, the kernels run on CUDA only"]
    # A subclass of FSDP2's has the forward of nn.Linear. One of LoRA or quantised weights has its own.
    if not isinstance(head, torch.nn.Linear) or project != MethodType(torch.nn.Linear.forward, head):
        return [f"the head is a {type(head).__name__} with a forward of its own, not a plain linear layer"]
    if type(head.weight) not in (Tensor, torch.nn.Parameter):
        return [f"the head's weight is a {type(head.weight).__name__}, not a plain tensor"]
    reasons = _input_reasons(head, hidden_PX)
    if reasons or device.type != "cuda":
        return reasons
    variant = LinearVariant(
        device=device,
        dtype=_dtypes(head, hidden_PX).pop(),
        has_bias=head.bias is not None,
        is_capped=pairs.transform.softcap is not None,
        has_entropy=pairs.calculate_entropy,
    )
    return reasons_of_first_run("the fused log-prob kernel", variant, partial(self_test, variant))


def _input_reasons(head: torch.nn.Linear, hidden_PX: Tensor) -> list[str]:
    reasons = []
    device, dtypes = hidden_PX.device, _dtypes(head, hidden_PX)
    allowed = HALF_DTYPES
    if device.type == "cuda":
        reasons += gpu_reasons(device)
        # Below, Triton loads tensor descriptors without overlap.
        if not reasons and torch.cuda.get_device_capability(device) < HOPPER:
            reasons.append(f"compute capability {torch.cuda.get_device_capability(device)} is below {HOPPER}")
    else:
        # Triton's interpreter multiplies the bits of bfloat16 as integers, and says nothing.
        allowed = (torch.float16, torch.float32)
    if len(dtypes) > 1 or not dtypes <= set(allowed):
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        reasons.append(f"dtype {' and '.join(sorted(map(str, dtypes)))} is none of {wanted} throughout")
    if not _is_installed():
        reasons.append("triton is not installed; install triton (with a CUDA build of torch it comes along)")
    if hidden_PX.shape[-1] % 8:
        reasons.append(f"hidden size {hidden_PX.shape[-1]} is not a multiple of 8, as tensor descriptors need")
    return reasons + _layout_reasons(head.weight, hidden_PX)


def _layout_reasons(weight_VX: Tensor, hidden_PX: Tensor) -> list[str]:
    """Refuse what a tensor descriptor cannot describe: rows of any place in memory, or with gaps inside."""
    reasons = []
    row_bytes, column_stride = weight_VX.stride(0) * weight_VX.itemsize, weight_VX.stride(1)
    if column_stride != 1 or row_bytes % DESCRIPTOR_BYTES:
        reasons.append(
            f"the head's weight has strides {weight_VX.stride()}: tensor descriptors need contiguous rows, a multiple "
            f"of {DESCRIPTOR_BYTES} bytes apart"
        )
    given = {"the head's weight": weight_VX}
    if hidden_PX.is_contiguous():  # else they are copied
        given["the memory of the hidden states"] = hidden_PX
    for name, tensor in given.items():
        num_bytes = tensor.data_ptr() % DESCRIPTOR_BYTES
        if num_bytes:
            reasons.append(
                f"{name} begins {num_bytes} bytes after a multiple of {DESCRIPTOR_BYTES}, and tensor descriptors at one"
            )
    return reasons


def _dtypes(head: torch.nn.Linear, hidden_PX: Tensor) -> set[torch.dtype]:
    """Return the dtypes that the product of hidden states and weight would meet."""
    device_type, dtypes = hidden_PX.device.type, {hidden_PX.dtype, head.weight.dtype}
    # Autocast leaves float64 as it is.
    if torch.is_autocast_enabled(device_type) and torch.float64 not in dtypes:
        return {torch.get_autocast_dtype(device_type)}
    return dtypes


def log_choice(reasons: list[str], *, device: torch.device) -> None:
    """Log once, on CUDA, that the fused log-probs serve, or why they do not."""
    why = "; ".join(reasons)
    if device.type != "cuda" or why in _logged:
        return
    _logged.add(why)
    if why:
        logger.warning("log-probs keep logits in memory, as no fused kernel serves: %s", why)
    else:
        logger.info("log-probs: fused kernel")


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def self_test(variant: LinearVariant, *, sizes: LinearSizes | None = None, num_words: int = SPAN + 1000) -> list[str]:
    """Return how scores and gradients disagree with those from logits in memory; empty if they agree.

    Two spans of the vocabulary, the last tiles of positions, words and hidden size cut off, positions with several
    labels, a temperature of each position. Two runs must give the same bits. `sizes` are those of `linear_log_probs`.
    """
    num_positions, hidden_size = 300, 144
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    labelled = [*range(num_positions), *range(0, num_positions, 7), *[5] * 200]
    position_K = torch.tensor(sorted(labelled))
    bias = (draw(num_words),) if variant.has_bias else ()
    inputs = [draw(num_positions, hidden_size), draw(num_words, hidden_size) * 3 * hidden_size**-0.5, *bias]
    inputs = [each.to(variant.device, variant.dtype) for each in inputs]
    pairs = LabelledPairs(
        position_K.to(variant.device),
        torch.randint(num_words, position_K.shape, generator=generator).to(variant.device),
        (0.5 + torch.rand(num_positions, generator=generator)).to(variant.device),
        LogitTransform(0.8, 5.0 if variant.is_capped else None),
        calculate_entropy=variant.has_entropy,
    )
    grad_CK = draw(1 + variant.has_entropy, len(labelled)).to(variant.device)
    run = partial(_scores_and_gradients, pairs=pairs, grad_CK=grad_CK)
    want = run(plain_log_probs, [each.double() for each in inputs])
    fused = partial(linear_log_probs, sizes=sizes)
    plain, got, again = run(plain_log_probs, inputs), run(fused, inputs), run(fused, inputs)
    error = (got["scores"] - want["scores"]).abs().max().item()
    reasons = [] if error <= SCORE_LIMIT else [f"worst error of a score is {error:.1e}, the limit {SCORE_LIMIT:.1e}"]
    for name in list(want)[1:]:
        error = _worst_row(got[name], want[name])
        limit = max(GRADIENT_LIMIT * _worst_row(plain[name], want[name]), LEAST_LIMIT)
        if not error <= limit:
            reasons.append(f"worst relative error of the gradient of {name} is {error:.1e}, the limit {limit:.1e}")
    reasons += [f"two runs differ in {name}" for name in got if not torch.equal(got[name], again[name])]
    return [f"self-test: {reason}" for reason in reasons]


def _scores_and_gradients(
    score: Callable[..., Tensor], inputs: list[Tensor], *, pairs: LabelledPairs, grad_CK: Tensor
) -> dict[str, Tensor]:
    """Return the scores, and the gradients of hidden states, weight and, if there is one, bias."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    hidden_PX, weight_VX, *bias = leaves
    scores_CK = score(hidden_PX, weight_VX, bias[0] if bias else None, pairs)
    gradients = torch.autograd.grad(scores_CK, leaves, grad_CK.to(scores_CK.dtype))
    names = ("hidden states", "weight", "bias")[: len(leaves)]
    return {"scores": scores_CK.detach(), **dict(zip(names, gradients, strict=True))}


def _worst_row(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a row; a vector is one row."""
    norm = want.norm(dim=-1)
    return ((got.double() - want).norm(dim=-1) / norm.clamp(min=norm.square().mean().sqrt().item())).max().item()
