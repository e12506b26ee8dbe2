"""Checks for settings that cannot work or would be ignored: a table of rules, then checks that read several keys."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY, TreeConfig
from verl_tree.launch.validation.refusals import (
    ACTOR,
    ENGINES,
    REF,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    refusal,
    uses_cpu,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)
from verl_tree.launch.validation.ulysses import team_size


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
NO_REPLAY = "router replay is not supported: routes belong to rows, and a shared token has only one"
NO_SLEEP = "vLLM cannot sleep on a CPU"

RULES: tuple[Rule, ...] = (
    Rule("model_engine", ("dp",), "trees run on verl's FSDP2 engine only, not on Megatron, VeOmni or TorchTitan"),
    Rule("trainer.use_v1", ON, "trees need verl's V1 trainer; the legacy trainer is not supported"),
    Rule("tree.shared_tokens", ("sum",), "tree.enabled=false knows only the sum", _uses_flat),
    Rule(
        "reward.reward_manager.source", ("register", "importlib"), "verl knows register (its own) and importlib (yours)"
    ),
    # Settings that the engine does not implement, or under which it would cut a batch differently.
    Rule(f"{ACTOR}.calculate_sum_pi_squared", OFF, "only tree.enabled=false computes it", uses_tree),
    Rule(f"{ROLLOUT}.enable_rollout_routing_replay", OFF, NO_REPLAY),
    *_rules(ENGINES, "router_replay.mode", ("disabled", None), NO_REPLAY),
    *_rules((ACTOR, *ENGINES), "qat.enable", OFF, "quantisation-aware training is not supported"),
    # Settings for CUDA that fail late, or hang, on a CPU.
    Rule(f"{ROLLOUT}.name", ("vllm",), "trainer.device=cpu generates with vLLM's CPU engine", uses_cpu),
    Rule(f"{ROLLOUT}.quantization", (None,), "not supported with trainer.device=cpu", uses_cpu),
    Rule(f"{ROLLOUT}.enable_sleep_mode", OFF, NO_SLEEP, uses_cpu),
    Rule(f"{ROLLOUT}.free_cache_engine", OFF, NO_SLEEP, uses_cpu),
)
"""Keys that must have a certain value."""


def check_tree_options(config: DictConfig) -> Findings:
    """Build the tree options, and look up the names of methods, backends and modes."""
    from verl_tree.attention import BACKENDS
    from verl_tree.functional.expansion import SHARED_TOKEN_MODES
    from verl_tree.packing import METHODS

    try:
        TreeConfig.from_mapping(config.tree)
    except ValueError as error:
        yield Finding(str(error))
        return
    for name, known in (("packing", METHODS), ("backend", ("auto", *BACKENDS)), ("shared_tokens", SHARED_TOKEN_MODES)):
        if config.tree[name] not in known:
            yield refusal(config, f"tree.{name}", f"choose one of {', '.join(known)}")


def check_strategies(config: DictConfig) -> Findings:
    """Compare every role's engine with the one that `tree.enabled` chooses; `model_engine` chooses among others."""
    if config.model_engine != "dp":
        return
    allowed = (TREE_STRATEGY,) if uses_tree(config) else (FLAT_STRATEGY, "fsdp")
    remedy = f"tree.enabled={config.tree.enabled} trains with {' or '.join(allowed)}; remove this override"
    roles = {ACTOR: True, REF: uses_reference(config), "critic": uses_critic(config)}
    for role in (role for role, is_used in roles.items() if is_used):
        if value_of(config, f"{role}.strategy") not in allowed:
            yield refusal(config, f"{role}.strategy", remedy)


def check_estimator(config: DictConfig) -> Findings:
    """Look up the estimator, which verl does only after the first rollout."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_tree.trainer.advantages import ESTIMATORS

    known = [*ESTIMATORS, *sorted(ADV_ESTIMATOR_REGISTRY.keys() - ESTIMATORS.keys())]
    if config.algorithm.adv_estimator not in known:
        remedy = f"choose one of {', '.join(known)}, or register yours in a module of VERL_USE_EXTERNAL_MODULES"
        yield refusal(config, "algorithm.adv_estimator", remedy)
    weight = "algorithm.gigpo.step_advantage_w"
    if config.algorithm.adv_estimator == "gigpo" and not isinstance(value_of(config, weight), int | float):
        yield refusal(config, weight, "give a number; 1.0 is the paper's, and 0.0 makes it tree_grpo")


def check_device(config: DictConfig) -> Findings:
    """Find a CUDA profile on a machine without CUDA."""
    import torch

    if config.trainer.device == "cuda" and not torch.cuda.is_available() and config.trainer.nnodes == 1:
        remedy = "torch sees no CUDA device; use profile=cpu, or profile=auto to choose"
        yield refusal(config, "trainer.device", remedy)


def check_cpu_backend(config: DictConfig) -> Findings:
    """Find a CUDA backend on a CPU; `triton` is allowed there under Triton's interpreter."""
    backend = config.tree.backend
    interprets = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if uses_cpu(config) and uses_tree(config) and backend in ("fa4", "triton") and not interprets:
        remedy = "its kernels need CUDA, and trainer.device=cpu; set auto, varlen or dense"
        yield refusal(config, "tree.backend", remedy)


