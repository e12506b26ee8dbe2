"""How far two right answers of a model may be apart: the difference of two passes in units of the model's own rounding.

The unit is measured: a pass is repeated with its embeddings moved by one rounding step each, up or down. What comes out
differs by what rounding at the first layer has become at the last, in this row and with these weights. Another kernel
or another order of sums makes differences of that size (docs/exactness.md).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

LIMIT = 20.0
"""Units by which right answers do not differ."""

SCORE_STEPS, MODEL_STEPS = 4.0, 0.5
"""The least unit, in rounding steps of the scores' dtype and of the model's: log-probs of sure tokens do not move."""


class Difference(NamedTuple):
    """The largest difference of two passes over one row, the unit, and which of the scores it is."""

    size: float
    unit: float
    place: int

    @property
    def units(self) -> float:
        """The difference in units; infinite if it is not a number."""
        return math.inf if math.isnan(self.size) else self.size / self.unit

    @property
    def is_rounding(self) -> bool:
        """Whether it is within the limit."""
        return self.units <= LIMIT

    @classmethod
    def of_scores(cls, scores_K: Tensor, flat_K: Tensor, moved_K: Tensor, *, dtype: torch.dtype) -> "Difference":
        """Compare scores with those of a flat pass, and these with those of the moved one, on any device.

        `dtype` is that in which the model computes its layers. Where both passes give no number, they agree.
        """
        least = SCORE_STEPS * torch.finfo(flat_K.dtype).eps + MODEL_STEPS * torch.finfo(dtype).eps
        if not len(flat_K):
            return cls(0.0, least, 0)
        scores_K, flat_K, moved_K = (each.double().cpu() for each in (scores_K, flat_K, moved_K))
        agree_K = (scores_K == flat_K) | (scores_K.isnan() & flat_K.isnan())  # infinite numbers, too
        apart_K = (scores_K - flat_K).abs().masked_fill(agree_K, 0.0)
        place = int(apart_K.nan_to_num(nan=torch.inf).argmax())
        unit = float((moved_K - flat_K).abs().nan_to_num(nan=0.0, posinf=0.0).max())
        return cls(float(apart_K[place]), max(unit, least), place)

    @classmethod
    def of_norms(cls, apart: float, unit: float, norm: float, *, dtype: torch.dtype) -> "Difference":
        """Compare gradients by norms: of a difference, of the difference that a moved pass makes, and of a gradient."""
        least = MODEL_STEPS * torch.finfo(dtype).eps
        return cls(apart / norm, max(unit / norm, least), 0) if norm else cls(apart, least, 0)


@contextmanager
def moved_embeddings(embeddings: Sequence[torch.nn.Module], *, dtype: torch.dtype) -> Iterator[None]:
    """Move what these modules return by one rounding step of `dtype`, each number up or down, always the same ones."""

    def move(_module: torch.nn.Module, _args: Any, out: Tensor) -> Tensor:
        generator = torch.Generator(out.device).manual_seed(0)
        signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device, dtype=out.dtype) * 2 - 1
        return out + out * signs * torch.finfo(dtype).eps

    with ExitStack() as hooks:
        for module in embeddings:
            hooks.callback(module.register_forward_hook(move).remove)
        yield
