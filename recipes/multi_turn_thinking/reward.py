"""The reward: verl scores a session's last row with it and gives the other leaves a copy."""

from typing import Any

from recipes.arithmetic_tools.tasks import score_answer


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """Returns 1.0 when the answer has both values right, else 0.0; an answer in the thinking does not count.

    Args:
        data_source: of the row; not needed.
        solution_str: the response of the last row as text.
        ground_truth: the right values, separated by a space.
        extra_info: of the row; not needed.
    """
    del data_source, extra_info
    return score_answer(solution_str.rpartition("</think>")[2], answer=ground_truth)
