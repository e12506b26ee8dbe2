"""A transformers model on a forest: the log-probs of its tokens, and how they become the flat trajectories' again.

`api` is the whole path (`tree_log_probs`), `logprobs` one forward pass of one pack, `expansion` the way back to the
trajectories. Needs torch and transformers, nothing of verl.
"""

from verl_tree.functional.api import SequenceLogProbs, tree_log_probs
from verl_tree.functional.expansion import expand, scale_gradient, shared_token_weights, tree_scale

__all__ = ["SequenceLogProbs", "expand", "scale_gradient", "shared_token_weights", "tree_log_probs", "tree_scale"]
