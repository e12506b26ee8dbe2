"""The reward of a leaf: verl's reward function for this recipe (`reward.custom_reward_function`)."""

from typing import Any

from recipes.arithmetic_tools.tasks import score_answer


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Returns 1.0 for an answer that reasoning-gym's verifier takes, else 0.0; the signature is verl's.

    Args:
        data_source: of the row; not read.
        solution_str: the text of a chain's last turn.
        ground_truth: the row's right answer.
        extra_info: of the row; not read.
    """
    del data_source, extra_info
    return score_answer(solution_str, answer=ground_truth)
