"""What a layer asks of its attention besides the tree mask.

Legend: T tree tokens, Hq query heads.
"""

from dataclasses import dataclass
from typing import Self

import torch

from verl_tree.tree.plan import AttentionPlan


@dataclass(frozen=True, slots=True, eq=False)
class ScoreOptions:
    """How a layer's scores become probabilities. `tree_attention` explains the fields; None switches an option off.

    Positions are those on a token's own path. The definitions are those of transformers (5.10.4: masking_utils.py, and
    the eager attention of Gemma-2 and gpt-oss).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None

    @classmethod
    def of_layer(
        cls,
        plan: AttentionPlan,
        *,
        scale: float,
        num_heads: int,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> Self:
        """Check the range and shape of a layer's options, and drop a window that covers the longest path."""
        if window is not None and window < 1:
            raise ValueError(f"window={window}: a query sees at least itself; give at least 1, or None for no window")
        if softcap is not None and not softcap > 0:
            raise ValueError(f"softcap={softcap}: give a positive bound of the scores, or None for no bound")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(
                f"sinks have the shape {tuple(sinks.shape)}: give one logit per query head, ({num_heads},)"
            )
        is_window = window is not None and window < plan.max_path_len
        return cls(scale=scale, window=window if is_window else None, softcap=softcap, sinks_H=sinks)

    def names(self) -> tuple[str, ...]:
        """Return the options in force besides the scale: `"window"`, `"softcap"`, `"sinks"`."""
        given = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks_H}
        return tuple(name for name, value in given.items() if value is not None)

    def not_served_reasons(self, *, served: tuple[str, ...] = ()) -> list[str]:
        """Say why a backend that serves only the options in `served` cannot serve these."""
        reasons = {
            "window": f"a sliding window of {self.window} tokens, shorter than the longest path, is not served",
            "softcap": f"scores softcapped at {self.softcap} are not served",
            "sinks": "attention sinks are not served",
        }
        return [reasons[name] for name in self.names() if name not in served]
