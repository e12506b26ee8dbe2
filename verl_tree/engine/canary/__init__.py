"""A canary in every update: a row once more, alone and by the model's own forward, beside what its tree gave.

A kernel is tested when it is chosen, and the tests of this project compare whole updates. Neither sees what goes wrong
later, on another machine, or in a shape that nobody tried. So an update draws a row, computes it without gradient and
without a tree (`ModelCalls.flat`), and compares its log-probs, or values, with those that the loss has read
(`verl_tree.functional.rounding`). Now and then it compares the gradient of a layer, too.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from verl_tree.engine.canary.drawn_rows import DrawnRows, Finding
from verl_tree.engine.canary.paths import DrawnRow
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import MiniBatchRoutes
from verl_tree.engine.rows.packs import TreeBatch, TreeMicroBatch
from verl_tree.families import EXPERTS

logger = logging.getLogger(__name__)

METRIC = "tree/canary"
DUE = "canary_is_due"
"""Key of a mini-batch that says whether the canary looks at it; without the key it does."""
LONGEST = 2
"""Rows are computed up to so many capacities: without gradients, that takes no more memory than a pack with them."""


class Canary:
    """Draws rows of the updates of an engine, and concludes from what all ranks found.

    Attributes:
        metrics: `METRIC` of the last update, if it looked at it.
    """

    def __init__(self, engine: ModelCalls) -> None:
        self._engine = engine
        self.metrics: dict[str, float] = {}
        # Ranks that compute the same rows draw the same.
        self._rng = np.random.default_rng(0)
        self._num_compared = 0
        self._seen: Counter[tuple[int, ...]] = Counter()

    def draw(self, batch: TreeBatch, data: TensorDict, *, routes: MiniBatchRoutes | None) -> DrawnRows | None:
        """Draw rows of an update, rather long ones, and rather in trees unlike those before; None if it does not look.

        All ranks look, or none does, also where one has no rows.
        """
        self.metrics = {}
        num_rows = self._engine.tree_config.canary
        if not num_rows or not tu.get(data, DUE, default=True):
            return None
        if reason := self._blind(routes):
            _tell("nothing", reason)
            return None
        leaves = [(micro, leaf) for micro in batch.micro_batches for leaf in range(micro.layout.num_leaves)]
        kinds = [kind for micro in batch.micro_batches for kind in _kinds(micro)]
        weights = np.array([kind.length / (1 + self._seen[kind.shape]) for kind in kinds])
        drawn = []
        for _ in range(min(num_rows, len(leaves))):
            number = int(self._rng.choice(len(leaves), p=weights / weights.sum()))
            weights[number] = 0.0
            self._seen[kinds[number].shape] += 1
            max_len = LONGEST * batch.capacity
            drawn.append(DrawnRow.of_leaf(*leaves[number], shift=self._engine.head.shift, max_len=max_len))
        return DrawnRows(self._engine, drawn, data, routes=routes, num_calls=num_rows, capacity=batch.capacity)

    def compare(self, drawn: DrawnRows, idle: Callable[[], Tensor]) -> Finding | None:
        """Compare drawn rows, and from time to time a gradient; every rank calls it, see `DrawnRows.compare`."""
        found = drawn.compare(idle)
        every, number = self._engine.tree_config.canary_gradient_every, self._num_compared
        self._num_compared += 1
        if not every or number % every:
            return found
        if (setting := self._engine.auxiliary_loss) is not None:
            _tell("no gradients", f"{setting} changes more than a sum over rows does")
            return found
        of_gradient = drawn.compare_gradient(idle, number=number // every)
        return max(found or of_gradient, of_gradient, key=lambda each: each.difference.units)

    def conclude(self, found: Sequence[Finding | None]) -> None:
        """Take what each rank has found.

        Raises:
            ValueError: A row of some rank is further from its tree than rounding explains.
        """
        those = [each for each in found if each is not None]
        if those:
            self.metrics = {METRIC: max(each.difference.units for each in those)}
        for each in those:
            if each.message:
                raise ValueError(each.message)

    def _blind(self, routes: MiniBatchRoutes | None) -> str | None:
        """Return why two right passes of the model may differ by more than rounding."""
        config = self._engine.model_config.hf_config.get_text_config(decoder=True)
        if routes is None and any(getattr(config, name, None) for name in EXPERTS):
            return "rounding may change the experts of a token; actor.router_replay.mode=R2 imposes them"
        random = [name for name, each in self._engine.model.named_modules() if isinstance(each, nn.Dropout) and each.p]
        return f"{random[0]} draws random numbers" if random else None


class _Kind(NamedTuple):
    length: int
    shape: tuple[int, ...]


def _kinds(micro: TreeMicroBatch) -> Iterator[_Kind]:
    """Yield of each row of a micro-batch its length, and what is alike between it and other rows."""
    of_tree = (micro.cut.num_sections.bit_length(), micro.layout.num_leaves.bit_length(), micro.is_flat)
    for length in np.diff(micro.layout.leaf_offsets).tolist():
        yield _Kind(length, (length.bit_length(), *of_tree))


@cache
def _tell(what: str, reason: str) -> None:
    if dist.get_rank() == 0:
        logger.warning("tree.canary compares %s: %s", what, reason)
