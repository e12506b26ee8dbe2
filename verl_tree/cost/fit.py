"""The fit of the cost model of packs (`verl_tree.cost.model`) to their measured times.

Legend: M measurements; 5 stands for the fields of `Work`, in their order.
"""

import math
from collections import deque
from dataclasses import astuple

import numpy as np
from scipy.optimize import nnls

from verl_tree.cost.model import CostModel, FloatArray, Work

MIN_MEASUREMENTS = 8
"""Packs that must be measured before a fit, because the model has five coefficients."""

OUTLIER_FACTOR = 3.0
"""The second fit leaves out measurements whose relative error exceeds this many times the median error."""

FREE_SHARE = 0.3
"""Standard deviation of the prior on the share of a pack's time that scored tokens, nodes and the pack itself take."""


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
        rows_M5 = np.array([astuple(work) for work, _ in self._measured], dtype=np.float64)
        rows_M5 /= np.array([seconds for _, seconds in self._measured])[:, None]
        first = _non_negative_fit(rows_M5)
        errors_M = np.abs(rows_M5 @ first - 1)
        # Without the floor, an exact fit would take rounding errors for outliers.
        is_kept_M = errors_M <= max(OUTLIER_FACTOR * float(np.median(errors_M)), 1e-9)
        coefficients = first if is_kept_M.all() else _non_negative_fit(rows_M5[is_kept_M])
        self.relative_error = float(np.median(np.abs(rows_M5 @ coefficients - 1)))
        self.model = CostModel(*coefficients.tolist())
        return self.model

    def metrics(self, *, prefix: str) -> dict[str, float]:
        """Return the coefficients and the relative error of the fit; an empty dict before the first."""
        if not self.is_fitted:
            return {}
        return self.model.as_metrics(prefix) | {f"{prefix}/relative_error": self.relative_error}


def _non_negative_fit(rows_M5: FloatArray) -> FloatArray:
    """Find coefficients >= 0 under which every row predicts 1. (M, 5) -> (5,).

    Full packs look alike, so noise would decide which coefficient takes the time. If the constant term took it, the
    balancer would never cut a group. So a ridge prior, as strong as the noise, pulls to 0 what is free in
    `CostModel.prior`.
    """
    # Pairs outnumber packs by many orders of magnitude, and nnls compares gradients: so columns get unit length.
    norms = np.linalg.norm(rows_M5, axis=0)
    norms[norms == 0] = 1.0
    unit_M5 = rows_M5 / norms
    plain, residual = nnls(unit_M5, np.ones(len(unit_M5)))
    variance = residual**2 / max(len(unit_M5) - np.count_nonzero(plain), 1)
    # A unit column times x is a share of about x / sqrt(M). The floor decides between identical columns.
    weight = math.sqrt(max(variance, 1e-12) / len(unit_M5)) / FREE_SHARE
    is_free = np.array(astuple(CostModel.prior())) == 0
    rows = np.vstack([unit_M5, weight * np.eye(len(norms))[is_free]])
    ridged, _ = nnls(rows, np.concatenate([np.ones(len(unit_M5)), np.zeros(np.count_nonzero(is_free))]))
    return ridged / norms
