"""What an update of trees would take under each capacity, engine and layout of ranks: seconds and GiB, before it runs.

    python -m verl_tree.check --plan TREES.parquet --gpu H200 [arguments]
    python -m verl_tree.check --plan "prompt=8000 branches=16x600 tools=4x150" --gpu H200 [arguments]

The trees are packed, cut and dealt to ranks as a run does it, by the same code. So what is predicted is their work; the
seconds of its parts are those that a run on the same machine has fitted (`--costs METRICS.jsonl`), or computed from a
data sheet (`verl_tree.functional.update_time`). Memory is computed (`verl_tree.functional.update_memory`).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

from omegaconf import DictConfig

from verl_tree.clashes import run_keeps_all_rows
from verl_tree.config import TreeConfig
from verl_tree.configs import FSDP, MODEL_ENGINES
from verl_tree.cost.model import CostModel, Work
from verl_tree.functional.memory import GIB, RESERVED_SHARE
from verl_tree.functional.model_size import FLOAT, ModelSize, Sharing
from verl_tree.functional.update_memory import Levers
from verl_tree.functional.update_time import DEVICES, Device, computed_costs, exchanged_bytes
from verl_tree.launch.checks.capacity import longest_trajectory, team_keys
from verl_tree.launch.checks.memory import Foreseen, foreseen, memory_of_machine, model_size, num_gradients
from verl_tree.launch.checks.refusals import ACTOR, MODELS, engines_of, ranks_of, uses_cpu, uses_tree, value_of
from verl_tree.launch.command.composition import model_engine
from verl_tree.launch.run.stored_work import Pass, Rows, micro_batches_of, passes_of, predicted_s, rank_bytes
from verl_tree.tree.sharding import why_not_dealt

NUM_TOLD = 5
"""Layouts that are printed."""
MAX_TOKENS = 2_000_000
"""Flat tokens of the prompts that are planned, about; seconds are multiplied."""
LEAST_PROMPTS = 2
"""Prompts of each rank that are planned at least."""
MAX_PARTS = 8
"""A model is not shared out among more than so many times the ranks among which it fits."""
NUM_TILES = 8
TILES_FACTOR = 1.1
"""What tiles cost: norms run once more (docs/memory.md)."""
OFFLOAD_BYTES_PER_S = 50e9
COSTS = "tree/cost_model"
FITTED = f"{COSTS}/s_per_token"

RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
"""Gradient checkpointing, in Megatron's words."""

