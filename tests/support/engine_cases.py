"""The tree engine beside verl's own FSDP2 engine on the same rows; one process per rank.

`tests/e2e/test_engines.py` starts it. Both sides are real `TrainingWorker`s with verl's real losses, in fp32 on the
CPU, and take the same SGD steps, one unless the case says more. Rank 0 writes the differences of every case. Those of
outputs are relative to the largest value of the flat side, those of gradients and parameters to the tensor. Query and
key gradients are zero but for rounding where every query sees one key; these are relative to the global norm.

With `--sp` so many ranks compute each tree together. verl's own engine cannot do that on a CPU, so on its side each of
these ranks computes the same rows: the mean over the ranks is the same.
"""

import argparse
import dataclasses
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPOptimizerConfig
from verl.workers.utils.losses import ppo_loss, value_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform and the engines)
from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine.losses.session_weights import weigh_sessions
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.rows.batching import MiniBatchPlan
from verl_tree.trainer.worker import TreeTrainingWorker

VOCABULARY = 61
SAVES_MEMORY = ("enable_gradient_checkpointing", "tiled_mlp", "enable_activation_offload")


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison. The defaults are a token-mean PPO loss with clipping and dual clip active."""

    name: str
    actor: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    tree: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_critic: bool = False
    tied: bool = False
    rows: str = "deep"
    capacity: int = 96
    temperature_per_row: bool = False
    corrected: bool = False
    num_steps: int = 1
    lr: float = 0.5
    same_objective: bool = True
    is_known_loss: bool = True
    planned: bool = False  # The worker takes the steps, from a plan of mini-batches
    sp: int = 1


def bypass_loss(loss_type: str, *, rollout_is: str | None = None) -> dict[str, Any]:
    """Return a policy loss whose old log-probs are the rollout's; it rejects tokens with far ratios."""
    correction = RolloutCorrectionConfig(
        bypass_mode=True,
        loss_type=loss_type,
        rollout_is=rollout_is,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.2_5.0",
    )
    return {"loss_mode": "bypass_mode", "rollout_correction": correction}


