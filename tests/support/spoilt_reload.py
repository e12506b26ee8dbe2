"""A weight update of the vLLM CPU engine that goes wrong from the second one on, without an error."""

from typing import Any

import torch
from typing_extensions import override

from verl_tree.cpu.vllm_reload import CpuWeightReloadExtension

SPOILT = "model.norm.weight"
"""Logits are proportional to it."""


class SpoiltReloadExtension(CpuWeightReloadExtension):
    """The extension of the profile `cpu`, with a fault."""

    num_updates = 0

    @override
    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self.num_updates += 1
        super().update_weights_from_ipc(*args, **kwargs)

    @override
    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> None:
        factors = {SPOILT: 50.0 if self.num_updates > 1 else 1.0}
        received = [(name, tensor * factors.get(name, 1.0)) for name, tensor in weights]
        super()._update_weights(received, *args, **kwargs)
