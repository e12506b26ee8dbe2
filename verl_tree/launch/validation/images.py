"""Checks of models that read images: what else of a configuration does not serve them yet."""

from omegaconf import DictConfig

from verl_tree.launch.validation.refusals import (
    MODELS,
    Check,
    Findings,
    model_settings,
    refusal,
    uses_critic,
    uses_tree,
    value_of,
)
from verl_tree.launch.validation.ulysses import team_keys, team_size

IMAGE_MODELS = ("qwen2_5_vl", "qwen3_vl")
"""Model types whose images are served; `verl_tree.functional.images` has the same."""

_MODEL = MODELS[0]


def reads_images(config: DictConfig) -> bool:
    """Whether images of the policy are served. A model that is not on this machine is not looked into."""
    return model_settings(value_of(config, f"{_MODEL}.path")).get("model_type") in IMAGE_MODELS


def check_image_model(config: DictConfig) -> Findings:
    """Find what trees of a model that reads images do not go with."""
    if not reads_images(config) or not uses_tree(config):
        return
    if team_size(config) > 1:
        yield refusal(config, team_keys(config)[0], "one rank computes a model with images alone; set 1")
    if config.tree.capacity == "auto":
        remedy = "the memory is measured without images; give a number of tokens, image tokens among them"
        yield refusal(config, "tree.capacity", remedy)
    for name in ("tiled_mlp.enabled", "enable_activation_offload"):
        if value_of(config, f"{_MODEL}.{name}"):
            yield refusal(config, f"{_MODEL}.{name}", "it is not tested with vision towers; set it to false")
    if uses_critic(config):
        remedy = "there is no critic that reads images; set it to false, and an estimator other than gae"
        yield refusal(config, "critic.enable", remedy)


CHECKS: tuple[Check, ...] = (check_image_model,)
