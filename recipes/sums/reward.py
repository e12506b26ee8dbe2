"""The reward: reasoning-gym's own verifier on the last number of an answer."""

import re
from functools import cache

from reasoning_gym import create_dataset
from reasoning_gym.dataset import ProceduralDataset

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def compute_score(*, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 1.0 if the last number of the answer is the right one, else 0.0: ``4 + 3 = 7.`` is right for 7."""
    numbers = _NUMBER.findall(solution_str)
    return float(bool(numbers) and _verifier().score_answer(numbers[-1], {"answer": ground_truth}) == 1.0)


@cache
def _verifier() -> ProceduralDataset:
    return create_dataset("chain_sum", size=1, seed=0)
