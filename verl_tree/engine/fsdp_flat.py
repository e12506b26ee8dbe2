"""verl's own FSDP engines on a CPU: the flat baseline where there is no GPU.

They differ from verl's only in how a model is built. verl 0.9.1 offloads a reference model through pinned memory, which
needs CUDA. It loads a critic with flash_attention_2 by name, which neither a CPU nor a tree can use. The tree engines
build their models with the same two classes.
"""

from typing import cast

import torch
from typing_extensions import override
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead


class BuildOnAnyDevice(FSDPEngine):
    """An engine that does not offload a reference model on a CPU, where it already is in host memory."""

    @override
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        config = self.engine_config
        if get_device_name() != "cpu" or not config.forward_only:
            return super()._build_fsdp_module(module)
        # verl offloads every forward-only model. The config is frozen, hence object.__setattr__.
        object.__setattr__(config, "forward_only", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(config, "forward_only", True)


class BuildTokenClassifier(FSDPEngine):
    """An engine whose critic is a token classifier with one label, built by verl's builder for ordinary models.

    If the checkpoint has no value head, a new one is initialised.
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


# verl's registry types its classes as any engine, so the casts say that these two are FSDP engines.
class CPUEngineWithLMHead(BuildOnAnyDevice, cast(type[FSDPEngine], FSDPEngineWithLMHead)):
    """verl's policy and reference engine on a CPU."""


class CPUEngineWithValueHead(BuildTokenClassifier, cast(type[FSDPEngine], FSDPEngineWithValueHead)):
    """verl's critic engine on a CPU."""
