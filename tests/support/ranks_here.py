"""Ranks in this process that take portions of a step's rows."""

import pickle
from collections.abc import Sequence

import ray

from verl_tree.trainer.portions.portion import Portion, PortionResult, run_portion


class RanksHere:
    """A worker group whose ranks take portions; what they get and give is pickled, as between processes."""

    def __init__(self, num_ranks: int) -> None:
        self.world_size = num_ranks
        self.portions: list[Portion] = []

    def run_portion(self, work: Sequence[Portion | None]) -> list[PortionResult | None]:
        """Let one rank after another run its portion."""
        assert len(work) == self.world_size
        self.portions = [pickle.loads(pickle.dumps(portion)) for portion in work if portion is not None]
        results = [run_portion(portion, ray.get(portion.config)) for portion in self.portions]
        given = pickle.loads(pickle.dumps(results))
        return given + [None] * (len(work) - len(given))