Accept = Callable[[Sequence[str]], "DictConfig | None"]
"""Returns the command's configuration with some overrides, or None if it would be refused."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How an update is computed."""

    capacity: int
    tiles: bool = False
    offloads: bool = False
    on_host: bool = False
    ranks: tuple[str, ...] = ()  # the settings of engine and ranks, if they are others than the command's

    def overrides(self) -> list[str]:
        """Return the settings that a command takes for it."""
        found = [f"tree.capacity={self.capacity}"]
        return found + (["tree.relay_store=host"] if self.on_host else []) + self.of_model()

    def of_model(self) -> list[str]:
        """Return those that say whether a command is accepted, whatever the capacity."""
        model = MODELS[0]
        found = [*self.ranks]
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
    others: tuple[tuple[str, DictConfig], ...] = ()  # the command on other engines, with what chooses it

    def predictions(self, rows: Rows) -> Iterator[Prediction]:
        """Yield what fits, by engine, layout of ranks and capacity, of the first prompts for all.

        Capacities of a rank are powers of two, from a quarter of the longest row on; without relay a pack has room for
        the longest row. Only where seconds come from a data sheet are other layouts of ranks than the command's tried:
        no run has measured what theirs would take.
        """
        num_ranks = ranks_of(self.config, "trainer")
        planned = rows.first(num_tokens=MAX_TOKENS, num_ranks=LEAST_PROMPTS * num_ranks)
        per_mini_batch = self.config.actor_rollout_ref.actor.ppo_mini_batch_size
        factor = rows.num_mini_batches(per_mini_batch) / planned.num_mini_batches(per_mini_batch)
        # How often a mini-batch has what is planned of it.
        repeats = rows.num_groups / planned.num_groups / factor
        least = rows.longest // 4
        if self.config.tree.relay == "never":
            least = max(rows.longest, longest_trajectory(self.config)[0])

        @cache
        def dealt(capacity: int, num_replicas: int) -> "_Dealt":
            return _Dealt.of_rows(
                planned, self.config, capacity, costs=self.costs, num_replicas=num_replicas, repeats=repeats
            )

        for settings, config in (("", self.config), *self.others):
            needs = foreseen(config, self.size)
            fewest = math.inf  # ranks among which it fits
            for sharing, sizes in _sharings(config, self.size, is_fixed=self.device is None):
                if sharing.num_parts > MAX_PARTS * fewest:
                    continue
                team, ranks = sharing.team, tuple(each for each in (settings, *sizes) if each)
                first = (max(2, -(-least // team)) - 1).bit_length()
                # Larger packs than a replica's part of what is planned are those of the whole step only.
                num_shares = 1 if repeats == 1 else sharing.num_replicas
                last = max(first, (planned.num_tree_tokens // team // num_shares).bit_length())
                has_fitted = False
                for exponent in range(first, last + 1):
                    capacity = team << exponent
                    work = dealt(capacity, sharing.num_replicas)
                    fitting = list(self._of_work(work, config, sharing, needs=needs, capacity=capacity, ranks=ranks))
                    if has_fitted and not fitting:
                        break  # nor will a larger one
                    if fitting:
                        has_fitted, fewest = True, min(fewest, sharing.num_parts)
                    yield from (replace(each, seconds=factor * each.seconds) for each in fitting)

    def _of_work(
        self,
        dealt: "_Dealt",
        config: DictConfig,
        sharing: Sharing,
        *,
        needs: Foreseen,
        capacity: int,
        ranks: tuple[str, ...],
    ) -> Iterator[Prediction]:
        is_cpu, num_ranks = uses_cpu(config), sharing.num_ranks
        # Tokens of a rank, all its layers counted.
        num_layer_inputs = dealt.repeats * self.size.num_layers * dealt.num_tokens / num_ranks
        # A team shares the work of a pass, not its launches.
        shared = {name: value / sharing.team for name, value in asdict(self.costs).items() if name != "s_per_pack"}
        costs = replace(self.costs, **shared)
        predict = partial(predicted_s, dealt.works, costs, num_stages=sharing.stages, repeats=dealt.repeats)
        if self.device is None:
            seconds = predict()
        else:
            link = self.device.link_bytes_per_s
            seconds = predict(gather_s=sharing.pass_bytes(self.size) / link)
            seconds += num_layer_inputs * exchanged_bytes(self.size, sharing) / link
        states = needs.states
        if not sharing.is_gathered:
            engine = value_of(config, engines_of(config)[ACTOR])
            states = sharing.kept_bytes(
                self.size,
                num_gradients=num_gradients(config),
                has_optimizer=not engine.optimizer_offload,
                shares_optimizer=engine.use_distributed_optimizer,
            )
        for tiles, offloads, on_host in _levers(self.size, is_cpu=is_cpu, is_relayed=dealt.is_relayed):
            levers = Levers(NUM_TILES if tiles else None, offloads, self.config.tree.logits_chunk_size)
            dearest = sharing.gathered_bytes(self.size) + max(
                # FSDP adds gradients up in float32, unless it is told otherwise.
                rank_bytes(self.size, passes, levers=levers, on_host=on_host, sharing=sharing, reduce_bytes=FLOAT)
                for passes in dealt.passes_of_ranks
            )
            # On a CPU all ranks are in one memory.
            num_bytes = states + needs.rollout + dearest * (num_ranks if is_cpu else 1)
            if self.memory_bytes is not None and num_bytes > self.memory_bytes:
                continue
            more = seconds * (TILES_FACTOR if tiles else 1.0)
            if offloads:  # the input of every layer goes to the host and comes back
                more += 2 * 2 * self.size.hidden * num_layer_inputs / OFFLOAD_BYTES_PER_S
            yield Prediction(Layout(capacity, tiles, offloads, on_host, ranks), more, num_bytes)


@dataclass(frozen=True, slots=True)
class _Dealt:
    """What replicas compute under a capacity; the trees themselves would fill the memory."""

    works: list[list[list[Work]]]  # by mini-batch and replica
    passes_of_ranks: list[list[Pass]]  # those that differ
    num_tokens: int
    is_relayed: bool
    repeats: float  # how often a mini-batch has them

    @classmethod
    def of_rows(
        cls, rows: Rows, config: DictConfig, capacity: int, *, costs: CostModel, num_replicas: int, repeats: float
    ) -> "_Dealt":
        mini_batches = micro_batches_of(
            rows,
            replace(TreeConfig.from_mapping(config.tree), capacity=capacity),
            costs=costs,
            num_ranks=num_replicas,
            groups_per_mini_batch=config.actor_rollout_ref.actor.ppo_mini_batch_size,
        )
        of_ranks = [of_rank for ranks in mini_batches for of_rank in ranks]
        micros = [micro for of_rank in of_ranks for micro in of_rank]
        return cls(
            [[[micro.work for micro in of_rank] for of_rank in ranks] for ranks in mini_batches],
            [passes_of(of_rank) * math.ceil(repeats) for of_rank in {id(each): each for each in of_ranks}.values()],
            num_tokens=sum(micro.work.num_tokens for micro in micros),
            is_relayed=any(micro.is_relayed for micro in micros),
            repeats=repeats,
        )


def _levers(size: ModelSize, *, is_cpu: bool, is_relayed: bool) -> Iterator[tuple[bool, bool, bool]]:
    """Yield tiles, offload and a store on the host, as far as they are known there."""
    of_model = ((False, False),) if size.num_experts else ((False, False), (True, False))
    for tiles, offloads in of_model + (() if is_cpu else ((not size.num_experts, True),)):
        for on_host in (False, True) if is_relayed and not is_cpu else (False,):
            yield tiles, offloads, on_host


def _sharings(config: DictConfig, size: ModelSize, *, is_fixed: bool) -> Iterator[tuple[Sharing, list[str]]]:
    """Yield how ranks can share the model on the engine of a command, its own way first, and the settings of each.

    Teams, and ranks among which experts are shared out, are within a node. With `is_fixed` there is the own way only.
    """
    engine, num_ranks, num_gpus = model_engine(config), ranks_of(config, "trainer"), config.trainer.n_gpus_per_node
    group = engines_of(config)[ACTOR]
    is_gathered = _is_gathered(config)
    if is_gathered:
        keys = {"team": team_keys(config), "experts": [f"{group}.expert_parallel_size"] if engine.layout else []}
    else:
        names = {"team": "tensor", "stages": "pipeline", "experts": "expert"}
        keys = {name: [f"{group}.{kind}_model_parallel_size"] for name, kind in names.items()}
    own = {name: (value_of(config, of_name[0]) or 1) if of_name else 1 for name, of_name in keys.items()}
    in_node = [each for each in (1 << exponent for exponent in range(num_gpus.bit_length())) if num_gpus % each == 0]
    stages = [1 << exponent for exponent in range(num_ranks.bit_length()) if size.num_layers % (1 << exponent) == 0]
    experts = in_node if size.num_experts and keys["experts"] else [1]
    tried = {
        "team": [each for each in in_node if why_not_dealt(size.num_heads, size.num_kv_heads, num_ranks=each) is None],
        "stages": stages if "stages" in keys else [1],
        "experts": [each for each in experts if size.num_experts % each == 0],
    }
    ways = [own] if is_fixed else [own, *(dict(zip(tried, each, strict=True)) for each in product(*tried.values()))]
    recomputed = (
        {} if is_gathered else {f"{group}.override_transformer_config.{k}": v for k, v in RECOMPUTATION.items()}
    )
    seen = set()
    for way in sorted(ways, key=lambda way: (way != own, math.prod(way.values()))):
        sharing = Sharing(num_ranks, **way, is_gathered=is_gathered, waits=engine is MODEL_ENGINES[FSDP])
        # Megatron's experts are shared out among replicas, whose teams stand next to each other.
        among = num_ranks if is_gathered else sharing.num_replicas
        reach = sharing.experts * (1 if is_gathered or sharing.experts == 1 else sharing.team)
        is_in_node = way == own or reach <= num_gpus
        if sharing in seen or num_ranks % sharing.num_parts or among % sharing.experts or not is_in_node:
            continue
        seen.add(sharing)
        settings = {key: way[name] for name, of_name in keys.items() for key in of_name} | recomputed
        yield sharing, [f"{key}={value}" for key, value in settings.items() if value_of(config, key) != value]


def plan_lines(
    config: DictConfig, *, accept: Accept, trees: str, gpu: str | None = None, costs: str | None = None
) -> list[str]:
    """Return what an update of stored trees, or of trees of a shape, would take under the best layouts.

    Layouts whose command would be refused are not told.

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
    if costs and not _is_gathered(config):
        raise ValueError(f"--costs {costs}: no run has fitted a pipeline's times; give --gpu alone")
    source = f"fitted by {costs}" if costs else f"computed from the data sheet of {gpu}, not measured"
    planner = Planner(
        config,
        size,
        costs=computed_costs(size, device) if device and costs is None else fitted_costs(_file(costs, "--costs")),
        memory_bytes=memory_of_machine(config) if device is None else int((1 - RESERVED_SHARE) * device.memory_bytes),
        device=device if costs is None else None,
        others=() if costs else tuple(_on_other_engines(config, accept)),
    )
    if "=" in trees and not Path(trees).exists():
        rows = Rows.of_shape(trees, num_groups=config.data.train_batch_size)
    else:
        rows = Rows.of_file(_file(trees, "--plan"), leaves_out=not run_keeps_all_rows(config))
    return [
        f"{rows.num_groups} prompts, {rows.num_rows} rows of at most {rows.longest} tokens "
        f"({rows.num_left_out} left out), {rows.num_tree_tokens} tree tokens; seconds {source}; GiB computed",
        *_told(planner, rows, accept=accept, what="an update"),
        *_told(planner, rows.stretched(2), accept=accept, what="with twice the context", most=1),
    ]


def best_of(predictions: Iterable[Prediction], *, accepts: Callable[[Layout], bool], most: int) -> list[Prediction]:
    """Return the fastest first, and of slower ones those that take less memory than all before them."""
    best: list[Prediction] = []
    for each in sorted(predictions, key=lambda each: (each.seconds, each.num_bytes)):
        if len(best) < most and (not best or each.num_bytes < best[-1].num_bytes) and accepts(each.layout):
            best.append(each)
    return best


def _on_other_engines(config: DictConfig, accept: Accept) -> Iterator[tuple[str, DictConfig]]:
    for name, engine in MODEL_ENGINES.items():
        chosen = f"model_engine={name}"
        if engine is not model_engine(config) and (other := accept([chosen])) is not None:
            yield chosen, other


def _is_gathered(config: DictConfig) -> bool:
    return model_engine(config) is not MODEL_ENGINES["megatron"]


def _told(planner: Planner, rows: Rows, *, accept: Accept, what: str, most: int = NUM_TOLD) -> Iterator[str]:
    def accepts(layout: Layout) -> bool:
        overrides = layout.of_model()
        return not overrides or accept(overrides) is not None

    best = best_of(planner.predictions(rows), accepts=accepts, most=most)
    if not best:
        yield f"{what}: no layout fits into {planner.memory_bytes or 0:,} bytes; take more ranks, or a smaller model"
    for each in best:
        yield f"{what}: {each.seconds:.3g} s, {each.num_bytes / GIB:.3g} GiB  {' '.join(each.layout.overrides())}"


def _size(config: DictConfig) -> ModelSize:
    """Return the sizes of the policy; refuse what is not foreseen."""
    if not uses_tree(config):
        raise ValueError(f"tree.enabled={config.tree.enabled}: --plan foresees updates on trees; set it to true")
    size = model_size(config)
    if size is None:
        path = config.actor_rollout_ref.model.path
        raise ValueError(f"{MODELS[0]}.path={path}: --plan knows decoders of equal layers whose config.json is here")
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
