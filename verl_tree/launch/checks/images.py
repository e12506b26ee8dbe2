"""Checks of models that read images: what else of a configuration does not serve them yet."""

from omegaconf import DictConfig

from verl_tree.families import IMAGE_TYPES
from verl_tree.launch.checks.refusals import (
    ACTOR,
    MODELS,
    Check,
    Findings,
    model_settings,
    refusal,
    uses_critic,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.ulysses import team_keys, team_size

_MODEL = MODELS[0]
FREEZE = f"{ACTOR}.freeze_vision_tower"


def reads_images(config: DictConfig) -> bool:
    """Whether images of the policy are served. A model that is not on this machine is not looked into."""
    return model_settings(value_of(config, f"{_MODEL}.path")).get("model_type") in IMAGE_TYPES


def check_image_model(config: DictConfig) -> Findings:
    """Find what trees of a model that reads images do not go with."""
    if not reads_images(config) or not uses_tree(config):
        return
    if team_size(config) > 1:
        yield refusal(config, team_keys(config)[0], "one rank computes a model with images alone; set 1")
    if config.tree.capacity == "auto":
        remedy = "the memory is measured without images; give a number of tokens, image tokens among them"
        yield refusal(config, "tree.capacity", remedy)
    if config.tree.sharing == "prompt":
        yield refusal(config, "tree.sharing", "the driver does not know which images are in prompts; set it to full")
    for name in ("tiled_mlp.enabled", "enable_activation_offload"):
        if value_of(config, f"{_MODEL}.{name}"):
            yield refusal(config, f"{_MODEL}.{name}", "it is not tested with vision towers; set it to false")
    if uses_critic(config):
        remedy = "there is no critic that reads images; set it to false, and an estimator other than gae"
        yield refusal(config, "critic.enable", remedy)


def check_frozen_tower(config: DictConfig) -> Findings:
    """Find a vision tower that is to be frozen and would not be."""
    if not value_of(config, FREEZE):
        return
    if not uses_tree(config):
        yield refusal(config, FREEZE, "verl's own FSDP engine ignores it; set tree.enabled=true or false here")
    elif value_of(config, f"{_MODEL}.lora_rank"):
        remedy = f"LoRA freezes the tower itself; keep adapters out of it by {_MODEL}.exclude_modules, and set false"
        yield refusal(config, FREEZE, remedy)


CHECKS: tuple[Check, ...] = (check_image_model, check_frozen_tower)
