"""Checks for settings that cannot work, would be ignored, or do otherwise than it seems."""

import dataclasses
import importlib
import operator
from functools import reduce
from typing import Any

from omegaconf import DictConfig

from verl_tree.clashes import not_drawn, run_keeps_all_rows
from verl_tree.launch.checks.features import VERLS_ATTENTION
from verl_tree.launch.checks.refusals import (
    ACTOR,
    REF,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    engines_of,
    lacks_cuda,
    models_of,
    refusal,
    refusal_here,
    uses_cpu,
    uses_critic,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.values import check_tree_values
from verl_tree.launch.command.composition import has_flash_attn, model_engine, verl_values
from verl_tree.launch.command.misspelt import GONE

INSTALL = "install flash-attn (docs/install.md)"

OVER_SESSIONS = (
    *("tree_grpo", "grpo", "grpo_passk", "grpo_vectorized", "gdpo", "gpg", "opo", "rloo", "rloo_vectorized"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
"""Estimators that compare the sessions of a prompt, and nothing within one."""

ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
SECRETS = frozenset({"KEY", "KEYS", "TOKEN", "SECRET", "PASSWORD", "CREDENTIALS"})
"""Words in the names of variables whose values nobody should see."""

IN_THE_CLEAR = (
    "the run's log shows it, and .hydra/config.yaml does, if it is given in the clear; remove it here, and set the "
    "variable in the shell of this command, or of `ray start` where Ray runs already: Ray's processes inherit it"
)


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


def check_strategies(config: DictConfig) -> Findings:
    """Compare every role's engine with the one that `tree.enabled` chooses."""
    engine = model_engine(config)
    allowed = (engine.tree,) if uses_tree(config) else engine.flat
    remedy = f"tree.enabled={config.tree.enabled} trains with {' or '.join(allowed)}; remove this override"
    for role in engines_of(config):
        if value_of(config, f"{role}.strategy") not in allowed:
            yield refusal(config, f"{role}.strategy", remedy)


def check_fields(config: DictConfig) -> Findings:
    """Find options of a role that verl cannot hand to it, in a config file for another engine, for example."""
    for role in (ACTOR, REF, "critic"):
        defaults = reduce(operator.getitem, role.split("."), verl_values(config))
        yield from _check_fields(config, role, defaults)


def _check_fields(config: DictConfig, key: str, defaults: dict[str, Any]) -> Findings:
    group = value_of(config, key)
    module, _, name = str(group.get("_target_")).rpartition(".")
    if not module.startswith(("verl.", "verl_tree.")):  # none, or a class of the user's
        return
    target = getattr(importlib.import_module(module), name, None)
    known = {each.name for each in dataclasses.fields(target)} if dataclasses.is_dataclass(target) else set(group)
    for name, value in group.items():
        if name not in known | {"_target_"} | set(defaults):
            shown = f"{key}={{{name}: ...}}" if isinstance(value, DictConfig) else f"{key}.{name}={value}"
            instead = GONE.get(f"{key}.{name}", "remove it")
            yield Finding(f"{shown}: no such option with model_engine={config.model_engine}; {instead}")
        elif isinstance(value, DictConfig):
            yield from _check_fields(config, f"{key}.{name}", defaults.get(name) or {})


def check_device(config: DictConfig) -> Findings:
    """Find a CUDA profile on a machine without CUDA."""
    if lacks_cuda(config) and config.trainer.nnodes == 1:
        remedy = "torch sees no CUDA device; use profile=cpu, or profile=auto to choose"
        yield refusal(config, "trainer.device", remedy)


def check_critic_cut(config: DictConfig) -> Findings:
    """Compare the mini-batch sizes of actor and critic, which share one mini-batch plan."""
    key, size = "critic.ppo_mini_batch_size", config.actor_rollout_ref.actor.ppo_mini_batch_size
    if uses_critic(config) and value_of(config, key) != size:
        yield refusal(config, key, f"must equal {ACTOR}.ppo_mini_batch_size={size}")


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


def check_drawn_rows(config: DictConfig) -> Findings:
    """Find what reads rows that an update with drawn rows would leave out."""
    key = "tree.keep_tokens"
    reasons = run_keeps_all_rows(config)
    if value_of(config, key) is not None and uses_tree(config) and reasons:
        yield refusal(config, key, not_drawn(", ".join(reasons)))


def check_step_weight(config: DictConfig) -> Findings:
    """Find a weight of GiGPO's steps that is no number."""
    weight = "algorithm.gigpo.step_advantage_w"
    if config.algorithm.adv_estimator == "gigpo" and not isinstance(value_of(config, weight), int | float):
        yield refusal(config, weight, "give a number; 1.0 is the paper's, and 0.0 makes it tree_grpo")


def check_group_size(config: DictConfig) -> Findings:
    """Warn of groups of one session, where sessions are compared."""
    key, estimator = f"{ROLLOUT}.n", config.algorithm.adv_estimator
    if value_of(config, key) == 1 and estimator in OVER_SESSIONS:
        message = (
            f"{key}=1: algorithm.adv_estimator={estimator} compares the sessions of a prompt, and there is one; unless "
            "that ends in several leaves with rewards of their own, there is nothing to compare with. Set 8, say"
        )
        yield Finding(message, is_warning=True)


def check_attention(config: DictConfig) -> Findings:
    """Find attention of verl's own engine on CUDA that is not installed, or slow. Trees need no flash-attn."""
    if uses_tree(config) or uses_cpu(config) or has_flash_attn():
        return
    key = f"{models_of(config)[0]}.override_config.attn_implementation"
    attention = value_of(config, key) or VERLS_ATTENTION
    if attention == VERLS_ATTENTION:
        yield refusal_here(config, key, f"flash-attn is not installed; {INSTALL}, or set sdpa")
    elif attention == "sdpa":
        slow = "exact, but its time and memory grow with the square of a micro-batch's tokens"
        yield Finding(f"{key}=sdpa: {slow}; {INSTALL} before you compare speeds", is_warning=True)
    if uses_critic(config):
        # verl asks for flash_attention_2 by name when it loads one.
        remedy = f"verl's own critic needs flash-attn, whatever attn_implementation says; {INSTALL}, or set true"
        yield refusal_here(config, "tree.enabled", remedy)


def check_secrets(config: DictConfig) -> Findings:
    """Warn of secrets: verl prints the resolved configuration, and Hydra keeps what it was composed from."""
    for name in value_of(config, ENV_VARS) or ():
        if not SECRETS.isdisjoint(str(name).upper().split("_")):
            yield Finding(f"{ENV_VARS}.{name}=(not shown): {IN_THE_CLEAR}", is_warning=True)


CHECKS: tuple[Check, ...] = (
    check_strategies,
    check_fields,
    check_device,
    check_critic_cut,
    check_last_mini_batch,
    check_rollout_engine,
    check_drawn_rows,
    check_step_weight,
    check_group_size,
    check_attention,
    check_secrets,
)
