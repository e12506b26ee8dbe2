"""A training worker on the tree engine with drawn features, beside one on verl's own flat engine, in float32.

Both take the same SGD steps on the same rows. Where the objective is another than verl's (`tree.shared_tokens`), the
other side is the tree engine with one pack and nothing else.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from beside_verl import infer, take_steps, train_planned
from engine_cases import Case, bypass_loss, make_loss
from tensordict import TensorDict
from tiny_models import tiny_model
from torch import Tensor
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import sft_loss

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.testing.local_worker import local_worker

from .drawing import Settings
from .engine_features import BYPASS, RECURRENT
from .engine_routes import FlatRoutes, draw_routes
from .engine_rows import ALL_TOKENS, draw_batch
from .outcome import Comparison, Outcome, judged, refused

TOLERANCE = 2e-5
"""Relative, float32 against float32; the family whose right answers differ most has 7e-6 (docs/models.md)."""
TIMES_ROUNDING = 2.0
"""A draw may exceed the tolerance if weights that differ by one rounding move the other side this often as far."""
FLOOR, NOTHING = 5e-2, 1e-7
OWN_OPTIONS = ("gate", "relay", "relay_store", "packing", "max_loss_terms", "logits_chunk_size", "backend")
"""Options of trees that change no number, and are left out on the other side."""
OBJECTIVE = ("sharing", "shared_tokens", "session_weight")


def run(settings: Settings, *, seed: int, words: Sequence[str]) -> Outcome:
    """Compare one draw on all ranks; `words` are those of the refusal that is due, if any."""
    is_same_objective = settings["shared_tokens"] == "sum"
    strategy = FLAT_STRATEGY if is_same_objective else TREE_STRATEGY
    try:
        tree, counts = run_side(settings, strategy=TREE_STRATEGY, seed=seed)
    except ValueError as error:
        return refused(error, words)
    flat, _ = run_side(settings, strategy=strategy, seed=seed, is_reference=True)
    compared = compare(flat, tree)
    tolerance = TOLERANCE
    if of_all_ranks(compared.worst) > TOLERANCE:  # of a defect, or of a draw that magnifies rounding
        moved, _ = run_side(settings, strategy=strategy, seed=seed, is_reference=True, is_moved=True)
        tolerance = max(TOLERANCE, TIMES_ROUNDING * of_all_ranks(compare(flat, moved).worst))
    outcome = compared.outcome(tolerance, has_sections=counts.get("tree/sections", 0) > 0)
    return judged(outcome, words)


def of_all_ranks(value: float) -> float:
    """Return the largest value of all ranks; what is not a number is infinite."""
    largest = torch.tensor(value if np.isfinite(value) else np.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def run_side(
    settings: Settings, *, strategy: str, seed: int, is_reference: bool = False, is_moved: bool = False
) -> tuple[dict[str, Any], dict[str, float]]:
    """Take the steps of one side, whose weights may be moved by a rounding; return what they give, and the counts."""
    sp = settings["ulysses"] if strategy == TREE_STRATEGY else 1
    batches = [draw_batch(settings, seed=seed, step=step, sp=sp) for step in range(settings["steps"])]
    worker = make_worker(settings, strategy=strategy, sp=sp, is_reference=is_reference)
    if settings["frozen_tower"] and strategy == FLAT_STRATEGY:  # verl's own engine does not read the key
        for name, parameter in worker.engine.module.named_parameters():
            parameter.requires_grad_("visual" not in name)
    if settings["lora"]:
        draw_adapters(worker.engine.module)
    if is_moved:
        move_by_a_rounding(worker.engine.module)
    batches, scores = with_scores(settings, worker, batches, strategy=strategy, seed=seed)
    weighs = settings["session_weight"] == "session"
    steps = train_planned(worker, batches, sp=sp, weighs=weighs) if settings["planned"] else take_steps(worker, batches)
    counts = worker.engine.tree_counts.metrics() if strategy == TREE_STRATEGY else {}
    return scores | steps | {"batch": batches[0], "is_planned": settings["planned"]}, counts


def make_worker(settings: Settings, *, strategy: str, sp: int, is_reference: bool) -> Any:
    """Make a worker with the options of a draw; a reference has none that saves memory or changes how it computes."""
    model: dict[str, Any] = {}
    tree = {name: settings[name] for name in OBJECTIVE} | {"capacity": ALL_TOKENS, "gate": "never"}
    if settings["lora"]:
        model = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    if not is_reference:
        tree |= {name: settings[name] for name in OWN_OPTIONS} | {"capacity": settings["capacity"]}
        if settings["capacity"] == "auto":
            tree["memory_gib"] = 0.01
        model["enable_gradient_checkpointing"] = settings["checkpointing"]
        model["enable_activation_offload"] = settings["offload"]
        if settings["tiles"]:
            model["tiled_mlp"] = {"enabled": True, "num_shards": settings["tiles"]}
    replay = settings["replay"] if strategy == TREE_STRATEGY else None
    if replay:
        tree["route_conflicts"] = "fork" if replay == "R3 fork" else "first"
    if settings["model"] == "gpt-oss":  # transformers' SDPA has no sinks
        model["override_config"] = {"attn_implementation": "eager"}
    folder = model_folder(settings["model"])
    torch.manual_seed(7)  # value heads and adapters start at random
    worker = local_worker(
        folder,
        strategy=strategy,
        max_token_len=ALL_TOKENS,
        is_critic=settings["loss"] == "critic",
        model_options=model,
        tree_options=tree,
        router_replay=replay.split()[0] if replay else "disabled",
        sequence_parallel_size=sp,
        freeze_vision_tower=settings["frozen_tower"],
        optimizer=FSDPOptimizerConfig(
            lr=learning_rate(settings),
            optimizer="SGD",
            clip_grad=1e9,
            override_optimizer_config={},
            total_training_steps=10,
        ),
    )
    loss = loss_of(settings)
    # A team's rows are on each of its ranks where they compute alone, and this mode does not divide by their number.
    is_twice = sp < settings["ulysses"] and settings["aggregation"] == "token-sum"
    worker.set_loss_fn(partial(_halved, loss) if is_twice and settings["session_weight"] == "leaf" else loss)
    return worker


def learning_rate(settings: Settings) -> float:
    """Return a rate whose steps move weights without magnifying rounding."""
    rate = 0.02 if settings["steps"] > 1 or settings["model"] in RECURRENT else 0.2
    return rate / (100.0 if settings["aggregation"] == "token-sum" else 1.0)


def _halved(loss_function: Any, **arguments: Any) -> Any:
    loss, metrics = loss_function(**arguments)
    return loss * 0.5, metrics


def loss_of(settings: Settings) -> Any:
    """Make verl's loss function."""
    loss = settings["loss"]
    if loss == "sft":
        return partial(sft_loss, config=None)
    actor: dict[str, Any] = {"loss_agg_mode": settings["aggregation"]}
    if settings["aggregation"] == "seq-mean-token-sum-norm":
        actor["loss_scale_factor"] = 16
    if settings["kl"]:
        actor |= {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": settings["kl"]}
    if settings["entropy"]:
        actor["entropy_coeff"] = settings["entropy"]
    if loss in BYPASS:
        actor["policy_loss"] = bypass_loss(loss.split()[1], rollout_is="token" if "reinforce" in loss else None)
    elif loss not in ("critic", "unknown"):
        if loss.startswith("dppo"):  # they bound differences of probabilities, which are small here
            actor |= {"clip_ratio_low": 0.002, "clip_ratio_high": 0.002}
        actor["policy_loss"] = PolicyLossConfig(loss_mode=loss, dro_beta=0.5)
    return make_loss(Case("drawn", actor=actor, is_critic=loss == "critic", is_known_loss=loss != "unknown"))


@cache
def _root() -> Path:
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return Path(str(shared[0]))


@cache
def model_folder(name: str) -> str:
    """Save a tiny random model, once for all ranks."""
    folder = _root() / name.replace(" ", "_")
    if dist.get_rank() == 0:
        settings = {"mlp_only_layers": []} if name == "qwen3 moe" else {}
        tied = name.endswith(" tied")
        model = tiny_model(name.removesuffix(" tied"), size="engine", seed=5, tie_word_embeddings=tied, **settings)
        model.save_pretrained(folder)
    dist.barrier()
    return str(folder)


def draw_adapters(model: torch.nn.Module) -> None:
    """Draw the adapters' second matrices, which start at zero, so that the first ones have gradients."""
    for number, (name, local) in enumerate(local_weights(model)):
        if "lora_B" in name:
            generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1)


