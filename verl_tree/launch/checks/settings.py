"""Checks for settings that cannot work or would be ignored: a table of rules, then checks of engines and devices."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tree.configs import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.launch.checks.refusals import (
    ACTOR,
    ENGINES,
    MODELS,
    REF,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    lacks_cuda,
    refusal,
    uses_cpu,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.values import check_tree_values


@dataclass(frozen=True, slots=True)
class Rule:
    """A check that a key has one of the allowed values; its message recommends the first.

    `reason` says why another value cannot work, `applies` for which configurations the rule holds.
    """

    key: str
    allowed: tuple[Any, ...]
    reason: str
    applies: Callable[[DictConfig], bool] = lambda _: True

    def __call__(self, config: DictConfig) -> Findings:
        """Yield a finding if the rule applies and the key has another value."""
        if self.applies(config) and value_of(config, self.key) not in self.allowed:
            first = self.allowed[0]
            value = first if isinstance(first, str) else json.dumps(first)
            yield refusal(config, self.key, f"{self.reason}; set it to {value}")


def _rules(parents: tuple[str, ...], name: str, *rest: Any) -> tuple[Rule, ...]:
    """Return the same rule for a key below several parents."""
    return tuple(Rule(f"{parent}.{name}", *rest) for parent in parents)


def _uses_flat(config: DictConfig) -> bool:
    return not uses_tree(config)


ON, OFF = (True,), (False, None)
ACTOR_ONLY = "only the actor replays routes; the others route by themselves"
NO_SLEEP = "vLLM cannot sleep on a CPU"

RULES: tuple[Rule, ...] = (
    Rule("trainer.use_v1", ON, "trees need verl's V1 trainer; the legacy trainer is not supported"),
    Rule("tree.shared_tokens", ("sum",), "tree.enabled=false knows only the sum", _uses_flat),
    Rule(
        "reward.reward_manager.source", ("register", "importlib"), "verl knows register (its own) and importlib (yours)"
    ),
    # Settings that the engine does not implement, or under which it would cut a batch differently.
    Rule(f"{ACTOR}.calculate_sum_pi_squared", OFF, "only tree.enabled=false computes it", uses_tree),
    *_rules(ENGINES[1:], "router_replay.mode", ("disabled", None), ACTOR_ONLY),
    *_rules((ACTOR, *ENGINES), "qat.enable", OFF, "quantisation-aware training is not supported"),
    # Settings for CUDA that fail late, or hang, on a CPU.
    Rule(f"{ROLLOUT}.name", ("vllm",), "trainer.device=cpu generates with vLLM's CPU engine", uses_cpu),
    Rule(f"{ROLLOUT}.quantization", (None,), "not supported with trainer.device=cpu", uses_cpu),
    Rule(f"{ROLLOUT}.enable_sleep_mode", OFF, NO_SLEEP, uses_cpu),
    Rule(f"{ROLLOUT}.free_cache_engine", OFF, NO_SLEEP, uses_cpu),
)
"""Keys that must have a certain value."""


def check_tree_options(config: DictConfig) -> Findings:
    """Build the tree options, and look up the names of backends and modes."""
    from verl_tree.attention import BACKENDS
    from verl_tree.functional.expansion import SHARED_TOKEN_MODES

    wrong = list(check_tree_values(config))
    yield from wrong
    told = {each.key for each in wrong}
    for name, known in (("backend", ("auto", *BACKENDS)), ("shared_tokens", SHARED_TOKEN_MODES)):
        if f"tree.{name}" not in told and value_of(config, f"tree.{name}") not in known:
            yield refusal(config, f"tree.{name}", f"choose one of {', '.join(known)}")


def check_sharing(config: DictConfig) -> Findings:
    """Find what sharing prompts only does not go with."""
    if config.tree.sharing != "prompt":
        return
    if not uses_tree(config):
        yield refusal(config, "tree.sharing", "tree.enabled=false shares nothing; set it to full")
    elif config.tree.shared_tokens != "sum":
        remedy = "with tree.sharing=prompt no trained token has several leaves; set it to sum"
        yield refusal(config, "tree.shared_tokens", remedy)


def check_strategies(config: DictConfig) -> Findings:
    """Compare every role's engine with the one that `tree.enabled` chooses."""
    allowed = (TREE_STRATEGY,) if uses_tree(config) else (FLAT_STRATEGY, "fsdp")
    remedy = f"tree.enabled={config.tree.enabled} trains with {' or '.join(allowed)}; remove this override"
    roles = {ACTOR: True, REF: uses_reference(config), "critic": uses_critic(config)}
    for role in (role for role, is_used in roles.items() if is_used):
        if value_of(config, f"{role}.strategy") not in allowed:
            yield refusal(config, f"{role}.strategy", remedy)


