"""Correctness matrix of the attention backends on a device, against float64 on the same device.

Every backend x dtype x head dim x heads x forest x remainder: forward and the three gradients, each case twice; and
every backend x forest for layers with a sliding window, softcapped scores or sinks, whose gradient is compared too.
Some forests are sections behind their context. Before every call the device's free memory is filled with NaN, so an
element that a kernel forgets to write shows. A backend may err 1.5 times as much as the dense backend does in the same
dtype (and never more than a loose absolute bound that catches a wrong mask); a backend that calls itself deterministic
must repeat itself bit for bit.

    python benchmarks/check_attention.py [--device cuda] [--out attention_check.json] [--seconds 150]

Needs torch and numpy, and triton or flash-attn-4 for the backends that are built on them. What does not fit into the
time is counted as not run. Exit status 1 if anything failed.
"""

import argparse
import itertools
import sys
import time
from typing import Any

import numpy as np
import torch
from attention import longest_context
from harness import environment, new_parser, write_json

from verl_tree.attention import BACKENDS, AttentionPlan, ScoreOptions, tree_attention
from verl_tree.testing.synthetic import random_forest, star, tool_fan_out, tree_search
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

FAST_BACKENDS = [name for name, backend in BACKENDS.items() if not backend.is_oracle]
HEADS = ((1, 1), (8, 8), (8, 2), (14, 2), (8, 1))
"""Query and key-value heads: groups of 1, 1, 4, 7 and 8."""

OPTIONS = (
    {"head_dim": 64, "heads": (8, 1), "dtype": torch.bfloat16, "window": 128, "sinks": True},
    {"head_dim": 128, "heads": (8, 2), "dtype": torch.bfloat16, "window": 300},
    {"head_dim": 256, "heads": (8, 2), "dtype": torch.bfloat16, "window": 300, "softcap": 2.0},
    {"head_dim": 128, "heads": (8, 2), "dtype": torch.float16, "softcap": 2.0},
    {"head_dim": 64, "heads": (8, 2), "dtype": torch.float32, "window": 33, "softcap": 2.0, "sinks": True},
)
"""Few, as each is compiled anew: about those of gpt-oss, Mistral and Gemma-2; scores reach the caps."""

FORESTS = {
    "one token": lambda: [np.array([3])],
    "chain": lambda: [np.arange(257)],
    "duplicates and prefixes": lambda: random_forest(3, num_leaves=40, mean_len=24),
    "fine": lambda: tree_search(
        num_trees=3, num_expansions=5, num_rounds=4, num_steps=5, prompt_len=37, step_len=(3, 40), seed=1
    ),
    "star": lambda: star(7, prompt_len=513, branch_len=(60, 300), seed=2),
    "agent": lambda: tool_fan_out(
        3, num_calls=3, prompt_len=200, plan_len=(10, 60), call_len=(5, 40), result_len=(20, 150), seed=3
    ),
    "exact blocks": lambda: star(3, prompt_len=256, branch_len=128, seed=4),
}

SECTIONS = {"chain": 100, "fine": 150, "star": 700, "agent": 300}
"""Capacity at which a forest is cut. Its section with the longest context is a case, too."""

