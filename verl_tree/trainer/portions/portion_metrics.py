"""The metrics of a step from verl's metrics of its portions.

Each of verl's metrics is a mean, a largest or smallest value, or a spread, of rows or of trained tokens. Its name says
which (verl 0.9.1); a test compares the names and values with those that verl computes of all rows at once.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

import numpy as np
from omegaconf import DictConfig

from verl_tree.clashes import divides_by_width
from verl_tree.trainer.portions.portion import Counts, Moments, PortionResult

_ROWS, _ANSWERED, _TOKENS = "num_rows", "num_answered_rows", "num_trained_tokens"
_OFF_POLICY = "training/off_policy/trajectory_"
_CORRECTION = "rollout_corr/"
_WEIGHTS = f"{_CORRECTION}rollout_is_"

MEANS: dict[str, str] = {
    "actor/reward_kl_penalty": _ROWS,
    "critic/score/mean": _ANSWERED,
    "critic/rewards/mean": _ANSWERED,
    "critic/advantages/mean": _TOKENS,
    "critic/returns/mean": _TOKENS,
    "critic/values/mean": _TOKENS,
    "response_length/mean": _ROWS,
    "response_length_non_aborted/mean": _ANSWERED,
    "response/aborted_ratio": _ROWS,
    "prompt_length/mean": _ROWS,
    "num_turns/mean": _ROWS,
    "training/num_turns/mean": _ROWS,
    "training/rollout_probs_diff_mean": _TOKENS,
    f"{_OFF_POLICY}spans/mean": _ROWS,
    f"{_OFF_POLICY}staleness/mean": _ROWS,
    f"{_OFF_POLICY}staleness_worst/mean": _ROWS,
    **{f"{_CORRECTION}{name}": _TOKENS for name in ("kl", "k3_kl", "chi2_token")},
    **{
        f"{_CORRECTION}{name}": _ROWS
        for name in (
            "training_ppl",
            "training_log_ppl",
            "rollout_ppl",
            "rollout_log_ppl",
            "log_ppl_diff",
            "log_ppl_abs_diff",
            "ppl_ratio",
            "chi2_seq",
            "rollout_is_seq_mean",
            "rollout_is_seq_fraction_high",
            "rollout_is_seq_fraction_low",
        )
    },
    f"{_WEIGHTS}mean": _TOKENS,
}
"""Means, and what they are means of."""

SPREADS = {
    "training/rollout_probs_diff_std": ("training/rollout_probs_diff_mean", 1),
    f"{_WEIGHTS}std": (f"{_WEIGHTS}mean", 0),
    f"{_WEIGHTS}seq_std": (f"{_WEIGHTS}seq_mean", 1),
}
"""Standard deviations: from which mean, and how many less than all their squares are divided by."""

AT_LONGEST = {
    "response_length/clip_ratio": _ROWS,
    "response_length_non_aborted/clip_ratio": _ANSWERED,
    "prompt_length/clip_ratio": _ROWS,
}
"""Shares of the rows that are as long as the longest, which may be in another portion."""

SAME = ("training/global_step", "training/epoch", "actor/reward_kl_penalty_coeff")
ANY = "training/rollout_probs_diff_valid"
RATIO_BEYOND = (f"{_WEIGHTS}ratio_fraction_high", f"{_WEIGHTS}ratio_fraction_low")
SAMPLE_SIZE = f"{_WEIGHTS}eff_sample_size"
CORRELATION = "training/rollout_actor_probs_pearson_corr"
EXPLAINED = "critic/vf_explained_var"
ENTROPY = "actor/entropy"
OF_THE_DRIVER = ("timing_s/", "timing_per_token_ms/", "perf/")


def join_metrics(results: Sequence[PortionResult], *, config: DictConfig) -> dict[str, float]:
    """Return verl's metrics of all rows, without those of times (`OF_THE_DRIVER`)."""
    counts = [result.counts for result in results]
    names = dict.fromkeys(name for result in results for name in result.metrics)
    columns = {name: [result.metrics[name] for result in results] for name in names}
    moments = [result.moments for result in results if result.moments is not None]
    joined: dict[str, float] = {}
    for name, values in columns.items():
        if name.startswith(OF_THE_DRIVER):
            continue
        if name in (CORRELATION, EXPLAINED):
            together = reduce(add, moments)
            joined[name] = _correlation(together) if name == CORRELATION else _explained(together)
        elif name == ENTROPY:
            joined[name] = _entropy(values, counts, actor=config.actor_rollout_ref.actor)
        elif name in SPREADS:
            mean, ddof = SPREADS[name]
            joined[name] = _spread(values, columns[mean], _weights(counts, MEANS[mean]), ddof=ddof)
        elif name == SAMPLE_SIZE:
            joined[name] = _sample_size(columns, counts)
        elif name in RATIO_BEYOND:
            is_of_rows = config.algorithm.rollout_correction.rollout_is == "sequence"
            joined[name] = _mean(values, _weights(counts, _ROWS if is_of_rows else _TOKENS))
        elif name in AT_LONGEST:
            longest = columns[f"{name.rsplit('/', 1)[0]}/max"]
            shares = [v if top == max(longest) else 0.0 for v, top in zip(values, longest, strict=True)]
            joined[name] = _mean(shares, _weights(counts, AT_LONGEST[name]))
        else:
            joined[name] = _simple(name, values, counts)
    return joined


