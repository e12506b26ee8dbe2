"""What an update of stored trees would take under each capacity: seconds and GiB, before anything runs.

    python -m verl_tree.check --plan TREES.parquet --gpu H200 [arguments]

The trees are packed, cut and dealt to ranks as a run does it, by the same code. So what is predicted is their work; the
seconds of its parts are those that a run on the same machine has fitted (`--costs METRICS.jsonl`), or computed from a
data sheet (`verl_tree.functional.update_time`). Memory is computed (`verl_tree.functional.update_memory`).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Self

import numpy as np
from omegaconf import DictConfig

from verl_tree.clashes import keep_all_rows
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.engine.rows.packs import TreeMicroBatch, split_into_packs
from verl_tree.functional.memory import GIB, RESERVED_SHARE
from verl_tree.functional.update_memory import FLOAT, Levers, ModelSize, Relay, update_memory, waiting_bytes
from verl_tree.functional.update_time import DEVICES, computed_costs
from verl_tree.launch.checks.capacity import team_size
from verl_tree.launch.checks.memory import foreseen, memory_of_machine, model_size
from verl_tree.launch.checks.refusals import MODELS, ranks_of, uses_cpu, uses_tree
from verl_tree.launch.command.composition import model_engine
from verl_tree.records import read_trees
from verl_tree.trainer.rows.batching import assign_rows
from verl_tree.tree import TokenForest

NUM_TOLD = 5
"""Layouts that are printed."""
NUM_TILES = 8
TILES_FACTOR = 1.1
"""What tiles cost: norms run once more (docs/memory.md)."""
OFFLOAD_BYTES_PER_S = 50e9
COSTS = "tree/cost_model"
FITTED = f"{COSTS}/s_per_token"


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of stored groups, those that an update computes."""

    tokens: tuple[np.ndarray, ...]
    trained: tuple[np.ndarray, ...]  # bool, as long as the tokens
    groups: tuple[tuple[int, ...], ...]  # the rows of each
    num_left_out: int = 0

    @classmethod
    def of_file(cls, path: Path, *, leaves_out: bool) -> Self:
        """Read what `tree.dump_dir` stored; `leaves_out` those whose advantages are all 0."""
        tokens: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        groups: list[tuple[int, ...]] = []
        num_left_out = 0
        for tree in read_trees(path):
            first = len(tokens)
            for leaf in tree.leaves:
                advantages = leaf.token_advantages
                is_live = not leaves_out or advantages is None or bool(np.asarray(advantages).any())
                if not is_live or not leaf.is_trained[1:].any():
                    num_left_out += 1
                    continue
                tokens.append(np.asarray(leaf.token_ids, dtype=np.int64))
                trained.append(leaf.is_trained)
            if len(tokens) > first:
                groups.append(tuple(range(first, len(tokens))))
        if not groups:
            raise ValueError(f"--plan {path}: an update has nothing to compute of these trees; give those of another step")
        return cls(tuple(tokens), tuple(trained), tuple(groups), num_left_out)

    def stretched(self, factor: int) -> Self:
        """Return rows of the same trees in which every token is there so many times."""
        tokens = tuple(np.repeat(each, factor) for each in self.tokens)
        return replace(self, tokens=tokens, trained=tuple(np.repeat(each, factor) for each in self.trained))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.tokens))

    @property
    def num_tree_tokens(self) -> int:
        """Tree tokens, group by group."""
        return sum(TokenForest.from_sequences([self.tokens[row] for row in group]).num_tokens for group in self.groups)

    def profiles(self) -> list[WorkProfile]:
        """Return the work of each group."""
        return [
            WorkProfile.from_forest(
                TokenForest.from_sequences([self.tokens[row] for row in group]),
                trained=[self.trained[row] for row in group],
            )
            for group in self.groups
        ]