LOOSEST_ERROR = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Relative error (norm) that no correct kernel reaches and every wrong mask exceeds."""


def main() -> None:
    """Run the matrix, print a line per backend and the failures, write the JSON."""
    options = _parse_options()
    if options.device == "cuda":
        print(f"device: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    started = time.perf_counter()
    plans = _plans(device=options.device)
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    layers = [
        {"head_dim": head_dim, "heads": heads, "dtype": dtype}
        for head_dim, heads, dtype in itertools.product(options.head_dims, HEADS, dtypes)
    ]
    layers += [layer for layer in OPTIONS if layer["head_dim"] in options.head_dims]
    cases = list(itertools.product(layers, plans, options.backends))
    # Shuffled, so that what does not fit into the time is a sample of everything.
    order = np.random.default_rng(0).permutation(len(cases))
    records, num_not_run = [], 0
    for index in order:
        if time.perf_counter() - started > options.seconds:
            num_not_run += 1
            continue
        layer, forest, backend = cases[index]
        record = _check(backend, plans[forest], device=options.device, **layer)
        records.append({"forest": forest, **record})
    failures = _report(records, num_not_run=num_not_run)
    write_json({"environment": environment(options), "cases": records}, options.out)
    sys.exit(1 if failures else 0)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 96, 128, 256])
    parser.add_argument("--backends", nargs="+", default=FAST_BACKENDS)
    return parser.parse_args()


def _plans(*, device: str) -> dict[str, AttentionPlan]:
    layouts = {
        name: TreeLayout.from_forest(TokenForest.from_sequences(make()), device=device)
        for name, make in FORESTS.items()
    }
    plans = {name: AttentionPlan.from_layout(layout) for name, layout in layouts.items()}
    for name, capacity in SECTIONS.items():
        plans[f"section of {name}"] = longest_context(layouts[name], capacity=capacity)
    return plans


def _check(
    backend: str,
    plan: AttentionPlan,
    *,
    head_dim: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> dict[str, Any]:
    """One case: errors of output and gradients beside those of the dense backend, or why it is refused."""
    num_heads, num_kv_heads = heads
    case = {
        "backend": backend,
        "dtype": str(dtype),
        "head_dim": head_dim,
        "heads": heads,
        "tokens": plan.num_tokens,
        "context": plan.num_context,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
    }
    generator = torch.Generator(device=device).manual_seed(plan.num_tokens + head_dim)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, head_dim, device=device, generator=generator).to(dtype)

    queries, keys = (plan.num_queries, num_heads), (plan.num_tokens, num_kv_heads)
    inputs, grad_out = [random(*shape) for shape in (queries, keys, keys)], random(*queries)
    asked = {"window": window, "softcap": softcap}
    sinks_H = torch.randn(num_heads, device=device, generator=generator).to(dtype) if sinks else None
    options = ScoreOptions.of_layer(plan, scale=head_dim**-0.5, num_heads=num_heads, sinks=sinks_H, **asked)
    reasons = BACKENDS[backend].not_supported_reasons(*inputs, plan, options=options)
    if reasons:
        return {**case, "refused": reasons}
    if sinks_H is not None:
        inputs.append(sinks_H)
    want = _run("dense", plan, [each.double() for each in inputs], grad_out.double(), **asked)
    plain = _run("dense", plan, inputs, grad_out, **asked)
    first, second = (_run(backend, plan, inputs, grad_out, poison=device == "cuda", **asked) for _ in range(2))
    errors = {name: _error(first[name], want[name]) for name in want}
    # The sinks' gradient comes from the rounded output, and its terms cancel over the tokens.
    least = {name: LOOSEST_ERROR[dtype] / (3 if name == "dsinks" else 10) for name in want}
    limits = {name: max(1.5 * _error(plain[name], want[name]), least[name]) for name in want}
    return {
        **case,
        "errors": errors,
        "limits": limits,
        "repeats": all(torch.equal(first[name], second[name]) for name in first),
        "passed": all(errors[name] <= limits[name] for name in errors),
    }


def _run(
    backend: str,
    plan: AttentionPlan,
    inputs: list[torch.Tensor],
    grad_out: torch.Tensor,
    *,
    window: int | None,
    softcap: float | None,
    poison: bool = False,
) -> dict[str, torch.Tensor]:
    """Output and gradients; `inputs` are queries, keys, values and, where there are any, the sinks."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    if poison:
        _poison(2 * sum(each.numel() * 4 for each in (*inputs, grad_out)))
    sinks_H = leaves[3] if len(leaves) > 3 else None
    out = tree_attention(*leaves[:3], plan, backend=backend, window=window, softcap=softcap, sinks=sinks_H)
    if poison:
        _poison(2 * sum(each.numel() * 4 for each in (*inputs, grad_out)))
    gradients = torch.autograd.grad(out, leaves, grad_out)
    names = ("out", "dq", "dk", "dv", "dsinks")[: 1 + len(leaves)]
    return dict(zip(names, (out.detach(), *gradients), strict=True))


def _poison(num_bytes: int) -> None:
    """Leave NaN in what the caching allocator will hand out next, in blocks of several sizes."""
    blocks = [torch.full((max(num_bytes >> shift, 512) // 4,), torch.nan, device="cuda") for shift in range(6)]
    del blocks


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite where anything is not a number.

    A gradient that is zero but for rounding (one visible key) counts as if it had elements of 0.01.
    """
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want).norm() / want.norm().clamp(min=0.01 * want.numel() ** 0.5)).item()


def _report(records: list[dict[str, Any]], *, num_not_run: int) -> list[dict[str, Any]]:
    failures = [record for record in records if not record.get("passed", True)]
    for backend in sorted({record["backend"] for record in records}):
        mine = [record for record in records if record["backend"] == backend]
        run = [record for record in mine if "passed" in record]
        worst = {
            dtype: max(max(record["errors"].values()) for record in run if record["dtype"] == dtype)
            for dtype in sorted({record["dtype"] for record in run})
        }
        repeating = sum(record["repeats"] for record in run)
        num_passed = sum(record["passed"] for record in run)
        print(
            f"{backend}: {num_passed} of {len(run)} passed, {repeating} repeat bit for bit, "
            f"{len(mine) - len(run)} refused; worst errors { ({key: f'{value:.1e}' for key, value in worst.items()}) }"
        )
        for reason in sorted({"; ".join(record["refused"]) for record in mine if "refused" in record}):
            print(f"  refused: {reason}")
    for record in failures[:20]:
        print(f"FAILED: {record}")
    print(f"{len(failures)} failures; {num_not_run} cases did not fit into the time", flush=True)
    return failures


if __name__ == "__main__":
    main()
