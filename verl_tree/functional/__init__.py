"""Log-probs of a forest from a transformers model, and the way back to flat trajectories.

`api` is the whole path (`tree_log_probs`), `logprobs` one forward pass of one pack, and `expansion` the gather to
trajectories. They need torch and transformers, but not verl.
"""

from verl_tree.functional.api import SequenceLogProbs, tree_log_probs
from verl_tree.functional.expansion import expand, scale_gradient, shared_token_weights, tree_scale

__all__ = ["SequenceLogProbs", "expand", "scale_gradient", "shared_token_weights", "tree_log_probs", "tree_scale"]