def _simple(name: str, values: Sequence[float], counts: Sequence[Counts]) -> float:
    if name in SAME:
        return values[0]
    if name in MEANS:
        return _mean(values, _weights(counts, MEANS[name]))
    known = [value for value in values if not math.isnan(value)]
    if name == ANY or name.endswith(("/max", "_max", "_max_deviation")):
        return max(known, default=math.nan)
    assert name.endswith(("/min", "_min")), f"{name}: no rule joins this metric of verl; see MEANS"
    return min(known, default=math.nan)


def _weights(counts: Sequence[Counts], name: str) -> list[int]:
    return [
        {_ROWS: each.num_rows, _ANSWERED: each.num_answered_rows, _TOKENS: each.num_trained_tokens}[name]
        for each in counts
    ]


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean; a portion without weight may have no value (NaN)."""
    total = math.fsum(weights)
    terms = (value * weight for value, weight in zip(values, weights, strict=True) if weight)
    return math.fsum(terms) / total if total else math.nan


def _spread(stds: Sequence[float], means: Sequence[float], weights: Sequence[int], *, ddof: int) -> float:
    """Return the standard deviation of all tokens or rows; the squares are divided by `ddof` less than their number."""
    if len(stds) == 1:
        return stds[0]
    mean, total = _mean(means, weights), sum(weights)
    if total <= ddof:
        return math.nan
    squares = (
        # The unbiased deviation of one token is not defined, and 0 from its mean.
        (weight - ddof) * (std**2 if weight > 1 else 0.0) + weight * (each - mean) ** 2
        for std, each, weight in zip(stds, means, weights, strict=True)
        if weight
    )
    return math.sqrt(math.fsum(squares) / (total - ddof))


def _sample_size(columns: Mapping[str, Sequence[float]], counts: Sequence[Counts]) -> float:
    """Return the effective sample size of the weights, a share of the tokens: squared mean over mean square."""
    means, stds, weights = columns[f"{_WEIGHTS}mean"], columns[f"{_WEIGHTS}std"], _weights(counts, _TOKENS)
    squares = [mean**2 + std**2 for mean, std in zip(means, stds, strict=True)]
    return _mean(means, weights) ** 2 / _mean(squares, weights)


def _correlation(moments: Moments) -> float:
    (xx, xy), (_, yy) = moments.comoment
    return float(xy / np.sqrt(xx * yy)) if xx * yy > 0 else math.nan


def _explained(moments: Moments) -> float:
    """Return which share of the variance of the returns the values explain, as verl's `compute_data_metrics` does."""
    if moments.count < 2:
        return math.nan
    (xx, xy), (_, yy) = moments.comoment / (moments.count - 1)
    return float(1.0 - (xx - 2 * xy + yy) / (xx + 1e-5))


def _entropy(values: Sequence[float], counts: Sequence[Counts], *, actor: DictConfig) -> float:
    """Join what verl's `agg_loss` gave for the portions."""
    mode = actor.loss_agg_mode
    if mode == "token-sum":
        return math.fsum(values)
    if mode == "token-mean":
        return _mean(values, _weights(counts, _TOKENS))
    joined = _mean(values, [each.num_trained_rows for each in counts])
    if not divides_by_width(actor):
        return joined
    # verl divides by the width to which it pads, here that of the portion.
    longest = [each.longest_response for each in counts]
    scaled = [value * length for value, length in zip(values, longest, strict=True)]
    return _mean(scaled, [each.num_trained_rows for each in counts]) / max(longest)
