"""A page about a stored step on many ranks: what is asked, the calls of its ranks, what is lost, and the text.

`benchmarks/scale.py --trees` plans the step by the trainer's code and prints the page. What knows no driver is here.
Not there: rollouts, the optimiser's step, and what ranks exchange.

Legend: R data-parallel ranks, each of them a team, or all stages of one pipeline; M mini-batches.
"""

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
from omegaconf import OmegaConf

from rollout_hooks.capture.leaf_shapes import WrittenRow, leaf_shapes
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.functional.update_time import DEVICES, computed_costs
from verl_tree.launch.checks.memory import model_size
from verl_tree.launch.run.stored_work import Rows, micro_batches_of
from verl_tree.records import read_trees
from verl_tree.trainer.rows.batching import RowAssignment

FAILURES = ("mtbf_hours", "checkpoint_minutes", "restart_minutes", "save_seconds")


def _asked(
    default: Any, text: str, *, must_be: str = "", holds: Callable[[Any], bool] = lambda _: True, **parsed: Any
) -> Any:
    """Declare an option that takes the values for which `holds` is true; `parsed` is what argparse is told."""
    return field(default=default, metadata={"must_be": must_be, "holds": holds, "parsed": {"help": text, **parsed}})


def _whole(default: int | None, text: str, *, least: int = 1) -> Any:
    return _asked(default, text, must_be=f"{least} or more", holds=lambda value: value >= least, type=int)


