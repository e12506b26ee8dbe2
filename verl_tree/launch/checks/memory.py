"""A warning of an update that this machine cannot hold, computed from the sizes in the model's config.json.

What is computed is what an update takes at least: activations are counted in bfloat16 and with gradient checkpointing
(`verl_tree.functional.update_memory`), critics, buffers and fragmentation not at all. Nothing is said of recurrent
layers and of mixtures whose layers differ, of machines that are not this one, and of `tree.capacity=auto`, which
measures.
"""

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
from omegaconf import DictConfig

from verl_tree.launch.checks.capacity import capacity_keys, longest_trajectory, ranks_of_limit, team_size
from verl_tree.launch.checks.modes import is_separate, rollout_pools, rollout_ranks
from verl_tree.launch.checks.refusals import (
    ACTOR,
    MODELS,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    engines_of,
    ranks_of,
    text_settings,
    uses_cpu,
    uses_reference,
    uses_teacher_here,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.values import check_tree_values
from verl_tree.launch.command.environment import joins_running_cluster

if TYPE_CHECKING:
    from verl_tree.functional.model_size import ModelSize

GIB = 2**30
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Bytes that an update takes at least: on a CPU of all ranks together, else of one.

    Attributes:
        states: Weights, gradients and optimiser of the actor, its gradients once more if the canary puts them aside,
            and the weights of the reference model.
        activations: A pass of `num_tokens` tokens on each rank.
        rollout: What the rollout engine holds meanwhile.
    """

    num_tokens: int
    states: int
    activations: int
    rollout: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.states + self.activations + self.rollout


def check_update_memory(config: DictConfig) -> Findings:
    """Warn of an update that takes more than the memory that there is."""
    key, size, memory_bytes = capacity_keys(config)[0], model_size(config), memory_of_machine(config)
    if size is None or memory_bytes is None or not isinstance(value_of(config, key), int):
        return
    if any(check_tree_values(config)):
        return  # it computes with them
    needs = foreseen(config, size)
    if needs.total <= memory_bytes:
        return
    parts = (
        f"{_gib(needs.states)} weights, gradients and optimiser, {_gib(needs.activations)} a pass of "
        f"{needs.num_tokens} tokens, {_gib(needs.rollout)} the rollout engine"
    )
    where = "this machine" if uses_cpu(config) else "a GPU of this machine"
    message = f"an update takes at least {_gib(needs.total)} GiB ({parts}), and {where} has {_gib(memory_bytes)}"
    yield Finding(f"{key}={value_of(config, key)}: {message}; {_remedy(config, needs, memory_bytes)}", is_warning=True)


def _remedy(config: DictConfig, needs: Foreseen, memory_bytes: int) -> str:
    checkpointing = f"{MODELS[0]}.enable_gradient_checkpointing"
    if needs.states + needs.rollout > memory_bytes:
        offload = "" if uses_cpu(config) else ", more ranks, or offload (the engine's param_offload, optimizer_offload)"
        return f"take a smaller model{offload}"
    keys = ["it", "tree.logits_chunk_size"] if uses_tree(config) else ["it"]
    also = "" if value_of(config, checkpointing) else f", and set {checkpointing}=true, which is counted as set"
    return f"lower {' or '.join(keys)}{also}"


def model_size(config: DictConfig) -> "ModelSize | None":
    """Return the sizes of the policy, if it is a decoder whose layers are alike and its config.json is here."""
    from verl_tree.functional.model_size import ModelSize

    return ModelSize.of_settings(text_settings(value_of(config, f"{MODELS[0]}.path")))


def foreseen(config: DictConfig, size: "ModelSize") -> Foreseen:
    """Compute what an update of a resolved and translated configuration with a fixed capacity takes at least."""
    num_ranks, num_tokens = ranks_of(config, "trainer"), _tokens_of_pass(config)
    states = _state_bytes(config, size)
    activations = _activation_bytes(config, size, num_tokens)
    if not uses_cpu(config):
        keeps = value_of(config, "actor_rollout_ref.hybrid_engine") and not value_of(
            config, f"{ROLLOUT}.free_cache_engine"
        )
        share = config.actor_rollout_ref.rollout.gpu_memory_utilization if keeps else 0
        rollout = int(share * (memory_of_machine(config) or 0))
        return Foreseen(num_tokens, states // num_ranks, activations, rollout)
    environment = {**os.environ, **(value_of(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {})}
    engine_bytes = _bytes_of(value_of(config, f"{ROLLOUT}.dtype")) * size.num_parameters
    with contextlib.suppress(ValueError, TypeError):  # vLLM says so
        engine_bytes += int(float(environment.get(KV_SPACE) or 0) * GIB)
    num_engines = sum(rollout_pools(config).values()) // rollout_ranks(config)
    return Foreseen(num_tokens, states, num_ranks * activations, num_engines * engine_bytes)


def num_gradients(config: DictConfig) -> int:
    """Return how often a rank has its gradients at once: twice while the canary compares one (docs/exactness.md)."""
    is_compared = uses_tree(config) and config.tree.canary and config.tree.canary_gradient_every
    return 2 if is_compared else 1


def _tokens_of_pass(config: DictConfig) -> int:
    """Return the most tokens that a rank computes at once: the limit, or the rows of a mini-batch if they are less."""
    key, num_teammates = capacity_keys(config)[0], team_size(config)
    limit = value_of(config, key) * ranks_of_limit(config, key)
    longest, _ = longest_trajectory(config)
    num_rows = value_of(config, f"{ACTOR}.ppo_mini_batch_size") * value_of(config, f"{ROLLOUT}.n")
    rows_of_team = max(1, num_rows * num_teammates // ranks_of(config, "trainer"))
    return max(1, min(limit, rows_of_team * longest) // num_teammates)


def _state_bytes(config: DictConfig, size: "ModelSize") -> int:
    """Return the bytes of weights, gradients and optimiser of all ranks together."""
    actor, engine = config.actor_rollout_ref.actor, value_of(config, engines_of(config)[ACTOR])
    dtype_bytes = _bytes_of(engine.get("model_dtype", "fp32"))  # VeOmni's is float32
    if value_of(config, f"{MODELS[0]}.lora_rank"):
        return dtype_bytes * size.num_parameters  # adapters are small
    offloads = engine if not uses_cpu(config) else {}
    numbers = num_gradients(config)
    numbers += 0 if offloads.get("param_offload") else 1
    numbers += 0 if offloads.get("optimizer_offload") or "adam" not in str(actor.optim.optimizer).lower() else 2
    # On a GPU the reference model may wait in host memory.
    # A teacher may be smaller.
    has_reference = uses_reference(config) and not uses_teacher_here(config)
    numbers += 1 if has_reference and uses_cpu(config) else 0
    return numbers * dtype_bytes * size.num_parameters


def _activation_bytes(config: DictConfig, size: "ModelSize", num_tokens: int) -> int:
    """Return the bytes of a pass on one rank."""
    from verl_tree.functional.update_memory import Levers, update_memory

    model, is_tree = config.actor_rollout_ref.model, uses_tree(config)
    levers = Levers(
        num_tiles=model.tiled_mlp.num_shards if model.tiled_mlp.enabled else None,
        offloads=bool(model.enable_activation_offload) and not uses_cpu(config),
        chunk_size=config.tree.logits_chunk_size if is_tree else 1,
    )
    memory = update_memory(size, num_tokens, state_bytes=0, levers=levers, kernel_bytes=0)
    if is_tree:
        return memory.total
    # verl makes the logits of all tokens, and their gradients.
    dtype = value_of(config, f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")
    logits = 0 if model.use_fused_kernels else 2 * _bytes_of(dtype) * num_tokens * size.vocabulary
    return memory.checkpoints + max(memory.layer, logits)


def _bytes_of(dtype: Any) -> int:
    return 4 if dtype in ("fp32", "float32", "float") else 2


def memory_of_machine(config: DictConfig) -> int | None:
    """Return the memory for all ranks of a CPU, or of one GPU, if they are on this machine; else None."""
    import torch

    if joins_running_cluster(config) or config.trainer.nnodes > 1 or (is_separate(config) and uses_cpu(config)):
        return None
    if uses_cpu(config):
        return psutil.virtual_memory().total
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.device_count() else None


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g}"


CHECKS: tuple[Check, ...] = (check_update_memory,)
