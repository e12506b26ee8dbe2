"""The fit of the cost model of packs (`verl_tree.cost.model`) to their measured times.

Legend: M measurements, W fields of `Work`, in their order, K fitted ones, P of these that a prior pulls.
"""

import math
from collections import deque
from dataclasses import astuple

import numpy as np
from scipy.optimize import nnls

from verl_tree.cost.model import CostModel, FloatArray, Work

MIN_MEASUREMENTS = 8
"""Measurements before the first fit, and measurements that contain a part of the work before its price is fitted."""

OUTLIER_FACTOR = 3.0
"""The second fit leaves out measurements whose relative error exceeds this many times the median error."""

SHARE_STD = 0.3
"""Standard deviation of the prior on the share of a pack's time that each part but tokens and pairs takes."""


class CostFitter:
    """The cost model of one kind of model call, fitted to its latest `window` times by non-negative least squares.

    Relative errors are minimised, so small packs count as much as large ones. Some measurements contain time that no
    pack needs (compilation, the allocator's first growth). So the fit is repeated once without those that it misses by
    more than `OUTLIER_FACTOR` times the median error.

    Attributes:
        model: The latest fit; `CostModel.prior()` before the first.
        relative_error: Median of |predicted / measured - 1| over the window, with outliers; nan before the first fit.
    """

    def __init__(self, *, window: int = 512) -> None:
        self.model = CostModel.prior()
        self.relative_error = math.nan
        self._measured: deque[tuple[Work, float]] = deque(maxlen=window)

    @property
    def is_fitted(self) -> bool:
        """Whether `model` is a fit, not the prior."""
        return not math.isnan(self.relative_error)

    def add(self, work: Work, *, seconds: float) -> None:
        """Add the measured time of some work, usually one pack.

        Raises:
            ValueError: The time is not a positive, finite number.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds={seconds} is no measured time: give a positive number, or leave the pack out")
        self._measured.append((work, seconds))

    def fit(self) -> CostModel:
        """Fit the measurements of the window and return `model`, which is still the prior below `MIN_MEASUREMENTS`.

        Source: Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23 (scipy.optimize.nnls).
        """
        if len(self._measured) < MIN_MEASUREMENTS:
            return self.model
        # Each row is divided by its measured time, so it should predict 1, and its residual is its relative error.
        rows_MW = np.array([astuple(work) for work, _ in self._measured], dtype=np.float64)
        rows_MW /= np.array([seconds for _, seconds in self._measured])[:, None]
        first = _non_negative_fit(rows_MW)
        errors_M = np.abs(rows_MW @ first - 1)
        # Without the floor, an exact fit would take rounding errors for outliers.
        is_kept_M = errors_M <= max(OUTLIER_FACTOR * float(np.median(errors_M)), 1e-9)
        coefficients = first if is_kept_M.all() else _non_negative_fit(rows_MW[is_kept_M])
        self.relative_error = float(np.median(np.abs(rows_MW @ coefficients - 1)))
        self.model = CostModel(*coefficients.tolist())
        return self.model

    def metrics(self, *, prefix: str) -> dict[str, float]:
        """Return the coefficients and the relative error of the fit; an empty dict before the first."""
        if not self.is_fitted:
            return {}
        return self.model.as_metrics(prefix) | {f"{prefix}/relative_error": self.relative_error}


def _non_negative_fit(rows_MW: FloatArray) -> FloatArray:
    """Find coefficients >= 0 under which every row predicts 1. (M, W) -> (W,).

    A coefficient is fitted if all rows or `MIN_MEASUREMENTS` of them tell of it. The others keep their part of a
    token's, as in the prior: after packs alone, the spine would seem free.
    """
    prior_W = np.array(astuple(CostModel.prior()))
    is_fitted_W = np.count_nonzero(rows_MW, axis=0) >= min(MIN_MEASUREMENTS, len(rows_MW))
    is_fitted_W[:2] = True  # The prior counts in tokens, and where there are tokens, there are pairs.
    rows_MK = rows_MW[:, is_fitted_W]
    rows_MK[:, 0] += rows_MW[:, ~is_fitted_W] @ prior_W[~is_fitted_W]
    fitted_K = _ridge_fit(rows_MK, prior_K=prior_W[is_fitted_W])
    coefficients_W = prior_W * fitted_K[0]
    coefficients_W[is_fitted_W] = fitted_K
    return coefficients_W


def _ridge_fit(rows_MK: FloatArray, *, prior_K: FloatArray) -> FloatArray:
    """Do the same for the coefficients that are fitted. (M, K) -> (K,).

    Full packs look alike, so noise would decide which coefficient takes the time. If the constant term took it, the
    balancer would never cut a group; if the spine took it, a pack would seem free. So a ridge prior, as strong as the
    noise, pulls every coefficient to its part of a token's, which is 0 for what is free in `CostModel.prior`. Pairs are
    left alone, because the width of the model decides what they cost.
    """
    # Pairs outnumber packs by many orders of magnitude, and nnls compares gradients: so columns get unit length.
    norms_K = np.linalg.norm(rows_MK, axis=0)
    norms_K[norms_K == 0] = 1.0
    unit_MK = rows_MK / norms_K
    plain_K, residual = nnls(unit_MK, np.ones(len(unit_MK)))
    variance = residual**2 / max(len(unit_MK) - np.count_nonzero(plain_K), 1)
    # A unit column times x is a share of about x / sqrt(its rows). The floor decides between identical columns.
    num_rows_P = np.count_nonzero(rows_MK, axis=0)[2:]
    weight_P = np.sqrt(max(variance, 1e-12) / num_rows_P) / SHARE_STD
    pull_PK = np.eye(len(norms_K))[2:]
    pull_PK[:, 0] = -prior_K[2:] * norms_K[2:] / norms_K[0]
    rows = np.vstack([unit_MK, weight_P[:, None] * pull_PK])
    ridged_K, _ = nnls(rows, np.concatenate([np.ones(len(unit_MK)), np.zeros(len(pull_PK))]))
    return ridged_K / norms_K
