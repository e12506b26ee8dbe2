"""Checks attention on a forest that is too long for an oracle of all its pairs.

The gradient of the output is zero but for some queries. Then an oracle of these queries has the gradients of all keys
and values, and every other query's gradient must be exactly zero. A second call, with a gradient for every query, is
repeated, and its results are compared with those of the first backend that ran, token by token.

Legend: Q queries, S of them sampled, T tokens.
"""

from pathlib import Path
from typing import Any

import torch
from check_cases import Layer
from flash_rounding import rounded_attention, worst_token_error
from tree_calls import random_inputs, results_of, visible_pairs

from verl_tree.attention import AttentionPlan

NUM_SAMPLED = 256
FACTOR = 2.5
"""Allowed error of the worst token, as a multiple of that of a correct kernel."""

BETWEEN_FACTOR = 2 * FACTOR
"""The same for the difference of two backends, of which each may err."""


def check_long(
    backend: str, layer: Layer, plan: AttentionPlan, *, folder: Path | None, must_repeat: bool
) -> dict[str, Any]:
    """Return the errors of the sampled queries, the differences to the first backend of `folder`, and the limits."""
    device = plan.subtree_end_T.device
    inputs, grad_out = random_inputs(layer, plan, device=str(device))
    sampled_S = sample_queries(plan)
    grad_sampled = torch.zeros_like(grad_out)
    grad_sampled[sampled_S] = grad_out[sampled_S]
    got = results_of(backend, layer, plan, inputs, grad_sampled)
    others_Q = torch.ones(plan.num_queries, dtype=torch.bool, device=device)
    others_Q[sampled_S] = False
    others_are_zero = not got["dq"][others_Q].any().item()
    got |= {name: got[name][sampled_S] for name in ("out", "dq")}
    want, rounded = _of_sampled(layer, plan, inputs, grad_out, sampled_S)
    errors = {f"{name} worst": worst_token_error(got[name], want[name]) for name in want}
    limits = {f"{name} worst": FACTOR * worst_token_error(rounded[name], want[name]) for name in want}
    del got, want, rounded

    first, second = (results_of(backend, layer, plan, inputs, grad_out) for _ in range(2))
    repeats = all(torch.equal(first[name], second[name]) for name in first)
    between = {}
    other_name, other = _first_results(backend, layer, first, folder=folder, num_context=plan.num_context)
    for name, each in other.items():
        key = f"{name} of {other_name}"
        between[key] = worst_token_error(first[name], each.double())
        limits[key] = BETWEEN_FACTOR / FACTOR * limits[f"{name} worst"]
    errors |= between
    passed = others_are_zero and all(errors[key] <= limits[key] for key in errors) and (repeats or not must_repeat)
    found = {"others_are_zero": others_are_zero, "repeats": repeats, "must_repeat": must_repeat, "passed": passed}
    return {"errors": errors, "limits": limits, **found}


def sample_queries(plan: AttentionPlan) -> torch.Tensor:
    """Return rows of q, ascending: the first ones, whose few keys make the largest errors, the last and random ones."""
    num_ends = min(NUM_SAMPLED // 8, plan.num_queries)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(plan.num_queries, generator=generator)[: NUM_SAMPLED - 2 * num_ends]
    ends = (torch.arange(num_ends), torch.arange(plan.num_queries - num_ends, plan.num_queries))
    return torch.cat((*ends, drawn)).unique().to(plan.subtree_end_T.device)


def _of_sampled(
    layer: Layer, plan: AttentionPlan, inputs: list[torch.Tensor], grad_out: torch.Tensor, sampled_S: torch.Tensor
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results of the sampled queries in float64 and as a correct kernel of the dtype rounds them."""
    visible_ST = visible_pairs(plan, queries=sampled_S)
    q_QHD, *keys = inputs
    rows = ([q_QHD[sampled_S], *keys], grad_out[sampled_S])
    want, rounded = (
        rounded_attention(
            [each.to(dtype) for each in rows[0]], rows[1].to(dtype), visible_ST, scale=layer.head_dim**-0.5
        )
        for dtype in (torch.float64, layer.torch_dtype)
    )
    return want, rounded


def _first_results(
    backend: str, layer: Layer, results: dict[str, torch.Tensor], *, folder: Path | None, num_context: int
) -> tuple[str, dict[str, torch.Tensor]]:
    """Return name and results of the first backend that ran this case, or nothing if it is this one."""
    if folder is None:
        return backend, {}
    path = folder / f"long, {layer}, {num_context}.pt"
    if path.exists():
        found = torch.load(path, map_location=results["out"].device)
        return found["backend"], {} if found["backend"] == backend else found["results"]
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"backend": backend, "results": results}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)
    return backend, {}