def move_by_a_rounding(model: torch.nn.Module) -> None:
    """Move every weight by one rounding, up or down."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _, local in local_weights(model):
        ends = torch.where(torch.rand(local.shape, generator=generator) < 0.5, -torch.inf, torch.inf)
        local.copy_(torch.nextafter(local, ends))


def local_weights(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each weight and its part on this rank."""
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        yield name, weight.to_local() if isinstance(weight, torch.distributed.tensor.DTensor) else weight


def with_scores(
    settings: Settings, worker: Any, batches: list[TensorDict], *, strategy: str, seed: int
) -> tuple[list[TensorDict], dict[str, Any]]:
    """Compute the scores of all batches without an update, and give routes to them; return the first scores."""
    replay, routes = settings["replay"], None
    if replay and strategy == FLAT_STRATEGY:
        routes = FlatRoutes(worker.engine.module, num_layers=num_layers(worker))
    if replay and replay != "R2":
        batches = [impose(settings, worker, batch, routes, seed=seed) for batch in batches]
    if routes is not None:
        routes.records = replay == "R2"
    outputs = [infer(worker, batch) for batch in batches]
    if routes is not None and replay == "R2":
        routes.records, routes.routes = False, routes.seen
    elif replay == "R2":
        batches = [
            _with_column(batch, _of_team(each.pop("routed_experts", None)))
            for batch, each in zip(batches, outputs, strict=True)
        ]
    return batches, outputs[0]


