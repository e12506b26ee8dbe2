"""What an engine scores: the one thing in which the engine of a policy and that of a critic differ.

Legend: C kinds of scores, K scores of a model call.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from verl_tree.functional.relayed import call_scores, call_values


@dataclass(frozen=True, slots=True)
class Head:
    """The scores of a model call.

    `score` runs the model on one call: `score(model, call, layout, plan=, images=, temperature=, calculate_entropy=,
    reading=, chunk_size=)` returns (C, K); see `call_scores`.
    """

    names: tuple[str, ...]  # verl's names of the C kinds
    shift: int  # Where verl keeps a token's score in its row: -1, one position earlier
    scores_own_tokens: bool  # Whether a token is scored by itself, as a value is, not by its parent
    score: Callable[..., Tensor]

    def names_of(self, *, calculate_entropy: bool) -> tuple[str, ...]:
        """Return the names of what is scored; entropies only where they are asked for."""
        return self.names if calculate_entropy else tuple(name for name in self.names if name != "entropy")


def _values(*args: Any, plan: Any, images: Any, **_options: Any) -> Tensor:
    assert images is None, "critics that read images are refused when they are built"
    return call_values(*args, plan=plan)


# A first token has no log-prob, so one roll shifts all rows.
POLICY = Head(("log_probs", "entropy"), shift=-1, scores_own_tokens=False, score=call_scores)
VALUE = Head(("values",), shift=0, scores_own_tokens=True, score=_values)

HEADS: Mapping[str, Head] = {"language_model": POLICY, "value_model": VALUE}
"""By verl's `model_type` of an engine."""
