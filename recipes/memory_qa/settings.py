"""What the recipe's data and model are made from; free of heavy imports, so a cache hit costs no time."""

from dataclasses import dataclass, field

from recipes.arithmetic_tools import settings as arithmetic_tools

MAX_NOTES = 2
"""Notes in a context: as many as a question asks for, so retrieval has to choose the right ones of four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probability that each of the scripted solver's decisions is the right one.

    Attributes:
        note: Whether a fact is kept, and kept whole.
        answer: Whether the answer is read off the notes.
    """

    note: float
    answer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings(arithmetic_tools.WarmStartSettings):
    """Model size, stages and learning rates: the fields of `arithmetic_tools`, with habits of this recipe.

    Here `branch_fraction` is the share of turns before the answer that are in the batch.
    """

    skilled: Habits = Habits(note=1.0, answer=1.0)
    mixed: Habits = Habits(note=0.65, answer=0.9)
    num_skilled_steps: int = 140
    branch_fraction: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(arithmetic_tools.Settings):
    """Everything that `prepare` makes is a function of these settings and of the code; seeds count on one by one."""

    warm_start: WarmStartSettings | None = field(default_factory=WarmStartSettings)

    @property
    def validation_seed(self) -> int:
        """Seed of the validation tasks."""
        return self.train_seed + 1

    @property
    def warm_start_seed(self) -> int:
        """Seed of the warm start's first tasks; later ones count on from it."""
        return self.train_seed + 2
