"""Checks the fused log-probs on a device against float64, and times them beside logits in memory.

Cases are heads of Qwen3 at their full vocabulary. Each runs the self-test of its kernels, then forward and backward on
2,048 positions, some with several labels: scores must be within `SCORE_LIMIT` nats, the worst row of a gradient within
`FACTOR` times the error with logits in memory in the same dtype, and two runs must give the same bits.

    python benchmarks/check_log_probs.py --out log_probs.jsonl [--seconds 40] [--device cuda]

Every case is a line of JSON, written at once. Exit status 1 if one failed. On a CPU the kernels run in Triton's
interpreter, in float16, if `TRITON_INTERPRET=1` is set; else they say why they do not.

Legend: P positions, X hidden size, V vocabulary, K (position, label) pairs, C kinds of scores.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from flash_rounding import worst_token_error
from harness import Times, append_record, attempt, environment, new_parser

from verl_tree.functional import linear_choice
from verl_tree.functional.linear_arguments import LabelledPairs, LogitTransform
from verl_tree.functional.linear_log_probs import linear_log_probs, plain_log_probs

SCORE_LIMIT = 1e-3
FACTOR = 4.0
REPETITIONS = 5

Score = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Head:
    """One head and what is asked of it."""

    name: str
    hidden_size: int
    vocabulary: int = 151_936
    softcap: float | None = None
    calculate_entropy: bool = False
    num_positions: int = 2048


HEADS = (
    Head("0.6B", 1024),
    Head("8B", 4096),
    Head("0.6B, entropy", 1024, calculate_entropy=True),
    Head("1.7B, softcap", 2048, softcap=30.0),
)


def main() -> None:
    """Check all heads and write their records."""
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that the program runs")
    options = parser.parse_args()
    append_record({"kind": "environment", **environment(options)}, options.out)
    started = time.monotonic()
    num_failed = num_not_run = 0
    for head in [Head("tiny", 64, 500, num_positions=48)] if options.small else HEADS:
        if time.monotonic() - started > options.seconds:
            num_not_run += 1
            continue
        print(f"{time.monotonic() - started:6.1f} s {head}", flush=True)
        result, error = attempt(lambda head=head: _check(head, options=options))
        record = result if error is None else {"error": error, "passed": False}
        num_failed += not record.get("passed", True)
        append_record({"kind": "log_probs", **asdict(head), **record}, options.out)
        if error is not None and options.device == "cuda":
            torch.cuda.synchronize()  # raises if the context is broken
    append_record({"kind": "end", "num_failed": num_failed, "num_not_run": num_not_run}, options.out)
    sys.exit(1 if num_failed else 0)


def _check(head: Head, *, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16  # the interpreter has no bfloat16
    generator = torch.Generator(device=device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    linear = torch.nn.Linear(head.hidden_size, head.vocabulary, bias=False, device=device, dtype=dtype)
    weight_VX = (draw(head.vocabulary, head.hidden_size) * 3 * head.hidden_size**-0.5).to(dtype)
    hidden_PX = draw(head.num_positions, head.hidden_size).to(dtype)
    position_K = torch.tensor(sorted([*range(head.num_positions), *range(0, head.num_positions, 16)]), device=device)
    label_K = torch.randint(head.vocabulary, position_K.shape, generator=generator, device=device)
    transform = LogitTransform(softcap=head.softcap)
    pairs = LabelledPairs(position_K, label_K, 0.9, transform, calculate_entropy=head.calculate_entropy)
    reasons = linear_choice.not_supported_reasons(linear, linear.forward, hidden_PX, pairs)
    if reasons:
        is_wrong = any(reason.startswith("self-test") for reason in reasons)
        return {"refused": reasons, "passed": not is_wrong}
    inputs = [hidden_PX, weight_VX]
    grad_CK = draw(1 + head.calculate_entropy, len(position_K))
    want = _results(plain_log_probs, [each.double() for each in inputs], pairs, grad_CK)
    plain = _results(plain_log_probs, inputs, pairs, grad_CK)
    runs = [_results(linear_log_probs, inputs, pairs, grad_CK) for _ in range(2)]
    errors = {"scores": max((run["scores"].double() - want["scores"]).abs().max().item() for run in runs)}
    limits = {"scores": SCORE_LIMIT}
    for name in ("hidden states", "weight"):
        errors[name] = max(worst_token_error(run[name], want[name]) for run in runs)
        limits[name] = FACTOR * worst_token_error(plain[name], want[name])
    repeats = all(torch.equal(runs[0][name], runs[1][name]) for name in want)
    del want, plain, runs
    passed = repeats and all(errors[name] <= limits[name] for name in errors)
    times = {
        name: _time(score, inputs, pairs, grad_CK, is_cuda=device.type == "cuda")
        for name, score in {"fused": linear_log_probs, "plain": plain_log_probs}.items()
    }
    return {"errors": errors, "limits": limits, "repeats": repeats, "must_repeat": True, "passed": passed, **times}


def _results(
    score: Score, inputs: list[torch.Tensor], pairs: LabelledPairs, grad_CK: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    scores_CK = score(*leaves, None, pairs)
    gradients = torch.autograd.grad(scores_CK, leaves, grad_CK.to(scores_CK.dtype))
    return {"scores": scores_CK.detach(), "hidden states": gradients[0], "weight": gradients[1]}


def _time(
    score: Score, inputs: list[torch.Tensor], pairs: LabelledPairs, grad_CK: torch.Tensor, *, is_cuda: bool
) -> dict[str, Any]:
    """Return the median of forward and backward pass together, and the most memory they take."""
    times = Times()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(REPETITIONS):
        with times.measure(is_cuda=is_cuda):
            _results(score, inputs, pairs, grad_CK)
    return {"ms": times.median_s * 1000, "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else None}


if __name__ == "__main__":
    main()