@dataclass(frozen=True, slots=True)
class Layout:
    """How an update is computed."""

    capacity: int
    tiles: bool = False
    offloads: bool = False
    on_host: bool = False

    def overrides(self) -> list[str]:
        """Return the settings that a command takes for it."""
        model = MODELS[0]
        found = [f"tree.capacity={self.capacity}"]
        found += ["tree.relay_store=host"] if self.on_host else []
        found += [f"{model}.tiled_mlp.enabled=true", f"{model}.tiled_mlp.num_shards={NUM_TILES}"] if self.tiles else []
        return found + ([f"{model}.enable_activation_offload=true"] if self.offloads else [])


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an update takes under a layout."""

    layout: Layout
    seconds: float
    num_bytes: int


def micro_batches_of(
    rows: Rows, tree: TreeConfig, *, costs: CostModel, num_ranks: int, groups_per_mini_batch: int
) -> list[list[tuple[TreeMicroBatch, ...]]]:
    """Deal the rows to mini-batches and ranks and cut them as a run does: by mini-batch, what each rank computes."""
    assignment = assign_rows(
        rows.groups,
        profiles=rows.profiles(),
        model=costs,
        num_ranks=num_ranks,
        groups_per_mini_batch=groups_per_mini_batch,
    )
    order, ranks = iter(assignment.row_order), []
    for sizes in assignment.plan.rows:
        # Padding rows have the indices after the last row.
        cells = [[row for row in islice(order, size) if row < len(rows.tokens)] for size in sizes]
        ranks.append([_cut(rows, cell, tree, costs=costs) for cell in cells])
    return [list(of_ranks) for of_ranks in zip(*ranks, strict=True)]


def _cut(rows: Rows, cell: Sequence[int], tree: TreeConfig, *, costs: CostModel) -> tuple[TreeMicroBatch, ...]:
    assert isinstance(tree.capacity, int)
    if not cell:
        return ()
    return split_into_packs(
        np.concatenate([rows.tokens[row] for row in cell]),
        offsets=np.cumsum([0, *(len(rows.tokens[row]) for row in cell)]),
        trained=np.concatenate([rows.trained[row] for row in cell]),
        capacity=tree.capacity,
        config=tree,
        cost_model=costs,
    ).micro_batches


def predicted_s(mini_batches: Sequence[Sequence[Sequence[TreeMicroBatch]]], costs: CostModel) -> float:
    """Predict the seconds of an update, whose mini-batches wait for their slowest rank."""
    return sum(
        max(sum(costs.predict(micro.work) for micro in of_rank) for of_rank in ranks) for ranks in mini_batches
    )


def rank_bytes(
    size: ModelSize,
    micros: Sequence[TreeMicroBatch],
    *,
    levers: Levers,
    on_host: bool = False,
    team: int = 1,
    reduce_bytes: int,
    kernel_bytes: int | None = None,
) -> int:
    """Compute the most bytes that a rank takes at once in a mini-batch, besides its part of weights and states.

    The passes run in the order of `micros`, the sections of a tree from the last to the first. From the second on there
    are the gradients that wait, too. `reduce_bytes` are those of a gradient when it is added up over the ranks; see `update_memory` for `kernel_bytes`.
    """

    def of_micro(micro: TreeMicroBatch) -> Iterator[int]:
        # A log-prob is made where the parent of its token is.
        scorers = np.unique(micro.layout.parent_T.numpy()[micro.wanted_T.numpy()])
        for section in reversed(micro.cut.sections):
            num_scored = int(((scorers >= section.start) & (scorers < section.end)).sum())
            relay = None
            if micro.is_relayed:
                relay = Relay(-(-section.num_context // team), on_host, spine_len=-(-len(micro.cut.spine) // team))
            yield update_memory(
                size,
                -(-section.num_tokens // team),
                state_bytes=0,
                levers=replace(levers, chunk_size=min(levers.chunk_size, max(1, num_scored))),
                relay=relay,
                kernel_bytes=kernel_bytes,
            ).total

    first, *later = [each for micro in micros for each in of_micro(micro)] or [0]
    return max([first, *(each + waiting_bytes(size, reduce_bytes=reduce_bytes) for each in later)])


@dataclass(frozen=True, slots=True)
class Planner:
    """The layouts of one command on one machine."""

    config: DictConfig  # resolved and translated
    size: ModelSize
    costs: CostModel
    memory_bytes: int | None  # of a rank's device, or of a machine without one; None: not known

    def predictions(self, rows: Rows) -> Iterator[Prediction]:
        """Yield what fits, with the capacities that are powers of two and not below a quarter of the longest row.

        Without relay a pack has room for the longest row.
        """
        is_cpu, team = uses_cpu(self.config), team_size(self.config)
        tree = TreeConfig.from_mapping(self.config.tree)
        least = max(2, rows.longest if tree.relay == "never" else rows.longest // 4)
        exponent = (least - 1).bit_length()
        for capacity in (1 << number for number in range(exponent, max(exponent, rows.num_tree_tokens.bit_length()) + 1)):
            mini_batches = micro_batches_of(
                rows,
                replace(tree, capacity=capacity * team),
                costs=self.costs,
                num_ranks=ranks_of(self.config, "trainer") // team,
                groups_per_mini_batch=self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
            )
            of_ranks = [of_rank for ranks in mini_batches for of_rank in ranks]
            micros = [micro for of_rank in of_ranks for micro in of_rank]
            seconds = predicted_s(mini_batches, self.costs) / team
            is_relayed = any(micro.is_relayed for micro in micros)
            num_layer_inputs = self.size.num_layers * sum(micro.work.num_tokens for micro in micros)
            for tiles, offloads, on_host in _levers(is_cpu=is_cpu, is_relayed=is_relayed):
                levers = Levers(NUM_TILES if tiles else None, offloads, self.config.tree.logits_chunk_size)
                num_bytes = self._num_bytes(max(self._of_rank(each, levers, on_host=on_host) for each in of_ranks))
                if self.memory_bytes is not None and num_bytes > self.memory_bytes:
                    continue
                more = seconds * (TILES_FACTOR if tiles else 1.0)
                if offloads:  # the input of every layer goes to the host and comes back
                    moved = 2 * 2 * self.size.hidden * num_layer_inputs / ranks_of(self.config, "trainer")
                    more += moved / OFFLOAD_BYTES_PER_S
                yield Prediction(Layout(capacity * team, tiles, offloads, on_host), more, num_bytes)

    def _of_rank(self, micros: Sequence[TreeMicroBatch], levers: Levers, *, on_host: bool) -> int:
        # FSDP adds gradients up in float32, unless it is told otherwise.
        options = {"levers": levers, "on_host": on_host, "team": team_size(self.config)}
        return rank_bytes(self.size, micros, reduce_bytes=FLOAT, **options)

    def _num_bytes(self, of_rank: int) -> int:
        """Return what an update takes besides the rows: on a CPU all ranks together, else one."""
        needs = foreseen(self.config, self.size)
        return needs.states + needs.rollout + of_rank * (ranks_of(self.config, "trainer") if uses_cpu(self.config) else 1)


def _levers(*, is_cpu: bool, is_relayed: bool) -> Iterator[tuple[bool, bool, bool]]:
    """Yield tiles, offload and a store on the host, as far as they are known there."""
    for tiles, offloads in ((False, False), (True, False)) + (() if is_cpu else ((True, True),)):
        for on_host in (False, True) if is_relayed and not is_cpu else (False,):
            yield tiles, offloads, on_host


def plan_lines(config: DictConfig, *, trees: str, gpu: str | None = None, costs: str | None = None) -> list[str]:
    """Return what an update of stored trees would take under the best layouts.

    Raises:
        ValueError: There is neither a GPU that is known nor a run's metrics, a file is not there, an update has nothing
            to compute of the trees, or it is none whose memory can be computed.
    """
    size = _size(config)
    device = DEVICES.get(str(gpu))
    if device is None and costs is None:
        raise ValueError(
            f"--gpu {gpu}: give one of {', '.join(DEVICES)}, or --costs METRICS.jsonl, the metrics of a run on the same "
            "machine (trainer.logger=[file])"
        )
    source = f"fitted by {costs}" if costs else f"computed from the data sheet of {gpu}, not measured"
    planner = Planner(
        config,
        size,
        costs=computed_costs(size, device) if device and costs is None else fitted_costs(_file(costs, "--costs")),
        memory_bytes=memory_of_machine(config) if device is None else int((1 - RESERVED_SHARE) * device.memory_bytes),
    )
    kept = keep_all_rows(config.actor_rollout_ref.actor, config.tree, distils=config.distillation.enabled)
    rows = Rows.of_file(_file(trees, "--plan"), leaves_out=not kept)
    return [
        f"{len(rows.groups)} prompts, {len(rows.tokens)} rows of at most {rows.longest} tokens "
        f"({rows.num_left_out} left out), {rows.num_tree_tokens} tree tokens; seconds {source}; GiB computed",
        *_told(planner, rows, what="an update"),
        *_told(planner, rows.stretched(2), what="with twice the context", most=1),
    ]


def best_of(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Return the fastest first, and of slower ones those that take less memory than all before them."""
    best: list[Prediction] = []
    for each in sorted(predictions, key=lambda each: (each.seconds, each.num_bytes)):
        if not best or each.num_bytes < best[-1].num_bytes:
            best.append(each)
    return best


