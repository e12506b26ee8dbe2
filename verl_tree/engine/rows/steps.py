"""The model calls of a mini-batch, lined up on all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from verl_tree.cost.model import Work
from verl_tree.engine.rows.computed_paths import ComputedPaths
from verl_tree.engine.rows.packs import TreeBatch
from verl_tree.packing.counts import ForestCounts
from verl_tree.relay.run import Mode, NumCalls


@dataclass(frozen=True, slots=True)
class RankWork:
    """One rank's work in a mini-batch: its micro-batches in the order in which they run, and seconds of packing."""

    works: tuple[Work, ...]
    num_calls: tuple[NumCalls, ...]  # Model calls of each micro-batch
    counts: ForestCounts
    packing_s: float
    paths: ComputedPaths  # of an update

    @classmethod
    def of_batch(cls, batch: TreeBatch, *, mode: Mode, scores_own_tokens: bool) -> Self:
        """Sum up this rank's micro-batches."""
        # Only updates have an MFU, and lengths of all rows travel to all ranks.
        updated = () if mode == "forward" else batch.micro_batches
        paths = (micro.paths(scores_own_tokens=scores_own_tokens) for micro in updated)
        return cls(
            works=tuple(micro.work for micro in batch.micro_batches),
            num_calls=tuple(micro.num_calls(mode) for micro in batch.micro_batches),
            counts=batch.counts,
            packing_s=batch.packing_s,
            paths=ComputedPaths.sum(paths),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """Model calls that all ranks make together, and the range of its micro-batches that each rank computes in them."""

    calls: NumCalls
    ranges: tuple[range, ...]

    def works(self, ranks: Sequence[RankWork]) -> list[Work]:
        """Return the work of each rank in the step."""
        return [
            sum((rank.works[index] for index in indices), Work())
            for rank, indices in zip(ranks, self.ranges, strict=True)
        ]


def steps_of(ranks: Sequence[Sequence[NumCalls]], *, mode: Mode, in_one: bool = False) -> list[Step]:
    """Line up the model calls of all ranks; `ranks` has the calls of each rank's micro-batches in order.

    With `in_one` they are one step, so that a pipeline fills and empties once.

    FSDP's collectives need from all ranks the same calls in the same order. A step has as many as the next micro-batch
    of any rank needs. A rank that needs fewer goes on with packs, and is idle where it has none that fits.

    Example: one rank has a tree of two spine calls and three sections, the other has four packs. The first step has 2
    calls without gradient and 3 with; three of the packs run in it, the fourth in a second step. Without micro-batches
    there is still one call.
    """
    if in_one and any(ranks):
        sums = [[sum(counts) for counts in zip(*rank, strict=True)] for rank in ranks if rank]
        return [Step(NumCalls(*map(max, zip(*sums, strict=True))), tuple(range(len(rank)) for rank in ranks))]
    positions = [0] * len(ranks)
    steps = []
    while any(position < len(rank) for position, rank in zip(positions, ranks, strict=True)):
        waiting = [rank[position] for position, rank in zip(positions, ranks, strict=True) if position < len(rank)]
        calls = NumCalls(*map(max, zip(*waiting, strict=True)))
        ends = [_fill(rank, start=position, calls=calls) for position, rank in zip(positions, ranks, strict=True)]
        steps.append(Step(calls, tuple(map(range, positions, ends))))
        positions = ends
    return steps or [Step(NumCalls.of(mode, num_sections=1, num_spine_calls=0), (range(0),) * len(ranks))]


def _fill(rank: Sequence[NumCalls], *, start: int, calls: NumCalls) -> int:
    """Return where the micro-batches end that fit into the calls of a step, from `start` on."""
    num_first, num_last, end = *calls, start
    while end < len(rank) and rank[end].num_first <= num_first and rank[end].num_last <= num_last:
        # Only one store at a time: the others must be packs, which take one call.
        if end > start and sum(rank[end]) > 1:
            break
        num_first, num_last = num_first - rank[end].num_first, num_last - rank[end].num_last
        end += 1
    return end
