"""What an update of trees would take under each capacity and team size: seconds and GiB, before anything runs.

    python -m verl_tree.check --plan TREES.parquet --gpu H200 [arguments]
    python -m verl_tree.check --plan "prompt=8000 branches=16x600 tools=4x150" --gpu H200 [arguments]

The trees are packed, cut and dealt to ranks as a run does it, by the same code. So what is predicted is their work; the
seconds of its parts are those that a run on the same machine has fitted (`--costs METRICS.jsonl`), or computed from a
data sheet (`verl_tree.functional.update_time`). Memory is computed (`verl_tree.functional.update_memory`).
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from verl_tree.clashes import run_keeps_all_rows
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.functional.memory import GIB, RESERVED_SHARE
from verl_tree.functional.update_memory import FLOAT, Levers, ModelSize
from verl_tree.functional.update_time import DEVICES, Device, computed_costs, exchanged_bytes
from verl_tree.launch.checks.capacity import team_keys, team_size
from verl_tree.launch.checks.memory import foreseen, memory_of_machine, model_size
from verl_tree.launch.checks.refusals import MODELS, ranks_of, uses_cpu, uses_tree
from verl_tree.launch.command.composition import model_engine
from verl_tree.launch.run.stored_work import Rows, micro_batches_of, passes_of, predicted_s, rank_bytes
from verl_tree.tree.sharding import why_not_dealt

NUM_TOLD = 5
"""Layouts that are printed."""
MAX_TOKENS = 2_000_000
"""Flat tokens of the prompts that are planned, about; seconds are multiplied."""
NUM_TILES = 8
TILES_FACTOR = 1.1
"""What tiles cost: norms run once more (docs/memory.md)."""
OFFLOAD_BYTES_PER_S = 50e9
COSTS = "tree/cost_model"
FITTED = f"{COSTS}/s_per_token"


@dataclass(frozen=True, slots=True)
class Layout:
    """How an update is computed."""

    capacity: int
    tiles: bool = False
    offloads: bool = False
    on_host: bool = False
    team: tuple[str, ...] = ()  # the settings of a team's size, if it is another than the command's

    def overrides(self) -> list[str]:
        """Return the settings that a command takes for it."""
        model = MODELS[0]
        found = [f"tree.capacity={self.capacity}", *self.team]
        found += ["tree.relay_store=host"] if self.on_host else []
        found += [f"{model}.tiled_mlp.enabled=true", f"{model}.tiled_mlp.num_shards={NUM_TILES}"] if self.tiles else []
        return found + ([f"{model}.enable_activation_offload=true"] if self.offloads else [])


@dataclass(frozen=True, slots=True)
class Prediction:
    """What an update takes under a layout."""

    layout: Layout
    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Planner:
    """The layouts of one command on one machine."""

    config: DictConfig  # resolved and translated
    size: ModelSize
    costs: CostModel
    memory_bytes: int | None  # of a rank's device, or of a machine without one; None: not known
    device: Device | None = None  # whose data sheet says what costs are not fitted

    def predictions(self, rows: Rows) -> Iterator[Prediction]:
        """Yield what fits, by team and capacity, of the first prompts for all.

        Capacities of a rank are powers of two, from a quarter of the longest row on; without relay a pack has room for
        the longest row. Only where seconds come from a data sheet are other teams than the command's tried: no run has
        measured what theirs would take.
        """
        planned = rows.first(num_tokens=MAX_TOKENS, num_ranks=ranks_of(self.config, "trainer"))
        factor = rows.num_groups / planned.num_groups
        own = team_size(self.config)
        for team in {own, *_teams(self.config, self.size)} if self.device else {own}:
            settings = () if team == own else tuple(f"{key}={team}" for key in team_keys(self.config))
            least = rows.longest if self.config.tree.relay == "never" else rows.longest // 4
            first = (max(2, -(-least // team)) - 1).bit_length()
            last = max(first, (planned.num_tree_tokens // team).bit_length())
            has_fitted = False
            for exponent in range(first, last + 1):
                fitting = list(self._of_capacity(planned, team << exponent, team=team, settings=settings))
                if has_fitted and not fitting:
                    break  # nor will a larger one
                has_fitted |= bool(fitting)
                yield from (replace(each, seconds=factor * each.seconds) for each in fitting)

    def _of_capacity(self, rows: Rows, capacity: int, *, team: int, settings: tuple[str, ...]) -> Iterator[Prediction]:
        is_cpu, num_ranks = uses_cpu(self.config), ranks_of(self.config, "trainer")
        needs = foreseen(self.config, self.size)
        mini_batches = micro_batches_of(
            rows,
            replace(TreeConfig.from_mapping(self.config.tree), capacity=capacity),
            costs=self.costs,
            num_ranks=num_ranks // team,
            groups_per_mini_batch=self.config.actor_rollout_ref.actor.ppo_mini_batch_size,
        )
        of_ranks = [of_rank for ranks in mini_batches for of_rank in ranks]
        micros = [micro for of_rank in of_ranks for micro in of_rank]
        # Tokens of a rank, all its layers counted.
        num_layer_inputs = self.size.num_layers * sum(micro.work.num_tokens for micro in micros) / num_ranks
        # A team shares the work of a pass, not its launches.
        shared = {name: value / team for name, value in asdict(self.costs).items() if name != "s_per_pack"}
        seconds = predicted_s(mini_batches, replace(self.costs, **shared))
        if self.device is not None:
            seconds += num_layer_inputs * exchanged_bytes(self.size, team) / self.device.link_bytes_per_s
        is_relayed = any(micro.is_relayed for micro in micros)
        passes_of_ranks = [passes_of(of_rank) for of_rank in {id(each): each for each in of_ranks}.values()]
        for tiles, offloads, on_host in _levers(is_cpu=is_cpu, is_relayed=is_relayed):
            levers = Levers(NUM_TILES if tiles else None, offloads, self.config.tree.logits_chunk_size)
            dearest = max(
                # FSDP adds gradients up in float32, unless it is told otherwise.
                rank_bytes(self.size, passes, levers=levers, on_host=on_host, team=team, reduce_bytes=FLOAT)
                for passes in passes_of_ranks
            )
            # On a CPU all ranks are in one memory.
            num_bytes = needs.states + needs.rollout + dearest * (num_ranks if is_cpu else 1)
            if self.memory_bytes is not None and num_bytes > self.memory_bytes:
                continue
            more = seconds * (TILES_FACTOR if tiles else 1.0)
            if offloads:  # the input of every layer goes to the host and comes back
                more += 2 * 2 * self.size.hidden * num_layer_inputs / OFFLOAD_BYTES_PER_S
            yield Prediction(Layout(capacity, tiles, offloads, on_host, settings), more, num_bytes)


def _levers(*, is_cpu: bool, is_relayed: bool) -> Iterator[tuple[bool, bool, bool]]:
    """Yield tiles, offload and a store on the host, as far as they are known there."""
    for tiles, offloads in ((False, False), (True, False)) + (() if is_cpu else ((True, True),)):
        for on_host in (False, True) if is_relayed and not is_cpu else (False,):
            yield tiles, offloads, on_host


def _teams(config: DictConfig, size: ModelSize) -> list[int]:
    """Return the sizes of teams within a node that the engine knows and that share the heads evenly."""
    if model_engine(config).ulysses is None:
        return [1]
    num_gpus = config.trainer.n_gpus_per_node
    return [
        team
        for team in (1 << exponent for exponent in range(num_gpus.bit_length()))
        if num_gpus % team == 0 and why_not_dealt(size.num_heads, size.num_kv_heads, num_ranks=team) is None
    ]


def plan_lines(config: DictConfig, *, trees: str, gpu: str | None = None, costs: str | None = None) -> list[str]:
    """Return what an update of stored trees, or of trees of a shape, would take under the best layouts.

    Raises:
        ValueError: There is neither a GPU that is known nor a run's metrics, a file is not there, an update has nothing
            to compute of the trees, or it is none whose memory can be computed.
    """
    size = _size(config)
    device = DEVICES.get(str(gpu))
    if device is None and costs is None:
        raise ValueError(
            f"--gpu {gpu}: give one of {', '.join(DEVICES)}, or --costs METRICS.jsonl, the metrics of a run on the "
            "same machine (trainer.logger=[file])"
        )
    source = f"fitted by {costs}" if costs else f"computed from the data sheet of {gpu}, not measured"
    planner = Planner(
        config,
        size,
        costs=computed_costs(size, device) if device and costs is None else fitted_costs(_file(costs, "--costs")),
        memory_bytes=memory_of_machine(config) if device is None else int((1 - RESERVED_SHARE) * device.memory_bytes),
        device=device if costs is None else None,
    )
    if "=" in trees and not Path(trees).exists():
        rows = Rows.of_shape(trees, num_groups=config.data.train_batch_size)
    else:
        rows = Rows.of_file(_file(trees, "--plan"), leaves_out=not run_keeps_all_rows(config))
    return [
        f"{rows.num_groups} prompts, {rows.num_rows} rows of at most {rows.longest} tokens "
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
        raise ValueError(
            f"--costs {metrics}: no step has {FITTED}; give the metrics of a run of eight model calls or more"
        )
    return CostModel.from_metrics(fits[-1], prefix=COSTS)
