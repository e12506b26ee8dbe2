"""What became of a draw, and how two sides are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

FLOOR = 1e-4
"""A gradient below this share of the whole is measured by that: a query that sees one key has rounding for one."""
NOTHING = 1e-9
"""A gradient below this share of the whole compares nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draw.

    Attributes:
        status: "exact", "refused" (by a ValueError), or "wrong".
        detail: The message of a refusal, or what is wrong.
        has_sections: Whether a tree ran in sections.
        num_gradients: Gradients that were compared, and of how many both sides are zero but for rounding.
    """

    status: str
    detail: str = ""
    has_sections: bool = False
    num_gradients: int = 0
    num_vacuous: int = 0


@dataclass(slots=True)
class Comparison:
    """Relative distances of the numbers of two sides, by name."""

    errors: dict[str, float]
    num_gradients: int = 0
    num_vacuous: int = 0

    @property
    def worst(self) -> float:
        """The largest distance; what is not a number is infinite."""
        return max((error if error == error else float("inf") for error in self.errors.values()), default=0.0)

    def scores(self, name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Compare the scores of rows, relative to the largest of them."""
        assert [each.shape for each in got] == [each.shape for each in want], f"shapes of {name}"
        pairs = [(here, there) for here, there in zip(got, want, strict=True) if there.numel()]
        largest = max((there.abs().max().item() for _, there in pairs), default=1.0)
        worst = max(((here - there).abs().max().item() for here, there in pairs), default=0.0)
        self.errors[name] = worst / max(largest, 1e-30)

    def gradients(
        self,
        got: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        *,
        floor: float = FLOOR,
        nothing: float = NOTHING,
    ) -> None:
        """Compare gradients by parameter; one that is missing is zero."""
        whole = sum(gradient.norm().item() ** 2 for gradient in want.values()) ** 0.5
        for name in want.keys() | got.keys():
            there = want[name] if name in want else got[name] * 0.0
            here = got[name] if name in got else there * 0.0
            norm = there.norm().item()
            error = (here - there).norm().item() / max(norm, floor * whole, 1e-30)
            self.errors[f"gradient of {name}"] = error
            self.num_gradients += 1
            self.num_vacuous += norm <= nothing * whole or whole == 0.0

    def outcome(self, tolerance: float, *, has_sections: bool = False) -> Outcome:
        """Judge; what is not a number is wrong."""
        wrong = {name: error for name, error in self.errors.items() if not error <= tolerance}
        if 2 * self.num_vacuous > self.num_gradients:
            wrong["most gradients are zero, so nothing is compared;"] = 1.0
        worst = sorted(wrong.items(), key=lambda each: -each[1])[:4]
        detail = f"{len(wrong)} of {len(self.errors)} differ: " + ", ".join(
            f"{name} {error:.2g}" for name, error in worst
        )
        return Outcome(
            status="wrong" if wrong else "exact",
            detail=detail if wrong else "",
            has_sections=has_sections,
            num_gradients=self.num_gradients,
            num_vacuous=self.num_vacuous,
        )


def refused(error: ValueError, words: Sequence[str]) -> Outcome:
    """Judge a refusal: it has to say one of the words, if there are any."""
    if words and not any(each in str(error) for each in words):
        return Outcome("wrong", f"refused, but not with any of {list(words)}: {error}")
    return Outcome("refused", str(error))


def judged(outcome: Outcome, words: Sequence[str]) -> Outcome:
    """Return an outcome, wrong if a refusal was due."""
    if words and outcome.status == "exact":
        return Outcome("wrong", f"exact, where a ValueError with one of {list(words)} was due: change `clashes`")
    return outcome
