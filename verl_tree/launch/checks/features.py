"""Which features a resolved configuration uses, of those in `verl_tree.clashes`, and the refusal of what clashes."""

import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tree import clashes
from verl_tree.families import IMAGE_TYPES, VEOMNI_CRITICS, VEOMNI_TYPES, has_recurrent_layers, has_token_classifier
from verl_tree.launch.checks.capacity import team_keys, team_size
from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    MODELS,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    corrections,
    engines_of,
    fine_tunes,
    model_settings,
    models_of,
    ranks_of,
    text_settings,
    uses_critic,
    uses_teacher_here,
    value_of,
)

Feature = Callable[[DictConfig], Iterator[str]]
"""Yields the settings that turn it on. The keys of both trainers are asked for; one that is absent is off."""

VERLS_ATTENTION = "flash_attention_2"
"""What `verl.workers.config.HFModelConfig` (0.9.1) takes where there is no `attn_implementation`."""

DISTILLATION = "distillation.distillation_loss.loss_mode"
ALL, POLICY_ONLY, CRITICS = slice(None), slice(0, 1), slice(1, None)
POLICY = f"{MODELS[0]}.path"
GROUPS = {"actor": ACTOR, "rollout": ROLLOUT}
LINEAR = "linear_conv_kernel_dim"
HEAD_DIMS = {"linear_key_head_dim": (64, 128), "linear_value_head_dim": (64, 128)}
OFF = (None, False, 0)
_ABSENT = object()


def reads_images(config: DictConfig) -> bool:
    """Whether images of the policy are served. A model that is not on this machine is not looked into."""
    return any(_images(config))


def settings_of(name: str, config: DictConfig) -> Iterator[str]:
    """Yield the settings that turn a feature on: one of `WORDS`, or a name that `verl_tree.clashes` explains."""
    match = re.fullmatch(r"(?:no )?([\w.]+)(!?=)?([\w,]*)", name)
    if name in WORDS or match is None:
        yield from WORDS[name](config) if name in WORDS else ()
        return
    key, sign, values = match.groups()
    for each in _keys(key, config):
        value = OmegaConf.select(config, each, default=_ABSENT)
        if sign is None:
            holds = (value in OFF) == name.startswith("no ")
        else:
            holds = (("null" if value is None else str(value)) in values.split(",")) == (sign == "=")
        if value is not _ABSENT and holds:
            yield f"{each}={value}"


def _keys(key: str, config: DictConfig) -> list[str]:
    group, _, rest = key.partition(".")
    if group == "model":
        return [f"{model}.{rest}" for model in models_of(config)]
    if not rest:
        return [key]
    if group == "engine" and not fine_tunes(config):
        return [f"{engines_of(config)[ACTOR]}.{rest}"]
    return [f"{GROUPS.get(group, group)}.{rest}"] if group != "critic" or uses_critic(config) else []


def _of_types(is_one: Callable[[dict[str, Any]], bool], *, models: slice = POLICY_ONLY) -> Feature:
    """Return the feature that the config.json of a model in use holds something. One that is not here is not asked."""

    def settings(config: DictConfig) -> Iterator[str]:
        for model in models_of(config)[models]:
            path = value_of(config, f"{model}.path")
            if is_one(found := model_settings(path)):
                yield f"{model}.path={path} ({found.get('model_type')})"

    return settings


def _one_rank(config: DictConfig) -> Iterator[str]:
    if not fine_tunes(config) and ranks_of(config, "trainer") == 1:
        yield "trainer.n_gpus_per_node=1"


def _other_heads(config: DictConfig) -> Iterator[str]:
    path = value_of(config, POLICY)
    settings = text_settings(path)
    for name, dims in HEAD_DIMS.items():
        if LINEAR in settings and settings.get(name) not in dims:
            yield f"{POLICY}={path} ({settings.get('model_type')}, {name}={settings.get(name)})"


def _no_checkpoints(config: DictConfig) -> Iterator[str]:
    for model in models_of(config):
        if value_of(config, f"{model}.enable_activation_offload"):
            yield from settings_of(f"no {model}.enable_gradient_checkpointing", config)


