"""The reward: verl scores a session's last row with it and gives the other leaves a copy."""

from recipes.demo.tasks import score_answer


def compute_score(*, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 1.0 when the answer has both values right, else 0.0; an answer in the thinking does not count."""
    return score_answer(solution_str.rpartition("</think>")[2], answer=ground_truth)
