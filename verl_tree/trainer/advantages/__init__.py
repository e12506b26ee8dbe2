"""Advantages for sessions with several leaves, one number per token (docs/advantages.md).

`leaves`      one advantage per leaf: `tree_grpo`, `tree_grpo_intra`
`nodes`       one advantage per node of a session's token tree: `treerl`, `treepo`
`steps`       one advantage per leaf and step, compared with steps from the same state: `gigpo`
`estimators`  all of them in verl's form, under the names that `algorithm.adv_estimator` takes
`rows`        what the trainer tells them of its rows, beyond what verl gives to an estimator
"""

from verl_tree.trainer.advantages.estimators import ESTIMATORS, REWARDS_ONLY, register
from verl_tree.trainer.advantages.leaves import intra_tree_advantages, leaf_advantages
from verl_tree.trainer.advantages.nodes import SessionTrees, treepo_advantages, treerl_advantages
from verl_tree.trainer.advantages.rows import Rows, announce_rows
from verl_tree.trainer.advantages.steps import Call, gigpo_advantages

__all__ = [
    "ESTIMATORS",
    "REWARDS_ONLY",
    "Call",
    "Rows",
    "SessionTrees",
    "announce_rows",
    "gigpo_advantages",
    "intra_tree_advantages",
    "leaf_advantages",
    "register",
    "treepo_advantages",
    "treerl_advantages",
]
