"""The task: reasoning-gym's `chain_sum`, its first levels from easy to hard."""

from collections.abc import Iterator
from typing import Any

from reasoning_gym import create_dataset

LEVELS = ((2, 1), (3, 1), (2, 2))
"""Terms of a sum, and digits of a term."""


def make_rows(num_rows: int, *, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield rows as verl reads them, so many of each level; the data source names the level.

    reasoning-gym seeds its entry i with ``seed + i``, so two calls share no entry when their seeds differ by at least
    the larger `num_rows`.
    """
    for num_terms, num_digits in LEVELS:
        sizes = {"min_terms": num_terms, "max_terms": num_terms, "min_digits": num_digits, "max_digits": num_digits}
        for index, entry in enumerate(create_dataset("chain_sum", **sizes, size=num_rows, seed=seed)):
            yield {
                "data_source": f"chain_sum_{num_terms}_terms_{num_digits}_digits",
                "prompt": [{"role": "user", "content": f"What is {entry['metadata']['expression']}?"}],
                "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
                "extra_info": {"split": split, "index": index},
            }
