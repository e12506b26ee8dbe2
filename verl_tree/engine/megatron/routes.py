"""The routers of Megatron's layers, for router replay (`verl_tree.engine.routes.router_replay`).

Legend: L tokens of a call on this rank, N layers of the model, k experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn
from typing_extensions import override
from verl.utils.megatron_utils import unwrap_model

from verl_tree.engine.routes.router_replay import RouterReplay


class StageRouters(RouterReplay):
    """The routers of this rank's stages."""

    def __init__(self, stages: Sequence[nn.Module], config: Any) -> None:
        """Find them; `config` is Megatron's, and `refuse_layers` knows which cannot replay."""
        self._shares_tokens: bool = config.sequence_parallel
        parts = []
        for stage in stages:
            model: Any = unwrap_model(stage)
            layers = [layer for layer in model.decoder.layers if hasattr(layer.mlp, "router")]
            parts.append({layer.layer_number - 1: layer.mlp.router for layer in layers})
        super().__init__(
            *parts, num_layers=config.num_layers, name="the model on Megatron", top_k=config.moe_router_topk
        )

    @override
    def of_all_tokens(self, routes_LNk: Tensor) -> Tensor:
        if not self._shares_tokens:
            return routes_LNk
        return gather_from_sequence_parallel_region(routes_LNk.to(torch.int32)).to(torch.int16)