CASES = [
    Case("token_mean"),
    Case("token_sum", actor={"loss_agg_mode": "token-sum"}),
    Case("seq_mean_token_sum", actor={"loss_agg_mode": "seq-mean-token-sum"}),
    Case("seq_mean_token_mean", actor={"loss_agg_mode": "seq-mean-token-mean"}),
    Case("seq_mean_token_sum_norm", actor={"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 16}),
    Case("gspo", actor={"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}),
    Case("kl_and_entropy", actor={"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}),
    Case("gradient_checkpointing", model={"enable_gradient_checkpointing": True}),
    Case("tiled_mlp", model={"tiled_mlp": {"enabled": True, "num_shards": 3}, "enable_gradient_checkpointing": True}),
    Case("tied_embeddings", tied=True),
    Case("lora", model={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    Case("one_pack", capacity=4096),
    Case("capacity_by_memory", tree={"capacity": "auto", "memory_gib": 0.01}),
    Case("dense_backend", tree={"backend": "dense"}),
    Case("flat_packs", tree={"gate": "always"}, actor={"entropy_coeff": 0.05}),
    Case("loss_term_cap", tree={"max_loss_terms": 40, "relay": "never"}),
    *(
        Case(f"packing_{method}", tree={"packing": method, "relay": "never"}, capacity=capacity)
        for method, capacity in (
            ("heuristic", 37),
            ("exact", 41),
        )
    ),
    Case("prompts_only", tree={"sharing": "prompt"}, rows="duplicates", capacity=24),
    Case("small_chunks", tree={"logits_chunk_size": 3}, actor={"entropy_coeff": 0.05}),
    Case("temperature_per_row", temperature_per_row=True, actor={"entropy_coeff": 0.05}),
    Case("shared_tokens_once", tree={"shared_tokens": "once"}, same_objective=False),
    Case("shared_tokens_once_flat", tree={"shared_tokens": "once", "gate": "always"}, same_objective=False),
    *(
        Case(
            f"gspo_{mode}",
            actor={"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"},
            tree={"shared_tokens": mode},
            same_objective=False,
        )
        for mode in ("mean", "once")
    ),
    Case("critic", is_critic=True),
    # With named modules the value head has no adapter. It is trained whole in both cases.
    Case(
        "critic_lora", is_critic=True, model={"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    ),
    Case("critic_seq_mean", is_critic=True, actor={"loss_agg_mode": "seq-mean-token-mean"}),
    *(
        Case(f"session_weight_{name}", **{"tree": {"session_weight": "session"}} | options)
        for name, options in {
            "token_mean": {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}},
            "token_sum": {"actor": {"loss_agg_mode": "token-sum"}},
            "gspo": {"actor": {"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}},
            "critic": {"is_critic": True, "actor": {"loss_agg_mode": "seq-mean-token-sum"}},
            "relay": {"tree": {"session_weight": "session", "capacity": 7, "max_loss_terms": 20}},
            "idle_rank": {"rows": "idle_rank", "actor": {"use_kl_loss": True, "kl_loss_coef": 0.3}},
            "rollout_correction": {"rows": "duplicates", "corrected": True},
            "shared_tokens_mean": {
                "tree": {"session_weight": "session", "shared_tokens": "mean"},
                "same_objective": False,
            },
        }.items()
    ),
    Case(
        "mini_batches_of_sessions",
        planned=True,
        num_steps=2,
        tree={"session_weight": "session"},
        actor={"loss_agg_mode": "seq-mean-token-mean", "use_kl_loss": True, "kl_loss_coef": 0.3},
    ),
    Case("duplicates_and_prefixes", rows="duplicates"),
    # Duplicates with other old log-probs and weights; tokens and whole rows rejected once the denominators were set.
    *(
        Case(f"rollout_correction_{mode}", rows="duplicates", corrected=True, actor={"loss_agg_mode": mode})
        for mode in ("token-mean", "seq-mean-token-mean")
    ),
    Case("bypass_ppo_clip", rows="duplicates", actor={"policy_loss": bypass_loss("ppo_clip")}),
    Case("bypass_reinforce", rows="duplicates", actor={"policy_loss": bypass_loss("reinforce", rollout_is="sequence")}),
    Case("one_token_responses", rows="one_token"),
    Case("single_row", rows="single"),
    Case("ten_steps", num_steps=10, lr=0.1, actor={"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}),
    # Trees in sections. tests/unit/relay has all losses and many capacities, in float64.
    *(
        Case(f"relay_{name}", **{"tree": {"capacity": 7}} | options)
        for name, options in {
            "every_token": {"tree": {"capacity": 2}, "actor": {"entropy_coeff": 0.05}},
            "checkpointing_on_host": {
                "tree": {"capacity": 7, "relay_store": "host"},
                "model": {"enable_gradient_checkpointing": True},
                "tied": True,
            },
            "critic": {"is_critic": True},
            "lora": {"model": {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}},
            "critic_lora": {
                "is_critic": True,
                "model": {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"},
            },
            "tiled_mlp_offload_lora": {
                "model": {
                    "lora_rank": 4,
                    "lora_alpha": 8,
                    "target_modules": "all-linear",
                    "tiled_mlp": {"enabled": True, "num_shards": 3},
                    "enable_gradient_checkpointing": True,
                    "enable_activation_offload": True,
                },
            },
            "temperature_per_row": {
                "temperature_per_row": True,
                "actor": {"entropy_coeff": 0.05},
                "tree": {"capacity": 7, "max_loss_terms": 40},
            },
            "joint": {"is_known_loss": False, "tree": {"capacity": 7, "max_loss_terms": 20}},
            "ten_steps": {
                "num_steps": 10,
                "lr": 0.1,
                "actor": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01},
            },
            "rollout_correction": {
                "rows": "duplicates",
                "corrected": True,
                "actor": {"loss_agg_mode": "token-mean"},
            },
            "bypass_reinforce": {
                "rows": "duplicates",
                "actor": {"policy_loss": bypass_loss("reinforce", rollout_is="token")},
            },
            "idle_rank": {"rows": "idle_rank", "actor": {"use_kl_loss": True, "kl_loss_coef": 0.3}},
        }.items()
    ),
    Case("idle_rank", rows="idle_rank", actor={"use_kl_loss": True, "kl_loss_coef": 0.3}),
]

RUNS = {
    (1, 1): (
        "token_mean",
        "seq_mean_token_sum_norm",
        "kl_and_entropy",
        "lora",
        "capacity_by_memory",
        "flat_packs",
        "shared_tokens_once",
        "critic",
        "critic_lora",
        "mini_batches_of_sessions",
        "rollout_correction_token-mean",
        "bypass_ppo_clip",
        "one_token_responses",
        "ten_steps",
        "relay_checkpointing_on_host",
        "relay_joint",
    ),
    (2, 1): tuple(case.name for case in CASES),
    (2, 2): (
        "token_mean",
        "gspo",
        "kl_and_entropy",
        "gradient_checkpointing",
        "tied_embeddings",
        "lora",
        "capacity_by_memory",
        "flat_packs",
        "small_chunks",
        "temperature_per_row",
        "critic",
        "duplicates_and_prefixes",
        "one_token_responses",
        "ten_steps",
        "mini_batches_of_sessions",
        "relay_every_token",
        "relay_checkpointing_on_host",
        "relay_critic",
        "relay_lora",
        "relay_temperature_per_row",
        "relay_joint",
        "relay_ten_steps",
    ),
    (4, 2): ("token_mean", "kl_and_entropy", "lora", "critic", "relay_every_token", "relay_idle_rank", "idle_rank"),
    # More ranks than key-value heads.
    (4, 4): ("token_mean", "kl_and_entropy", "critic", "relay_every_token"),
}
"""The cases that run on a number of ranks, so many of them in a team."""


def random_rows(kind: str, *, rank: int, rng: np.random.Generator) -> list[tuple[list[int], list[int]]]:
    """Draw the (prompt, response) token lists of one rank: trees of depth >= 3 unless the kind says otherwise."""

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(1, VOCABULARY, size=rng.integers(low, high + 1)).tolist()

    if kind == "single":
        return [(tokens(3, 6), tokens(4, 9))]
    if kind == "one_token":
        prompt = tokens(1, 1)
        return [(prompt, [token]) for token in (3, 4, 4, 5)] + [(prompt, [])]
    rows = []
    for _ in range(2):
        prompt = tokens(3, 8)
        for _ in range(3):
            first = tokens(2, 6)
            for _ in range(2):
                second = first + tokens(1, 5)
                rows += [(prompt, second + tokens(1, 7)) for _ in range(1 + rng.integers(2))]
    if kind == "duplicates":
        rows += [rows[0], rows[0], (rows[1][0], rows[1][1][:3]), (rows[2][0], rows[2][1][:1])]
    if kind == "idle_rank" and rank == 1:
        rows = []
    return rows


def make_batch(case: Case, *, step: int, rank: int, world_size: int) -> TensorDict:
    """Make the rows that verl's workers get, the same number on all ranks, with random signed advantages and masks.

    The ranks of a team get the same rows, and each rank's rows count as rows of their own (`of_teams`).
    """
    rank //= case.sp
    rows = random_rows(case.rows, rank=rank, rng=np.random.default_rng(17 + rank + 1000 * step))
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, len(rows))
    num_padding = max(counts) + 1 - len(rows)
    generator = torch.Generator().manual_seed(99 + rank + 1000 * step)

    def row(prompt: list[int], response: list[int], *, is_padding: bool = False) -> dict[str, torch.Tensor]:
        def random(scale: float) -> torch.Tensor:
            return torch.randn(len(response), generator=generator) * scale

        mask = (torch.rand(len(response), generator=generator) < (0.0 if is_padding else 0.75)).long()
        if response and not is_padding:
            mask[-1] = 1
        return {
            "prompts": torch.tensor(prompt),
            "responses": torch.tensor(response, dtype=torch.int64),
            "response_mask": mask,
            # Far enough from the model's own log-probs that clip and dual clip are active on many tokens.
            "old_log_probs": -4.1 + random(1.0),
            "ref_log_prob": -4.1 + random(0.3),
            "advantages": random(2.0),
            "values": random(0.5),
            "returns": random(1.5),
        }

    all_rows = [row(prompt, response) for prompt, response in rows]
    all_rows += [row([1], [1], is_padding=True) for _ in range(num_padding)]
    sampled = [each["response_mask"] for each in all_rows]
    if case.corrected:
        for index, each in enumerate(all_rows):
            mask = each["response_mask"]
            each["rollout_is_weights"] = (0.5 * torch.randn(len(mask), generator=generator)).exp().clamp(max=2.0)
            is_kept = torch.rand(len(mask), generator=generator) < 0.8
            each["response_mask"] = mask * is_kept * (index % 3 != 2)
    batch = batch_of_rows(
        all_rows,
        max_token_len=case.capacity,
        global_batch_size=sum(counts),
        calculate_entropy=case.actor.get("entropy_coeff", 0.0) != 0.0,
    )
    # verl counts its denominators from the tokens as they were sampled.
    batch["loss_mask"] = torch.nested.as_nested_tensor(sampled, layout=torch.jagged)
    if case.tree.get("session_weight") == "session" and not case.planned:
        weigh_sessions(batch, sessions_of(batch), group=None)
    if case.temperature_per_row:
        batch["temperature"] = torch.tensor([0.7, 1.0, 1.4])[torch.arange(len(all_rows)) // 4 % 3]
    return batch


def sessions_of(batch: TensorDict) -> list[int]:
    """Return the session of each row: one, two or three leaves each, and some on both ranks. -1 is padding."""
    is_sampled = [bool(mask.any()) for mask in batch["loss_mask"].unbind()]
    return [row // (1 + row % 3) if is_sampled[row] else -1 for row in range(len(batch))]


def of_teams(batch: TensorDict, *, sp: int) -> TensorDict:
    """Return the batch with its rows counted once for each team."""
    batch = batch.clone()
    tu.assign_non_tensor(batch, global_batch_size=tu.get(batch, "global_batch_size") // sp)
    return batch


def save_model(folder: Path, *, tied: bool) -> None:
    """Save a tiny random Qwen3 with grouped-query attention."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
    )
    # Larger weights than the default initialisation give gradients that matter and probabilities that differ.
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)


def make_worker(case: Case, *, strategy: str, folder: Path) -> TreeTrainingWorker:
    """Make a worker on the tree engine or verl's own."""
    torch.manual_seed(7)  # value heads and LoRA adapters start at random
    # verl's own offload needs CUDA.
    own_options = case.model if strategy == TREE_STRATEGY else case.model | {"enable_activation_offload": False}
    worker = local_worker(
        str(folder),
        strategy=strategy,
        max_token_len=case.capacity,
        is_critic=case.is_critic,
        model_options=own_options,
        tree_options=case.tree,
        sequence_parallel_size=case.sp if strategy == TREE_STRATEGY else 1,
        # SGD shows the gradient; Adam's first step shows only its sign. The huge clip rescales nothing.
        optimizer=FSDPOptimizerConfig(
            lr=case.lr, optimizer="SGD", clip_grad=1e9, override_optimizer_config={}, total_training_steps=10
        ),
    )
    worker.set_loss_fn(make_loss(case))
    return worker


def make_loss(case: Case) -> Any:
    """Make verl's own loss function with the case's settings."""
    if case.is_critic:
        config = FSDPCriticConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **case.actor)
        return partial(value_loss, config=config)
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1, **case.actor)
    return partial(ppo_loss if case.is_known_loss else custom_loss, config=config)


def custom_loss(**arguments: Any) -> Any:
    """Compute verl's loss under a name that the engine does not know, so that it takes the joint form."""
    return ppo_loss(**arguments)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def infer(worker: TreeTrainingWorker, batch: TensorDict) -> dict[str, Any]:
    """Compute scores without an update."""
    batch = batch.clone()
    tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=True)
    outputs = worker.infer_batch(batch)
    if not worker.engine.is_mp_src_rank_with_outputs():
        return {}
    names = ("log_probs", "entropy", "values")
    return {name: outputs.get(name) for name in names if outputs.get(name, None) is not None}


def parameters(worker: TreeTrainingWorker) -> dict[str, torch.Tensor]:
    """Copy the whole parameters."""
    return {name: full(p.detach()).clone() for name, p in worker.engine.module.named_parameters()}


def train_planned(worker: TreeTrainingWorker, batches: list[TensorDict], *, sp: int, weighs: bool) -> dict[str, Any]:
    """Let the worker take a step on each batch, as mini-batches of one plan; `weighs` says whether it has sessions."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [session for batch in batches for session in sessions_of(batch)])
    plan = MiniBatchPlan(
        rows=(tuple(map(len, batches)),) * (len(ranks) // sp),
        num_rows=tuple(tu.get(batch, "global_batch_size") for batch in batches),
        sessions=tuple(map(tuple, ranks[::sp])) if weighs else None,
    )
    data = tu.concat_tensordict([batch.exclude("global_batch_size", "global_token_num") for batch in batches])
    for key, value in plan.to_extra_info().items():
        tu.assign_non_tensor_data(data, key, value)
    before = parameters(worker)
    trained = worker.train_mini_batch(data)
    metrics = [None if trained is None else tu.get(trained, "metrics")]
    dist.broadcast_object_list(metrics)  # the first rank collects, the others of its team do not
    clipped = min(np.mean(metrics[0][f"actor/pg_clipfrac{kind}"]) for kind in ("", "_lower"))
    steps = {name: metrics[0][name] for name in ("loss", "grad_norm")}
    return {"clipped": clipped, "before": before, "after": parameters(worker), **steps}


def take_steps(worker: TreeTrainingWorker, batches: list[TensorDict]) -> dict[str, Any]:
    """Through the worker's engine, take gradients on the first batch, and a step on each batch."""
    engine = worker.engine
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "before": parameters(worker)}
    for step, batch in enumerate(batches):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch.clone(), worker.loss_fn, forward_only=False)
            loss = torch.tensor(float(np.sum(output["loss"])))
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            result["loss"].append(loss.item())
            if step == 0:
                clipped = [output["metrics"].get(f"actor/pg_clipfrac{kind}") for kind in ("", "_lower")]
                result["clipped"] = min(np.mean(each.values) if each is not None else 0.0 for each in clipped)
                named = engine.module.named_parameters()
                result["gradients"] = {name: full(p.grad).clone() for name, p in named if p.grad is not None}
            result["grad_norm"].append(engine.optimizer_step())
    return result | {"after": parameters(worker)}


def compare(flat: dict[str, Any], tree: dict[str, Any], batch: TensorDict) -> dict[str, float]:
    """Return relative differences, and values that show that the case is not empty; `batch` is the first one."""
    lens = batch["input_ids"].offsets().diff()
    errors: dict[str, float] = {}
    for name in ("log_probs", "entropy", "values"):
        if name in flat and name in tree:
            worst, largest = 0.0, 1e-30
            for row in range(len(batch)):
                mask = batch["response_mask"][row].bool()
                # Scores stand one position before their token.
                end = int(lens[row]) - 1
                here, there = (side[name][row][end - len(mask) : end][mask] for side in (flat, tree))
                if len(here):
                    worst = max(worst, (here - there).abs().max().item())
                    largest = max(largest, here.abs().max().item())
            errors[name] = worst / largest
    norm = float(flat["grad_norm"][0])
    gradients = flat.get("gradients", {})  # a worker keeps none
    assert gradients.keys() == tree.get("gradients", {}).keys()
    for name, gradient in gradients.items():
        own_norm = gradient.norm().item()
        distance = (gradient - tree["gradients"][name]).norm().item() / (own_norm if own_norm > 1e-5 * norm else norm)
        errors["gradient"] = max(errors.get("gradient", 0.0), distance)
    errors["step"] = max(
        (flat["after"][name] - tree["after"][name]).abs().max().item() / flat["after"][name].abs().max().item()
        for name in flat["after"]
    )
    errors["moved"] = max((flat["after"][name] - flat["before"][name]).abs().max().item() for name in flat["after"])
    errors["gradient_norm"] = norm
    steps = [[np.array(side[name]) for side in (flat, tree)] for name in ("grad_norm", "loss")]
    (flat_norms, tree_norms), (flat_losses, tree_losses) = steps
    errors["grad_norm"] = float((abs(flat_norms - tree_norms) / flat_norms).max())
    errors["loss_difference"] = float(abs(flat_losses - tree_losses).max())
    errors["loss"] = float(abs(flat_losses).max())
    errors["clipped"] = float(flat["clipped"])
    return errors


def dispatch_of(rank: int, *, sp: int) -> dict[str, Any]:
    """Return how the driver sees a rank: all ranks of a team get the same rows, and the first hands back results."""
    return {"dispatch_dp_rank": {"train": rank // sp}, "collect_dp_rank": {"train": rank % sp == 0}}


def reference_of(case: Case) -> Case:
    """Return what verl's own engine computes of a case; cases with the same reference share it.

    Trees, what saves memory and the length of micro-batches change no number of verl's.
    """
    return Case(
        "reference",
        actor=case.actor,
        model={name: value for name, value in case.model.items() if name not in SAVES_MEMORY},
        tree={name: value for name, value in case.tree.items() if name == "session_weight"},
        is_critic=case.is_critic,
        tied=case.tied,
        rows=case.rows,
        temperature_per_row=case.temperature_per_row,
        corrected=case.corrected,
        num_steps=case.num_steps,
        lr=case.lr,
        planned=case.planned,
        sp=case.sp,
    )


def run_side(case: Case, *, strategy: str, rank: int, world_size: int, root: Path) -> tuple[dict[str, Any], Any]:
    """Take the steps of one side of a case; return what they give and the worker."""
    folder = root / ("tied" if case.tied else "untied")
    sp = case.sp if strategy == TREE_STRATEGY else 1
    batches = [make_batch(case, step=step, rank=rank, world_size=world_size) for step in range(case.num_steps)]
    mine = [of_teams(batch, sp=sp) for batch in batches]
    worker = make_worker(case, strategy=strategy, folder=folder)
    weighs = case.tree.get("session_weight") == "session"
    scores = infer(worker, mine[0])
    steps = train_planned(worker, mine, sp=sp, weighs=weighs) if case.planned else take_steps(worker, mine)
    return scores | steps | {"batch": batches[0]}, worker


def run_case(
    case: Case, *, rank: int, world_size: int, root: Path, references: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """Run one case on all ranks; return the worst rank's distances. `references` keeps verl's sides for other cases."""
    reference = reference_of(case)
    if repr(reference) not in references:
        options = {"rank": rank, "world_size": world_size, "root": root}
        references[repr(reference)], _ = run_side(reference, strategy=FLAT_STRATEGY, **options)
    flat = references[repr(reference)]
    tree, worker = run_side(case, strategy=TREE_STRATEGY, rank=rank, world_size=world_size, root=root)
    assert worker.get_dispatch_collect() == dispatch_of(rank, sp=case.sp)
    saved = worker.engine.tree_counts.metrics()["tree/por"]
    errors: list[Any] = [None] * world_size
    dist.all_gather_object(errors, compare(flat, tree, tree["batch"]))
    # Only the first rank of a team returns outputs, and the first rank of all is one.
    return {name: max(each[name] for each in errors if name in each) for name in errors[0]} | {"por": saved}


def main() -> None:
    """Run the cases named on the command line, or those of `RUNS`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sp", type=int, default=1, help="ranks that compute each tree together")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    root = Path(shared[0])
    if rank == 0:
        save_model(root / "tied", tied=True)
        save_model(root / "untied", tied=False)
    dist.barrier()
    results: dict[str, dict[str, float]] = {}
    references: dict[str, dict[str, Any]] = {}
    for case in CASES:
        if case.name in (arguments.cases or RUNS[world_size, arguments.sp]):
            case = dataclasses.replace(case, sp=arguments.sp)
            results[case.name] = run_case(case, rank=rank, world_size=world_size, root=root, references=references)
            if rank == 0:
                print(case.name, {name: f"{value:.3g}" for name, value in results[case.name].items()}, flush=True)
    if rank == 0:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
