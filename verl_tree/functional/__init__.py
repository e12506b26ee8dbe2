"""Log-probs of a forest from a transformers model, and the way back to flat trajectories.

`api` is the whole path (`tree_log_probs`), `scoring` that of many continuations without gradient (`score`), `logprobs`
one forward pass of one pack, and `expansion` the gather to trajectories. They need torch and transformers, not verl.
"""

from verl_tree.functional.api import SequenceLogProbs, tree_log_probs
from verl_tree.functional.expansion import expand, scale_gradient, shared_token_weights
from verl_tree.functional.scoring import ContinuationScores, score, score_batch, score_without

__all__ = [
    "ContinuationScores",
    "SequenceLogProbs",
    "expand",
    "scale_gradient",
    "score",
    "score_batch",
    "score_without",
    "shared_token_weights",
    "tree_log_probs",
]
