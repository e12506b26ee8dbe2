"""What verl's FSDP engines need to build their models on this project's devices.

Two assumptions of verl 0.9.1 do not hold on a CPU, and one not under a tree: a reference model is offloaded through
pinned memory (`_build_fsdp_module`), and a critic is loaded with flash_attention_2 by name (`load_valuehead_model`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine


@contextmanager
def on_this_device(engine: FSDPEngine) -> Iterator[None]:
    """Inside, a forward-only engine on a CPU is sharded without CPU offload: there is nothing to offload from."""
    config = engine.engine_config
    if get_device_name() != "cpu" or not config.forward_only:
        yield
        return
    object.__setattr__(config, "forward_only", False)
    try:
        yield
    finally:
        object.__setattr__(config, "forward_only", True)


def build_token_classifier(engine: FSDPEngine, build: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    """Builds a critic as a token-classification model with one label, by verl's builder for ordinary models.

    Args:
        engine: the engine that builds; its `hf_config` gets the one label.
        build: verl's `_build_module`, which picks the class by `hf_config.architectures`.

    Returns:
        The model; a checkpoint without a value head gets a freshly initialised one.
    """
    hf_config = engine.model_config.hf_config
    hf_config.num_labels = 1
    hf_config.classifier_dropout = 0.0
    name = type(hf_config).__name__.removesuffix("Config")
    hf_config.architectures = [f"{name}ForTokenClassification"]
    engine.model_config.model_type = "language_model"
    try:
        return build()
    finally:
        engine.model_config.model_type = "value_model"
