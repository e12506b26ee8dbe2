"""verl's own FSDP engines, registered for a CPU: the flat baseline where there is no GPU.

verl registers them for cuda and npu only. Nothing is changed but how a reference model and a critic are built.
"""

import torch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_tree.engine.model_build import build_token_classifier, on_this_device


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithLMHead(FSDPEngineWithLMHead):
    """verl's policy and reference engine on a CPU."""

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        with on_this_device(self):
            return super()._build_fsdp_module(module)


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUEngineWithValueHead(FSDPEngineWithValueHead):
    """verl's critic engine on a CPU."""

    def _build_module(self) -> torch.nn.Module:
        return build_token_classifier(self, super()._build_module)
