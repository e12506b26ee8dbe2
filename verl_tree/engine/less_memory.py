"""Two keys of verl's model config by which an update takes less memory, on trees (docs/memory.md).

verl 0.9.1 has both, but reads `tiled_mlp` nowhere in its FSDP engine, and its `enable_activation_offload` does not
serve trees. So the tree engines read them. `verl_tree.functional.tiles` and `verl_tree.functional.offload` say what is
wrong with verl's own.
"""

from typing import cast

import torch
from transformers import PreTrainedModel
from typing_extensions import override
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_tree.functional.offload import offload_checkpoints
from verl_tree.functional.tiles import tile_modules


class BuildWithLessMemory(FSDPEngine):
    """An engine that tiles MLPs and norms, and offloads checkpoints, where verl's model config says so."""

    @override
    def _build_module(self) -> torch.nn.Module:
        model = super()._build_module()
        tiled = self.model_config.tiled_mlp
        if tiled["enabled"]:
            tile_modules(cast("PreTrainedModel", model), num_tiles=tiled["num_shards"])
        if self.model_config.enable_activation_offload:
            offload_checkpoints(cast("PreTrainedModel", model))
        return model

    @override
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl would add its own offload. The config is frozen, hence object.__setattr__.
        config, offloads = self.model_config, self.model_config.enable_activation_offload
        object.__setattr__(config, "enable_activation_offload", False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(config, "enable_activation_offload", offloads)