def num_layers(worker: Any) -> int:
    return worker.model_config.hf_config.num_hidden_layers


def impose(settings: Settings, worker: Any, batch: TensorDict, routes: FlatRoutes | None, *, seed: int) -> TensorDict:
    """Give the rows drawn routes: in a column, or through the hooks of a flat model."""
    config = worker.model_config.hf_config
    num_experts = config.num_local_experts if settings["model"] == "gpt-oss" else config.num_experts
    rows = [tuple(row.tolist()) for row in batch["input_ids"].unbind()]
    drawn = draw_routes(
        rows,
        dict.fromkeys(range(num_layers(worker)), num_experts),
        num_layers=num_layers(worker),
        seed=seed,
        forks=settings["replay"] == "R3 fork",
    )
    if routes is None:
        return _with_column(batch, drawn)
    routes.routes |= dict(zip(rows, drawn, strict=True))
    return batch


def _with_column(batch: TensorDict, routes: Sequence[Tensor]) -> TensorDict:
    batch = batch.clone()
    batch["routed_experts"] = torch.nested.as_nested_tensor([*routes], layout=torch.jagged)
    return batch


def _of_team(column: Any) -> list[Tensor]:
    """Return the recorded routes on all ranks of a team; its first rank has them."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, None if column is None else [*column.unbind()])
    mine = ranks[dist.get_rank()]
    return ranks[0] if mine is None else mine


def read_scores(column: Any, batch: TensorDict) -> list[Tensor]:
    """Return the scores that a loss reads of each row; they stand one position before their tokens."""
    mask = batch["response_mask"] if "response_mask" in batch else batch["loss_mask"]
    found = []
    for scores, row in zip(column.unbind(), mask.unbind(), strict=True):
        end = len(scores) - 1
        start = end - len(row)
        found.append(scores[max(start, 0) : end][row[max(-start, 0) :].bool()])
    return found


def compare(flat: dict[str, Any], tree: dict[str, Any]) -> Comparison:
    """Compare scores, losses, gradients, their norms, and the parameters after the steps."""
    compared, batch = Comparison({}), tree["batch"]
    for name in ("log_probs", "entropy", "values"):
        if name in flat and name in tree:
            compared.scores(name, read_scores(tree[name], batch), read_scores(flat[name], batch))
    losses, norms = ([np.array(side[name]) for side in (tree, flat)] for name in ("loss", "grad_norm"))
    later = 10.0 ** np.arange(len(losses[1]))  # a step magnifies the rounding of the one before
    compared.errors["loss"] = float((abs(losses[0] - losses[1]) / np.maximum(abs(losses[1]), 1.0) / later).max())
    compared.errors["grad_norm"] = float((abs(norms[0] - norms[1]) / np.maximum(norms[1], 1e-12) / later).max())
    if not tree["is_planned"]:
        compared.gradients(tree["gradients"], flat["gradients"], floor=FLOOR, nothing=NOTHING)
    for name, after in flat["after"].items():
        distance = (after - tree["after"][name]).abs().max().item() / max(after.abs().max().item(), 1e-12)
        compared.errors[f"step of {name}"] = distance / len(norms[1])
    return compared