def _told(planner: Planner, rows: Rows, *, what: str, most: int = NUM_TOLD) -> Iterator[str]:
    best = best_of(planner.predictions(rows))[:most]
    if not best:
        yield f"{what}: no layout fits into {planner.memory_bytes or 0:,} bytes; take more ranks, or a smaller model"
    for each in best:
        yield f"{what}: {each.seconds:.3g} s, {each.num_bytes / GIB:.3g} GiB  {' '.join(each.layout.overrides())}"


def _size(config: DictConfig) -> ModelSize:
    """Return the sizes of the policy; refuse what is not foreseen."""
    if not uses_tree(config):
        raise ValueError(f"tree.enabled={config.tree.enabled}: --plan foresees updates on trees; set it to true")
    if model_engine(config).title == "Megatron":
        raise ValueError(f"model_engine={config.model_engine}: --plan knows no stages of a pipeline; remove it")
    size = model_size(config)
    if size is None:
        path = config.actor_rollout_ref.model.path
        raise ValueError(f"{MODELS[0]}.path={path}: --plan knows decoders of dense layers whose config.json is here")
    return size


def _file(name: object, option: str) -> Path:
    path = Path(str(name))
    if not path.is_file():
        raise ValueError(f"{option} {path}: there is no such file; give one that a run wrote")
    return path


def fitted_costs(metrics: Path) -> CostModel:
    """Read what a run has fitted last from its metrics, as verl's logger `file` writes them.

    Raises:
        ValueError: There is no fit in them.
    """
    fits = [data for record in metrics.read_text().splitlines() if FITTED in (data := json.loads(record)["data"])]
    if not fits:
        raise ValueError(f"--costs {metrics}: no step has {FITTED}; give the metrics of a run of eight model calls or more")
    return CostModel.from_metrics(fits[-1], prefix=COSTS)
