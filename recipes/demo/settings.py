"""What data and models are made from; free of heavy imports, so that a run that was prepared before starts at once."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """The size of the small model and its two supervised stages.

    Attributes:
        num_skilled_steps: Optimiser steps of the first stage, in which the solver is always right.
        num_mixed_steps: Optimiser steps of the second stage, in which the solver has mixed habits.
        num_sessions: Solved sessions in the batch of one step.
        mixed_rate: Peak of the learning rates in the second stage, as a share of the first stage's.
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
    num_skilled_steps: int = 320
    num_mixed_steps: int = 40
    mixed_rate: float = 0.25
    num_sessions: int = 12
    matrix_learning_rate: float = 0.02
    learning_rate: float = 6e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `prepare` makes is a function of these settings and of the code.

    Attributes:
        seed: Of the tasks, the solver and the weights.
        seed_step: Distance between the first seeds of training, validation and warm start. It keeps them apart where a
            task uses up seeds of its own, see `tasks.make_tasks`.
        num_train_tasks: Rows of ``train.parquet``.
        num_validation_tasks: Rows of ``validation.parquet``.
        warm_start: How to make the model; None makes none, for a run with another model.
    """

    seed: int = 1
    seed_step: int = 10_000_000
    num_train_tasks: int = 2048
    num_validation_tasks: int = 64
    warm_start: WarmStartSettings | None = field(default_factory=WarmStartSettings)

    @property
    def train_seed(self) -> int:
        """Seed of the training tasks."""
        return self.seed * 100_000_000

    @property
    def validation_seed(self) -> int:
        """Seed of the validation tasks."""
        return self.train_seed + self.seed_step

    @property
    def splits(self) -> tuple[tuple[str, int, int], ...]:
        """Name, number of tasks and seed of each split."""
        return (
            ("train", self.num_train_tasks, self.train_seed),
            ("validation", self.num_validation_tasks, self.validation_seed),
        )

    @property
    def warm_start_seed(self) -> int:
        """First seed of the warm start's tasks."""
        return self.train_seed + 2 * self.seed_step
