"""The drawn rows of one update on this rank: what the loss reads of them, then what they are alone.

Legend: Q tokens of a path, K scores of it that are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_tree.engine.canary.report import write_report
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import MiniBatchRoutes
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import MicroBatchRows, device_of_rank
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.functional.rounding import LIMIT, Difference, moved_embeddings
from verl_tree.relay.calls import RelayCall
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard

LONGEST = 2
"""Rows are computed up to so many capacities: without gradients, that takes no more memory than a pack with them."""


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRow:
    """A row of a micro-batch, and which of its tokens are compared."""

    micro: TreeMicroBatch
    leaf: int  # in the order of the layout
    token_Q: IntArray  # the tree tokens of its path, or of the beginning of it
    scored_K: IntArray  # places in Q

    @classmethod
    def of_leaf(cls, micro: TreeMicroBatch, leaf: int, *, shift: int, capacity: int) -> "DrawnRow":
        """Take a leaf of a micro-batch; the score of a token is made `shift` places from it."""
        token_Q = micro.layout.path(leaf)[: LONGEST * capacity].numpy()
        wanted = np.flatnonzero(micro.wanted_T[token_Q].numpy())
        return cls(micro, leaf, token_Q, wanted[wanted + shift >= 0])

    @property
    def row(self) -> int:
        """The row of the mini-batch."""
        return int(self.micro.rows[self.leaf])


class Finding(NamedTuple):
    """What the worst drawn row of a rank showed, and the message if that is no rounding."""

    difference: Difference
    message: str


class DrawnRows:
    """The drawn rows of one update."""

    def __init__(
        self,
        engine: ModelCalls,
        drawn: Sequence[DrawnRow],
        data: TensorDict,
        *,
        routes: MiniBatchRoutes | None,
        num_calls: int,
    ) -> None:
        self._engine, self._drawn, self._data, self._routes = engine, drawn, data, routes
        self._num_calls = num_calls + -num_calls % engine.call_multiple
        self._of_tree: dict[int, Tensor] = {}

    def see(self, rows: MicroBatchRows, leaves: IntArray, outputs: dict[str, Tensor]) -> None:
        """Take the scores that the loss reads of some leaves of a micro-batch."""
        head = self._engine.head
        for each in self._drawn:
            if each.micro is not rows.micro or each.leaf not in leaves:
                continue
            lens = np.diff(rows.layout.leaf_offsets)[leaves]
            start = int(lens[: np.flatnonzero(leaves == each.leaf)[0]].sum())
            values = jagged(outputs[head.names[0]])[0].detach()
            self._of_tree[each.row] = values[torch.from_numpy(start + each.scored_K + head.shift).to(values.device)]

    def compare(self, idle: Callable[[], Tensor]) -> Finding | None:
        """Compute the rows flat, twice, and compare; every rank calls it, and `idle` is a call of one without rows.

        None: this rank has no row, or none of its scores.

        Raises:
            ValueError: A path of a tree is not the row that it stands for.
        """
        self._check_paths()
        engine = self._engine
        made: dict[int, Tensor] = {}
        calls = [self._alone(each, made) for each in self._drawn]
        calls += [idle] * (self._num_calls - len(calls))
        with engine.flat():
            engine.run(calls, [], is_last=True)
            flat = dict(made)
            with moved_embeddings(engine.embeddings, dtype=engine.compute_dtype):
                engine.run(calls, [], is_last=True)
        if not engine.has_outputs or not self._drawn:
            return None
        differences = [
            Difference.of_scores(self._of_tree[each.row], flat[each.row], made[each.row], dtype=engine.compute_dtype)
            for each in self._drawn
        ]
        pairs = zip(self._drawn, differences, strict=True)
        drawn, difference = max(pairs, key=lambda pair: np.nan_to_num(pair[1].units, nan=np.inf))
        message = "" if difference.is_rounding else self._report(drawn, difference, flat[drawn.row])
        return Finding(difference, message)

    def _check_paths(self) -> None:
        """Check that paths have the tokens of their rows at the positions of these."""
        token_ids, offsets = (each.cpu().numpy() for each in jagged(self._data["input_ids"]))
        for each in self._drawn:
            layout, start = each.micro.layout, offsets[each.row]
            given = token_ids[start : start + len(each.token_Q)]
            is_row = np.array_equal(layout.token_ids_T[each.token_Q].numpy(), given)
            if not is_row or not np.array_equal(layout.position_T[each.token_Q].numpy(), np.arange(len(given))):
                raise ValueError(
                    f"tree.canary: row {each.row} of a mini-batch is not the path that stands for it in its tree, a "
                    "fault of verl_tree; train with tree.enabled=false"
                )

    def _alone(self, drawn: DrawnRow, made: dict[int, Tensor]) -> Callable[[], Tensor]:
        """Return the model call of a path alone, with the images and routes of its tree; its scores go into `made`."""
        engine, micro, shift = self._engine, drawn.micro, self._engine.head.shift
        rows = MicroBatchRows(micro, self._data, names=engine.head.names, shift=shift)

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return engine.scores(
                call,
                rows.layout,
                plan=plan,
                images=micro.images,
                temperature=rows.temperature(),
                calculate_entropy=False,
            )

        call = RelayCall.of_path(drawn.token_Q, scored=drawn.scored_K, shift=shift)
        plan = AttentionPlan.from_subtree_end(
            call.subtree_end,
            backend=engine.tree_config.backend,
            device=device_of_rank(),
            shard=SequenceShard(len(call.token_Q)),  # each rank of a team computes all of it
        )
        of_model = compute if self._routes is None else self._routes.around(compute, micro, is_counted=False)

        def run() -> Tensor:
            scores_CK = of_model(call, plan)
            if engine.makes_scores:
                made[drawn.row] = scores_CK[0]
            return scores_CK

        return run

    def _report(self, drawn: DrawnRow, difference: Difference, flat_K: Tensor) -> str:
        """Keep the tree of a row, and return what is to be said of it."""
        micro, engine = drawn.micro, self._engine
        path = write_report(
            engine,
            micro,
            leaf=drawn.leaf,
            scored_K=drawn.scored_K,
            tree_K=self._of_tree[drawn.row],
            flat_K=flat_K,
            difference=difference,
        )
        return (
            f"tree.canary: {engine.head.names[0]} of a row are {difference.size:.3g} apart, as the loss read them and "
            f"by the model's own forward: {difference.units:.3g} times what rounding makes of them "
            f"({difference.unit:.3g}); {LIMIT:g} times would pass. The worst is token "
            f"{drawn.scored_K[difference.place]} of {len(drawn.token_Q)}, in a tree of {micro.layout.num_tokens} "
            f"tokens, {micro.layout.num_leaves} rows and {micro.cut.num_sections} sections, with "
            f"tree.backend={engine.tree_config.backend}. {path} has the tree, and `verl-tree canary {path} --model "
            "FOLDER` computes it again on one machine. To go on, set tree.backend=dense or tree.relay=never, if that "
            "mends it, else tree.enabled=false"
        )
