"""verl's own FSDP engines on a CPU, the flat baseline where there is no GPU.

They differ from verl's in how a model is built, because two assumptions of verl 0.9.1 do not hold: a reference model is
offloaded through pinned memory, which needs CUDA, and a critic is loaded with flash_attention_2 by name, which neither
a CPU nor a tree can use. The tree engines build their models in the same two ways.
"""

from typing import cast

import torch
from typing_extensions import override
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead


class BuildOnAnyDevice(FSDPEngine):
    """An engine that does not offload a reference model on a CPU: there is nothing to offload from."""

    @override
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        if get_device_name() != "cpu" or not config.forward_only:
            return super()._build_fsdp_module(module)
        # What is forward-only is offloaded, and the config is frozen.
        object.__setattr__(config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(config, "forward_only", True)


class BuildTokenClassifier(FSDPEngine):
    """An engine whose critic is a token classifier with one label, built by verl's builder for ordinary models.

    A checkpoint without a value head gets a freshly initialised one.
    """

    @override
    def _build_module(self) -> torch.nn.Module:
        hf_config = self.model_config.hf_config
        hf_config.num_labels = 1
        hf_config.classifier_dropout = 0.0
        name = type(hf_config).__name__.removesuffix("Config")
        # The builder picks the class by its name.
        hf_config.architectures = [f"{name}ForTokenClassification"]
        self.model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = "value_model"


# What verl's registry decorates has the type of any engine; these two are FSDP engines.
class CPUEngineWithLMHead(BuildOnAnyDevice, cast(type[FSDPEngine], FSDPEngineWithLMHead)):
    """verl's policy and reference engine on a CPU."""


class CPUEngineWithValueHead(BuildTokenClassifier, cast(type[FSDPEngine], FSDPEngineWithValueHead)):
    """verl's critic engine on a CPU."""
