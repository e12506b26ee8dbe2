"""The reward of a leaf: verl's reward function for this recipe (`reward.custom_reward_function`)."""

from recipes.demo.tasks import score_answer


def compute_score(*, solution_str: str, ground_truth: str, **_: object) -> float:
    """Return 1.0 for an answer that reasoning-gym's verifier takes, else 0.0."""
    return score_answer(solution_str, answer=ground_truth)
