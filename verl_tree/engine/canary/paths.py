"""A row of a tree, and its call alone, by the model's own forward.

Legend: Q tokens of a path, K scores of it that are compared, C kinds of scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import MiniBatchRoutes
from verl_tree.engine.rows.micro_batch import MicroBatchRows, device_of_rank
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.relay.calls import RelayCall
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRow:
    """A row of a micro-batch, and which of its tokens are compared."""

    micro: TreeMicroBatch
    leaf: int  # in the order of the layout
    token_Q: IntArray  # the tree tokens of its path, or of the beginning of it
    scored_K: IntArray  # places in Q

    @classmethod
    def of_leaf(cls, micro: TreeMicroBatch, leaf: int, *, shift: int, max_len: int) -> "DrawnRow":
        """Take a leaf of a micro-batch; the score of a token is made `shift` places from it."""
        token_Q = micro.layout.path(leaf)[:max_len].numpy()
        wanted = np.flatnonzero(micro.wanted_T[token_Q].numpy())
        return cls(micro, leaf, token_Q, wanted[wanted + shift >= 0])

    @property
    def row(self) -> int:
        """The row of the mini-batch."""
        return int(self.micro.rows[self.leaf])


def path_alone(
    engine: ModelCalls, drawn: DrawnRow, rows: MicroBatchRows, *, routes: MiniBatchRoutes | None
) -> Callable[[], Tensor]:
    """Return the model call of a path alone, with the images and routes of its tree; it returns the scores (C, K)."""

    def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
        return engine.scores(
            call,
            rows.layout,
            plan=plan,
            images=drawn.micro.images,
            temperature=rows.temperature(),
            calculate_entropy=False,
        )

    call = RelayCall.of_path(drawn.token_Q, scored=drawn.scored_K, shift=engine.head.shift)
    plan = AttentionPlan.from_subtree_end(
        call.subtree_end,
        backend=engine.tree_config.backend,
        device=device_of_rank(),
        shard=SequenceShard(len(call.token_Q)),  # each rank of a team computes all of it
    )
    return partial(compute if routes is None else routes.around(compute, drawn.micro, is_counted=False), call, plan)
