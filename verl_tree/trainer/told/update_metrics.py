"""The `tree/...` metrics of a step, from those of its updates.

With `separate_async` a step has `parameter_sync_step` updates. verl would average what they report, weighted by rows:
the tokens of a step would be those of one update, and its POR a mean of ratios. Here an update reports counters, which
are added up, and ratios are taken of the sums. A step with one update is no exception.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl_tree.packing.counts import ForestCounts, RankTimes

_COUNTS, _TIMES = "tree/counts/", "tree/times/"
_SUMS = ("micro_batches", "cut_groups", "cut_tokens")
_LARGEST = "canary"


def as_numbers(counts: ForestCounts, times: RankTimes | None = None) -> dict[str, float]:
    """Return the counters of an update as numbers that pass through verl's metrics; `step_metrics` adds them up."""
    numbers = {f"{_COUNTS}{name}": float(value) for name, value in asdict(counts).items()}
    return numbers | {f"{_TIMES}{name}": value for name, value in ({} if times is None else asdict(times)).items()}


def take_tree_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Remove the tree metrics of an update from `metrics` and return them; the actor's lose their prefix."""
    names = [name for name in metrics if name.removeprefix("actor/").removeprefix("critic/").startswith("tree/")]
    return {name.removeprefix("actor/"): float(metrics.pop(name)) for name in names}


def step_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of a step from what `take_tree_metrics` gave for each of its updates.

    Counters are added and given as `ForestCounts.metrics` and `RankTimes.metrics` name them, `critic/tree/...` for the
    critic. Of other metrics, `micro_batches`, `cut_groups` and `cut_tokens` are sums, `canary` the largest, and the
    rest (the fitted cost model) is that of the last update.
    """
    merged: dict[str, float] = {}
    for role in ("", "critic/"):
        prefix = f"{role}tree"
        counts = [_named(update, f"{role}{_COUNTS}") for update in updates]
        times = [_named(update, f"{role}{_TIMES}") for update in updates]
        if any(counts):
            total = sum(
                (ForestCounts(**{name: round(n) for name, n in each.items()}) for each in counts), ForestCounts()
            )
            merged.update(total.metrics(prefix=prefix))
        if any(times):
            merged.update(sum((RankTimes(**each) for each in times), RankTimes()).metrics(prefix=prefix))
        for update in updates:
            for name, value in _named(update, f"{prefix}/").items():
                if name in _SUMS:
                    merged[f"{prefix}/{name}"] = merged.get(f"{prefix}/{name}", 0.0) + value
                elif name == _LARGEST:
                    merged[f"{prefix}/{name}"] = max(merged.get(f"{prefix}/{name}", 0.0), value)
                elif not f"tree/{name}".startswith((_COUNTS, _TIMES)):
                    merged[f"{prefix}/{name}"] = value
    return merged


def _named(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
