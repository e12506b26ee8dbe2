"""The drawn rows of one update on this rank: what the loss reads of them, then what they are alone.

Legend: Q tokens of a path, K scores of it that are compared.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl_tree.engine.canary.gradient import compare_gradient, neighbours
from verl_tree.engine.canary.paths import DrawnRow, path_alone
from verl_tree.engine.canary.report import write_report
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import MiniBatchRoutes
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import MicroBatchRows
from verl_tree.functional.rounding import LIMIT, Difference, moved_embeddings
from verl_tree.tree.nodes import IntArray

REMEDY = "To go on, set tree.backend=dense or tree.relay=never, if that mends it, else tree.enabled=false"


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
        capacity: int,
    ) -> None:
        self._engine, self._drawn, self._data, self._routes = engine, drawn, data, routes
        self._num_calls, self._capacity = num_calls, capacity
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
        calls = engine.with_idle(calls, idle, num_calls=self._num_calls)
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
        drawn, difference = max(pairs, key=lambda pair: pair[1].units)
        message = "" if difference.is_rounding else self._report(drawn, difference, flat[drawn.row])
        return Finding(difference, message)

    def compare_gradient(self, idle: Callable[[], Tensor], *, number: int) -> Finding:
        """Compare the gradient of a layer, of rows beside the first drawn one; see `gradient.compare_gradient`."""
        engine, drawn = self._engine, self._drawn[0] if self._drawn else None
        rows = [] if drawn is None else neighbours(drawn, shift=engine.head.shift, max_len=self._capacity)
        layer, difference = compare_gradient(engine, rows, self._data, routes=self._routes, number=number, idle=idle)
        if difference.is_rounding or drawn is None:
            return Finding(difference, "")
        found = {each.leaf: {"layer": layer, "places": each.scored_K.tolist()} for each in rows}
        path = write_report(engine, drawn.micro, found=found, difference=difference)
        return Finding(
            difference,
            f"tree.canary_gradient_every: the gradient of {layer}, of the scores of a few rows, differs by "
            f"{difference.size:.3g} of its norm between their tree and these rows alone by the model's own forward: "
            f"{difference.units:.3g} times what rounding makes of it ({difference.unit:.3g}); {LIMIT:g} times would "
            f"pass. tree.backend is {engine.tree_config.backend}. {_kept_in(path)} {REMEDY}",
        )

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
        """Return the model call of a path alone; its scores go into `made`."""
        engine = self._engine
        rows = MicroBatchRows(drawn.micro, self._data, names=engine.head.names, shift=engine.head.shift)
        alone = path_alone(engine, drawn, rows, routes=self._routes)

        def run() -> Tensor:
            scores_CK = alone()
            if engine.makes_scores:
                made[drawn.row] = scores_CK[0]
            return scores_CK

        return run

    def _report(self, drawn: DrawnRow, difference: Difference, flat_K: Tensor) -> str:
        """Keep the tree of a row, and return what is to be said of it."""
        micro, engine = drawn.micro, self._engine
        of_row = {"places": drawn.scored_K.tolist(), "tree": self._of_tree[drawn.row].tolist(), "flat": flat_K.tolist()}
        path = write_report(engine, micro, found={drawn.leaf: of_row}, difference=difference)
        return (
            f"tree.canary: {engine.head.names[0]} of a row are {difference.size:.3g} apart, as the loss read them and "
            f"by the model's own forward: {difference.units:.3g} times what rounding makes of them "
            f"({difference.unit:.3g}); {LIMIT:g} times would pass. The worst is token "
            f"{drawn.scored_K[difference.place]} of {len(drawn.token_Q)}, in a tree of {micro.layout.num_tokens} "
            f"tokens, {micro.layout.num_leaves} rows and {micro.cut.num_sections} sections, with "
            f"tree.backend={engine.tree_config.backend}. {_kept_in(path)} {REMEDY}"
        )


def _kept_in(path: Path) -> str:
    return f"{path} has the tree, and `verl-tree canary {path} --model FOLDER` computes it again on one machine."
