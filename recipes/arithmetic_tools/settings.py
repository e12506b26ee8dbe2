"""What the demo's data and model are made from; small and free of heavy imports, so a cache hit costs no time."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Probability that each of the scripted solver's decisions is the right one.

    Attributes:
        plan: what to call first.
        conclude: what a branch states.
        go_on: whether another call is needed once the first results are there.
        answer: what the final answer says.
    """

    plan: float
    conclude: float
    go_on: float
    answer: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """The model's size and its supervised stages.

    Attributes:
        skilled: habits of the solver in the first stage.
        mixed: habits in the second stage.
        num_skilled_steps: optimiser steps of the first stage.
        num_mixed_steps: optimiser steps of the second stage.
        num_sessions: solved sessions in the batch of one step.
        mixed_rate: peak of the learning rates in the second stage, as a share of the first stage's.
        branch_fraction: share of their branches in the batch; a branch costs a whole row and trains a few tokens.
        matrix_learning_rate: Muon's peak learning rate, for the weight matrices.
        learning_rate: AdamW's peak learning rate, for the embedding and the norms.
    """

    hidden_size: int = 128
    intermediate_size: int = 256
    num_layers: int = 3
    num_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    initializer_range: float = 0.04
    skilled: Habits = Habits(plan=1.0, conclude=1.0, go_on=1.0, answer=1.0)
    mixed: Habits = Habits(plan=0.5, conclude=0.7, go_on=0.7, answer=0.7)
    num_skilled_steps: int = 320
    num_mixed_steps: int = 40
    mixed_rate: float = 0.25
    num_sessions: int = 12
    branch_fraction: float = 0.25
    matrix_learning_rate: float = 0.02
    learning_rate: float = 6e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `prepare` makes is a function of these settings and of the recipe's code.

    Attributes:
        seed: of the memory, the tasks, the solver and the weights.
        num_train_tasks: rows of ``train.parquet``.
        num_validation_tasks: rows of ``validation.parquet``; none shares an entry with training or warm start.
        warm_start: how to make the model; None makes none, for a run with another model.
    """

    seed: int = 1
    num_train_tasks: int = 2048
    num_validation_tasks: int = 64
    warm_start: WarmStartSettings | None = field(default_factory=WarmStartSettings)

    @property
    def train_seed(self) -> int:
        """Seed of the training tasks; see `tasks.make_tasks` on how far seeds must be apart."""
        return self.seed * 100_000_000

    @property
    def validation_seed(self) -> int:
        """Seed of the validation tasks."""
        return self.train_seed + 10_000_000

    @property
    def warm_start_seed(self) -> int:
        """First seed of the warm start's tasks."""
        return self.train_seed + 20_000_000