def check_device(config: DictConfig) -> Findings:
    """Find a CUDA profile on a machine without CUDA."""
    if lacks_cuda(config) and config.trainer.nnodes == 1:
        remedy = "torch sees no CUDA device; use profile=cpu, or profile=auto to choose"
        yield refusal(config, "trainer.device", remedy)


def check_cpu_backend(config: DictConfig) -> Findings:
    """Find a CUDA backend on a CPU; `triton` is allowed there under Triton's interpreter."""
    backend = config.tree.backend
    interprets = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if uses_cpu(config) and uses_tree(config) and backend in ("fa4", "triton") and not interprets:
        remedy = "its kernels need CUDA, and trainer.device=cpu; set auto, varlen or dense"
        yield refusal(config, "tree.backend", remedy)


def check_critic_cut(config: DictConfig) -> Findings:
    """Compare the mini-batch sizes of actor and critic, which share one mini-batch plan."""
    key, size = "critic.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size
    if uses_critic(config) and value_of(config, key) != size:
        yield refusal(config, key, f"must equal {ACTOR}.ppo_mini_batch_size={size}")


def check_critic_adapters(config: DictConfig) -> Findings:
    """Find LoRA of a critic where verl's own engine would fail to build it, and a checkpoint without its value head."""
    rank, only_adapters = f"{MODELS[1]}.lora_rank", "critic.checkpoint.save_lora_only"
    if not uses_critic(config) or not value_of(config, rank):
        return
    if not (uses_tree(config) or uses_cpu(config)):
        yield refusal(config, rank, "verl's own engine cannot build such a critic; set it to 0, or tree.enabled=true")
    if value_of(config, only_adapters):
        yield refusal(config, only_adapters, "the value head is trained, too, and would be lost; set it to false")


def check_last_mini_batch(config: DictConfig) -> Findings:
    """Warn of a last update of a step that has fewer prompts than the others, and moves the weights as far."""
    key = f"{ACTOR}.ppo_mini_batch_size"
    size, num_prompts = value_of(config, key), config.data.train_batch_size
    if size < num_prompts and num_prompts % size:
        message = (
            f"{key}={size}: does not divide data.train_batch_size={num_prompts}; the last of the "
            f"{-(-num_prompts // size)} updates of a step has {num_prompts % size} prompts only"
        )
        yield Finding(message, is_warning=True)


def check_rollout_engine(config: DictConfig) -> Findings:
    """Warn of other engines than vLLM, which verl knows, and nobody has tried with trees."""
    key = f"{ROLLOUT}.name"
    if value_of(config, key) != "vllm" and not uses_cpu(config):
        message = "verl starts it and calls are recorded in the same way, but only vllm was ever tried with verl_tree"
        yield Finding(f"{key}={value_of(config, key)}: {message}", is_warning=True)


def check_less_memory(config: DictConfig) -> Findings:
    """Find keys that save memory where they would be ignored or fail (`verl_tree.engine.fsdp.build`)."""
    for model in (MODELS[0], *(MODELS[1:] if uses_critic(config) else ())):
        tiles, offloads = value_of(config, f"{model}.tiled_mlp.enabled"), f"{model}.enable_activation_offload"
        if tiles and not uses_tree(config):
            yield refusal(config, f"{model}.tiled_mlp.enabled", "only tree.enabled=true reads it; set it to false")
        if not value_of(config, offloads):
            continue
        if uses_cpu(config) and not uses_tree(config):
            yield refusal(config, offloads, "verl's own engine offloads through CUDA only; set it to false")
        if uses_tree(config) and not value_of(config, f"{model}.enable_gradient_checkpointing"):
            remedy = f"what is moved are gradient checkpoints; set {model}.enable_gradient_checkpointing=true"
            yield refusal(config, offloads, remedy)


CHECKS: tuple[Check, ...] = (
    check_tree_options,
    check_sharing,
    check_strategies,
    *RULES,
    check_critic_adapters,
    check_device,
    check_cpu_backend,
    check_critic_cut,
    check_last_mini_batch,
    check_rollout_engine,
    check_less_memory,
)