def check_memory(config: DictConfig) -> Findings:
    """Find a memory limit that nothing reads, and a missing one where there is no device to ask."""
    if not uses_tree(config):
        return
    if config.tree.capacity != "auto":
        if config.tree.memory_gib is not None:
            yield refusal(config, "tree.memory_gib", "only tree.capacity=auto reads it; set that, or null")
    elif config.tree.memory_gib is None and uses_cpu(config):
        remedy = "tree.capacity=auto needs it with trainer.device=cpu; give the GiB that one rank may use"
        yield refusal(config, "tree.memory_gib", remedy)


def capacity_keys(config: DictConfig) -> list[str]:
    """Return the keys that bound the tokens of a micro-batch of the roles in use."""
    if uses_tree(config) and config.tree.capacity is not None:
        return ["tree.capacity"]
    keys = [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
    if uses_reference(config):
        keys.append(f"{REF}.log_prob_max_token_len_per_gpu")
    if uses_critic(config):
        keys += ["critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"]
    return keys


def longest_trajectory(config: DictConfig) -> tuple[int, str]:
    """Return the length of the longest possible trajectory, and text that names the options behind it."""
    rollout = config.actor_rollout_ref.rollout
    # All turns after the first prompt count as response.
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        return rollout.max_model_len, f"{rollout.max_model_len} tokens ({ROLLOUT}.max_model_len)"
    lens = f"data.max_prompt_length={rollout.prompt_length} + data.max_response_length={rollout.response_length}"
    return longest, f"{longest} tokens ({lens})"


def check_capacity(config: DictConfig) -> Findings:
    """Find limits below the longest possible trajectory, which must fit into one pass if it cannot be relayed."""
    longest, named = longest_trajectory(config)
    response = config.actor_rollout_ref.rollout.response_length
    limits = []
    if not uses_tree(config) or config.tree.relay == "never":
        remedy = "raise it, shorten them, or set tree.relay=auto" if uses_tree(config) else "raise it or shorten them"
        limits += [(key, longest, f"trajectory, {named}; {remedy}") for key in capacity_keys(config)]
    if uses_tree(config):
        remedy = "raise it, shorten them, or set null for no limit"
        limits.append(("tree.max_path_len", longest, f"trajectory, {named}; {remedy}"))
        named = f"data.max_response_length={response} tokens"
        limits.append(("tree.max_loss_terms", response, f"response, {named}; {remedy}"))
    for key, least, what in limits:
        value = value_of(config, key)
        # verl multiplies what it calls `per_gpu` by the ranks that compute a micro-batch together.
        num_ranks = team_size(config) if key.endswith("_per_gpu") else 1
        if isinstance(value, int) and value * num_ranks < least:
            per_rank = f", times {num_ranks} ranks," if num_ranks > 1 else ""
            yield refusal(config, key, f"less{per_rank} than the longest possible {what}")


def check_session_weight(config: DictConfig) -> Findings:
    """Find a loss that reads several rows together, where rows are to be weighed."""
    if config.tree.session_weight != "session":
        return
    from verl_tree.engine.row_losses import POLICY_LOSSES_OVER_ROWS

    key = f"{ACTOR}.policy_loss.loss_mode"
    if value_of(config, key) not in POLICY_LOSSES_OVER_ROWS:
        remedy = f"choose one of {', '.join(POLICY_LOSSES_OVER_ROWS)}, or set tree.session_weight=leaf"
        yield refusal(config, key, f"tree.session_weight=session weighs rows, and this loss couples them; {remedy}")


def check_distillation(config: DictConfig) -> Findings:
    """Find a distillation loss that reads more of the student than log-probs, or that verl does not know."""
    from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

    if not config.distillation.enabled:
        return
    key = "distillation.distillation_loss.loss_mode"
    known = DISTILLATION_SETTINGS_REGISTRY
    estimators = ", ".join(name for name, each in known.items() if each.use_estimator)
    loss = known.get(value_of(config, key))
    if loss is None:
        yield refusal(config, key, f"no such distillation loss; choose one of {estimators}")
    elif not loss.use_estimator and uses_tree(config):
        remedy = "top-k distillation needs the logits of every row, which a tree does not make; choose an estimator"
        yield refusal(config, key, f"{remedy} ({estimators}), or set tree.enabled=false")


def rollout_ranks(config: DictConfig) -> int:
    """Return how many ranks one replica of the rollout engine takes."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size


def check_rollout_ranks(config: DictConfig) -> Findings:
    """Find replicas of the rollout engine that do not divide the trainer's ranks, on which they run."""
    num_ranks, size = config.trainer.nnodes * config.trainer.n_gpus_per_node, rollout_ranks(config)
    if config.actor_rollout_ref.hybrid_engine and num_ranks % size:
        remedy = f"a replica takes {size} ranks, which must divide trainer.nnodes x n_gpus_per_node={num_ranks}"
        yield refusal(config, f"{ROLLOUT}.tensor_model_parallel_size", remedy)


def check_critic_cut(config: DictConfig) -> Findings:
    """Compare the mini-batch sizes of actor and critic, which share one mini-batch plan."""
    key, size = "critic.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size
    if uses_critic(config) and value_of(config, key) != size:
        yield refusal(config, key, f"must equal {ACTOR}.ppo_mini_batch_size={size}")


CHECKS: tuple[Check, ...] = (
    check_tree_options,
    check_strategies,
    *RULES,
    check_estimator,
    check_device,
    check_cpu_backend,
    check_memory,
    check_capacity,
    check_session_weight,
    check_distillation,
    check_rollout_ranks,
    check_critic_cut,
)