def _amount(text: str) -> Any:
    return _asked(None, text, must_be="a finite number above 0", holds=lambda value: 0 < value < math.inf, type=float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked about a step; the fields are options of the command line.

    Raises:
        ValueError: A number is too small or not finite, there is no such file, or an option lacks another one.
    """

    trees: Sequence[str] = _asked((), "the stored trees of one step (tree.dump_dir)", nargs="+", metavar="FILE")
    ranks: int = _whole(0, "ranks that train, those of all teams, or of all stages of pipelines")
    prompts: int | None = _whole(None, "prompts of the step (as stored): the stored ones are repeated")
    mini_batches: int = _whole(1, "mini-batches of the step (1)")
    team: int = _whole(1, "ranks that compute every call together, ulysses_sequence_parallel_size (1)")
    pipeline: int = _whole(1, "stages of a pipeline (1)")
    capacity: int = _whole(16_384, "most tokens of a model call, tree.capacity (16384)", least=2)
    all_rows: bool = _asked(False, "compute rows that teach nothing, too (tree.compute=all)", action="store_true")
    gpu: str | None = _asked(None, "compute seconds from its data sheet, with --model", choices=DEVICES)
    model: str | None = _asked(None, "the folder of a model's config.json", metavar="FOLDER")
    mtbf_hours: float | None = _amount("mean hours between two failures of one rank")
    checkpoint_minutes: float | None = _amount("minutes from one checkpoint to the next")
    restart_minutes: float | None = _amount("minutes from a failure to the first step after it")
    save_seconds: float | None = _amount("seconds that ranks wait for a checkpoint")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not each.metadata["holds"](value):
                raise ValueError(f"{_option(each.name)} {value}: give {each.metadata['must_be']}")
        for path in self.trees:
            if not Path(path).is_file():
                raise ValueError(f"--trees {path}: there is no such file; give those that tree.dump_dir stored")
        if self.team > 1 and self.pipeline > 1:
            remedy = "no engine has both; give one of them"
            raise ValueError(f"--team {self.team} --pipeline {self.pipeline}: {remedy}")
        for name in ("team", "pipeline"):
            if self.ranks % getattr(self, name):
                remedy = f"ranks are no whole {name}s; give a multiple"
                raise ValueError(f"--ranks {self.ranks} --{name} {getattr(self, name)}: {remedy}")
        if (self.gpu is None) != (self.model is None):
            raise ValueError(f"--gpu {self.gpu} --model {self.model}: seconds need both; give the other, too")
        missing = [_option(name) for name in FAILURES if getattr(self, name) is None]
        if 0 < len(missing) < len(FAILURES):
            raise ValueError(f"{', '.join(missing)}: missing; failures need {', '.join(map(_option, FAILURES))}")

    @classmethod
    def take_from(cls, options: argparse.Namespace) -> Self | None:
        """Take the question out of the parsed options; None where nothing is asked."""
        values = {each.name: vars(options).pop(each.name) for each in fields(cls)}
        given = {name: value for name, value in values.items() if value is not None}
        if given and not {"trees", "ranks"} <= given.keys():
            raise ValueError(f"{', '.join(map(_option, given))}: a page needs --trees FILE and --ranks N; give both")
        return cls(**given) if given else None

    def costs(self) -> CostModel:
        """Return the times of parts: seconds from a data sheet, or else in tokens."""
        if self.gpu is None:
            return CostModel.prior()
        size = model_size(OmegaConf.create({"actor_rollout_ref": {"model": {"path": self.model}}}))
        if size is None:
            raise ValueError(f"--model {self.model}: give a decoder of equal layers whose config.json is here")
        return computed_costs(size, DEVICES[self.gpu])


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """Add what a `Question` takes; what is not given is None."""
    group = parser.add_argument_group("a page about a step of your own")
    for each in fields(Question):
        group.add_argument(_option(each.name), default=None, **each.metadata["parsed"])


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, eq=False)
class StoredStep:
    """The prompts of a step, taken from files in turn until there are enough."""

    rows: Rows  # of the files, with keys of images in the place of their tokens
    shapes: tuple[np.ndarray, ...]  # of the rows of each stored group
    roles: tuple[str | None, ...]  # of each stored row
    num_groups: int

    @classmethod
    def read(cls, question: Question) -> Self:
        """Read the files.

        Raises:
            ValueError: A file holds no trees, a row has no reward, or there are more mini-batches than prompts.
        """
        trees = [tree for path in question.trees for tree in read_trees(path)]
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        if any(leaf.reward is None for leaf in leaves):
            raise ValueError(f"--trees {' '.join(question.trees)}: rows without a reward; give trees of a scored step")
        written = [
            WrittenRow.of(leaf.keys(), response_mask=leaf.is_trained[leaf.prompt_len :], reward=leaf.reward)
            for leaf in leaves
        ]
        bounds = np.cumsum([0, *(len(tree.leaves) for tree in trees)]).tolist()
        groups = tuple(tuple(range(start, end)) for start, end in pairwise(bounds))
        num_groups = question.prompts or len(groups)
        if num_groups < question.mini_batches:
            raise ValueError(f"--mini-batches {question.mini_batches} of {num_groups} prompts: give at most so many")
        return cls(
            Rows(tuple(leaf.keys() for leaf in leaves), tuple(leaf.is_trained for leaf in leaves), groups),
            shapes=tuple(leaf_shapes([written[row] for row in group]) for group in groups),
            roles=tuple(leaf.role for leaf in leaves),
            num_groups=num_groups,
        )

    def repeated(self, of_groups: Sequence[Any]) -> list[Any]:
        """Return for each prompt of the step what its stored group has."""
        return [of_groups[number % len(of_groups)] for number in range(self.num_groups)]


def computed_rows(profiles: Sequence[WorkProfile]) -> np.ndarray:
    """Return which rows an update computes, (rows,) bool, group by group."""
    return np.concatenate([each.path_counts[np.argsort(each.order), 0] > 0 for each in profiles])


def model_calls(
    step: StoredStep, assignment: RowAssignment, *, is_computed: np.ndarray, capacity: int, costs: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the rows of every rank as it does itself: calls with gradient, and the seconds of all calls, (R, M) each.

    Spines of relayed trees run before, without gradient: not counted as calls, but their seconds are there.
    """
    groups = step.repeated(step.rows.groups)
    # Each row of the step is a row of the files, in one of its copies.
    stored = [(number // len(step.shapes), row) for number, group in enumerate(groups) for row in group]
    num_ids = 1 + max(int(tokens.max()) for tokens in step.rows.tokens)

    @cache
    def cut(cell: tuple[tuple[int, int], ...]) -> tuple[int, float]:
        if not cell:
            return 0, 0.0
        rows = Rows(
            tuple(step.rows.tokens[row] + copy * num_ids for copy, row in cell),  # copies share no token
            tuple(step.rows.trained[row] for _, row in cell),
            (tuple(range(len(cell))),),
        )
        tree = TreeConfig(capacity=capacity)
        micros = micro_batches_of(rows, tree, costs=costs, num_ranks=1, groups_per_mini_batch=1)[0][0]
        return sum(each.num_calls("rows").num_last for each in micros), sum(costs.predict(each.work) for each in micros)

    def cut_alike(cell: Sequence[int]) -> tuple[int, float]:
        numbers: dict[int, int] = {}  # of copies, from 0 on, so that cells that are alike are cut once
        named = [stored[row] for row in cell if is_computed[row]]
        return cut(tuple((numbers.setdefault(copy, len(numbers)), row) for copy, row in named))

    found_RM2 = np.array([[cut_alike(cell) for cell in of_rank] for of_rank in assignment.cells()])
    return found_RM2[..., 0].astype(int), found_RM2[..., 1]


def bubble_share(num_calls: Any, *, num_stages: int) -> Any:
    """Return the share of its time that a stage is idle in a schedule of m calls on p stages: (p - 1) / (m + p - 1).

    So it is in GPipe (Huang et al. 2019, section 2.3) and 1F1B (Narayanan et al. 2021, section 2.2), where all calls
    take as long. `num_calls` is a number or an array, of 1 or more.
    """
    return (num_stages - 1) / (num_calls + num_stages - 1)


def update_times(costs_RM: np.ndarray, calls_RM: np.ndarray, *, num_stages: int, whole_s: float) -> dict[str, float]:
    """Return the `seconds` of an update, and how its ranks spend them; a stage has an equal part of the model.

    `bubble` is the share of the time of pipelines in which their stages are idle. `busy` is the share of an update in
    which a rank computes: a mini-batch waits for its slowest pipeline. `over_even` is the update over one in which all
    ranks have equal parts of `whole_s`, what all prompts take if none is cut.
    """
    worked_RM = costs_RM / num_stages
    filled_RM = worked_RM / (1 - bubble_share(np.maximum(calls_RM, 1), num_stages=num_stages))
    seconds = filled_RM.max(axis=0).sum()
    return {
        "seconds": float(seconds),
        "bubble": float(1 - worked_RM.sum() / filled_RM.sum()),
        "busy": float(worked_RM.mean(axis=0).sum() / seconds),
        "over_even": float(seconds * num_stages * len(costs_RM) / whole_s),
    }


def failure_losses(
    *, run_minutes: float, checkpoint_minutes: float, restart_minutes: float, save_seconds: float
) -> tuple[float, float, float]:
    """Return the shares of the time that are lost because a run fails: saving, computing again, restarts.

    A run fails every `run_minutes` F: the mean time between two failures of a rank over the number of ranks. Half a
    period C between checkpoints is then computed again, and the ranks wait for the restart R. Once a period they save
    for S. To first order the loss is S / C + (C / 2 + R) / F (Young 1974; with the restart Daly 2006). That is right
    where it is small. A sum of 1 or more says that nothing is left.
    """
    again, restarts = checkpoint_minutes / 2 / run_minutes, restart_minutes / run_minutes
    return save_seconds / 60 / checkpoint_minutes, again, restarts


def best_checkpoint_minutes(*, run_minutes: float, save_seconds: float) -> float:
    """Return the period that loses least: sqrt(2 S F) (Young 1974)."""
    return math.sqrt(2 * save_seconds / 60 * run_minutes)


def _failure_lines(question: Question) -> Iterator[str]:
    mtbf_hours, period, restart, save_s = (getattr(question, name) for name in FAILURES)
    run_minutes = 60 * mtbf_hours / question.ranks
    best = best_checkpoint_minutes(run_minutes=run_minutes, save_seconds=save_s)
    losses, least = (
        failure_losses(run_minutes=run_minutes, checkpoint_minutes=each, restart_minutes=restart, save_seconds=save_s)
        for each in (period, best)
    )
    yield "Failures, to first order"
    yield f"  a rank fails every {mtbf_hours:,g} h, so the run every {run_minutes / 60:,.3g} h"
    yield f"  a checkpoint every {period:g} min takes {save_s:g} s, a restart {restart:g} min"
    saving, again, restarts = (f"{share:.1%}" for share in losses)
    if sum(losses) < 1:
        yield f"  {sum(losses):.1%} of the time is lost: {saving} saving, {again} computed again, {restarts} restarts"
    else:
        yield f"  nothing is left: the loss is {sum(losses):.0%}; take fewer ranks, or shorter saves and restarts"
    if sum(least) < 1:
        yield f"  least with a checkpoint every {best:.3g} min: {sum(least):.1%}"


def page_lines(question: Question, step: StoredStep, record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the page about a record of `scale.py`."""
    sizes, num_bytes, seconds = [len(shapes) for shapes in step.shapes], record["bytes"], record["seconds"]
    units = ""
    if question.pipeline > 1:
        units = f": {record['ranks']:,} pipelines of {question.pipeline} stages"
    elif question.team > 1:
        units = f": {record['ranks']:,} teams of {question.team}"
    yield f"A step on {question.ranks:,} ranks{units}"
    yield f"  {', '.join(question.trees)}: {len(sizes)} prompts of {min(sizes)} to {max(sizes)} rows"
    if step.num_groups > len(sizes):
        yield f"  repeated to {step.num_groups:,} prompts; as many different ones would have a longer longest row"
    yield f"  {record['leaves']:,} rows, the longest of {record['longest_leaf']:,} tokens"
    yield f"  {record['flat_tokens']:,} tokens row by row, {record['tree_tokens']:,} where shared prefixes count once"
    teaches_nothing = record["leaves"] - record["computed_rows"]
    yield f"  {record['computed_tokens']:,} of these in an update; {teaches_nothing:,} rows teach nothing"
    yield "The driver, one core of this machine"
    planning_s = seconds["tags"] + seconds["profiles"] + seconds["deal"]
    yield f"  plans in {planning_s:.3f} s: reads tags, counts the work of all ranges, deals"
    yield f"  gets {_mb(num_bytes['batch'])} of keys and tags, {_mb(num_bytes['shapes'])} of it shapes"
    yield f"  sends and gets {_mb(num_bytes['portions'])} for one of verl's methods, in {seconds['portions']:.3f} s"
    yield f"  would read {_mb(sum(num_bytes['verl'].values()))} of columns in verl's own trainer"
    yield f"  TransferQueue stores {_mb(num_bytes['transfer_queue'])}"
    yield f"Ranks, in {record['mini_batches']} x {record['groups_per_mini_batch']:,} prompts (mini-batches x prompts)"
    imbalance, least = record["imbalance"], record["least_imbalance"]
    waiting, least_waiting = (max(0.0, 1 - 1 / each) for each in (imbalance, least))
    yield f"  the slowest takes {imbalance:.3f} times the mean: ranks wait {waiting:.1%} of the time of an update"
    yield f"  no plan can be below {least:.3f} times ({least_waiting:.1%}): rows are whole"
    twice, cells = record["lost_tokens"], record["ranks"] * record["mini_batches"]
    share = twice / record["computed_tokens"]
    yield f"  {record['cut_groups']:,} prompts cut, {twice:,} tokens computed twice ({share:.1%})"
    yield f"  {record['idle_cells']:,} of {cells:,} times a rank has nothing to compute in a mini-batch"
    yield f"  {record['padding_rows']:,} padding rows"
    of_rank = "{mean:.1f} ({least} to {most})".format(**record["calls"])
    yield f"  {of_rank} model calls of at most {question.capacity:,} tokens, of a rank that has some in a mini-batch"
    update = record["update"]
    if question.pipeline > 1:
        yield f"  {update['bubble']:.1%} of the time of pipelines is bubble: (p - 1) / (m + p - 1), m calls on p stages"
    yield f"  {update['busy']:.1%} of the time of an update a rank computes, all in all"
    yield f"  {update['over_even']:.2f} times the time of an update that computes each token once, evenly on all ranks"
    if question.gpu is not None:
        yield f"  {update['seconds']:.3g} s of calls, computed from the data sheet of {question.gpu}, not measured"
    if question.mtbf_hours is not None:
        yield from _failure_lines(question)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.3f} MB"
