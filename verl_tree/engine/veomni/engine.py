"""verl's VeOmni engine on trees: FSDP2 with experts over ranks, and VeOmni's own classes of models.

Building and sharding the model, offload, optimiser, checkpoints and weight export are verl's and VeOmni's. What the
ranks of a team exchange is exchanged in tree attention, not by VeOmni's own Ulysses (docs/ulysses.md).
"""

from typing import Any

from transformers import PreTrainedModel
from typing_extensions import override

from verl_tree.engine.fsdp.engine import FSDP2Calls
from verl_tree.engine.veomni.build import BuildForTrees
from verl_tree.engine_config import TreeVeOmniEngineConfig


class VeOmniTreeEngine(FSDP2Calls, BuildForTrees):
    """verl's VeOmni engine on trees."""

    config_class = TreeVeOmniEngineConfig
    config_key = "veomni"

    def __init__(self, *configs: Any, **named: Any) -> None:
        super().__init__(*configs, **named)
        # verl's switch for VeOmni's own replay, which knows flat rows; `RouterReplay` knows trees.
        self.enable_routing_replay = False

    @override
    def _maybe_apply_async_activation_offload(self, module: PreTrainedModel) -> None:
        self.watch_routers(module)
        super()._maybe_apply_async_activation_offload(module)