def _ulysses(config: DictConfig) -> Iterator[str]:
    if fine_tunes(config):
        yield from settings_of("engine.ulysses_sequence_parallel_size!=1", config)
    elif team_size(config) > 1:
        yield f"{team_keys(config)[0]}={team_size(config)}"


def _other_attention(config: DictConfig) -> Iterator[str]:
    key = f"{models_of(config)[0]}.override_config.attn_implementation"
    if value_of(config, key):
        yield from settings_of(f"{key}!={VERLS_ATTENTION}", config)


def _other_losses(config: DictConfig) -> Iterator[str]:
    yield from settings_of(f"{ACTOR}.policy_loss.loss_mode!={','.join(clashes.POLICY_LOSSES_OVER_ROWS)}", config)
    if value_of(config, "distillation.enabled"):
        yield from settings_of(f"{DISTILLATION}!={','.join(clashes.DISTILLATION_LOSSES_OVER_ROWS)}", config)


def _top_k(config: DictConfig) -> Iterator[str]:
    if value_of(config, "distillation.enabled"):
        # It imports `datasets`, which takes half a second.
        from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY

        names = [name for name, each in DISTILLATION_SETTINGS_REGISTRY.items() if not each.use_estimator]
        yield from settings_of(f"{DISTILLATION}={','.join(names)}", config)


def _teacher_here(config: DictConfig) -> Iterator[str]:
    if uses_teacher_here(config):
        yield "distillation.nnodes=0"


def _corrections(config: DictConfig, *names: str) -> Iterator[str]:
    keys = [f"{CORRECTION}.{name}" for name in corrections(config) if name in names]
    return (f"{key}={value_of(config, key)}" for key in keys)


def _backend_for_cuda(config: DictConfig) -> Iterator[str]:
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    return settings_of("tree.backend=fa4" if interprets else "tree.backend=fa4,triton", config)


def _trees_or_cpu(config: DictConfig) -> Iterator[str]:
    return chain.from_iterable(settings_of(name, config) for name in (clashes.TREES, clashes.CPU))


_images = _of_types(lambda model: model.get("model_type") in IMAGE_TYPES)

WORDS: dict[str, Feature] = {
    clashes.SFT: lambda config: iter([clashes.SFT] if fine_tunes(config) else []),
    clashes.IMAGES: _images,
    clashes.RECURRENT: _of_types(has_recurrent_layers, models=ALL),
    clashes.LINEAR: _of_types(lambda model: LINEAR in model | model.get("text_config", {})),
    clashes.OTHER_HEADS: _other_heads,
    clashes.CRITIC: lambda config: iter([f"critic.enable={config.critic.enable}"] if uses_critic(config) else []),
    clashes.NO_CLASSIFIER: _of_types(lambda model: not has_token_classifier(model), models=CRITICS),
    clashes.TRANSFORMERS: _trees_or_cpu,
    clashes.UNTRIED: _of_types(lambda model: bool(model) and model.get("model_type") not in VEOMNI_TYPES, models=ALL),
    clashes.NO_VEOMNI_CRITIC: _of_types(
        lambda model: bool(model) and model.get("model_type") not in VEOMNI_CRITICS, models=CRITICS
    ),
    clashes.ONE_RANK: _one_rank,
    clashes.NO_CHECKPOINTS: _no_checkpoints,
    clashes.ULYSSES: _ulysses,
    clashes.OTHER_ATTENTION: _other_attention,
    clashes.CUDA_KERNELS: _backend_for_cuda,
    clashes.OTHER_LOSS: _other_losses,
    clashes.TOP_K: _top_k,
    clashes.TEACHER_HERE: _teacher_here,
    clashes.CORRECTION: lambda config: _corrections(config, "rollout_is", "rollout_rs", "bypass_mode"),
    clashes.REWEIGHED: lambda config: _corrections(config, "rollout_is", "rollout_rs"),
}
"""Features that are more than the value of a key."""


def check_clashes(config: DictConfig) -> Findings:
    """Find features that do not go together."""

    @cache
    def uses(name: str) -> tuple[str, ...]:
        return tuple(settings_of(name, config))

    yield from map(Finding, clashes.refusals(uses))


CHECKS: tuple[Check, ...] = (check_clashes,)
