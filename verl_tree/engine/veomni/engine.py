"""verl's VeOmni engine on trees: FSDP2 with experts over ranks, and VeOmni's own classes of models.

Building and sharding the model, offload, optimiser, checkpoints and weight export are verl's and VeOmni's. What the
ranks of a team exchange is exchanged in tree attention, not by VeOmni's own Ulysses (docs/ulysses.md).
"""

from typing import Any

from transformers import PreTrainedModel
from typing_extensions import override

from verl_tree.engine.fsdp.engine import FSDP2Calls
from verl_tree.engine.heads import HEADS
from verl_tree.engine.step import TreeEngine
from verl_tree.engine.veomni.build import BuildForTrees
from verl_tree.engine_config import TreeVeOmniEngineConfig, of_verl


class VeOmniTreeEngine(FSDP2Calls, BuildForTrees):
    """The engine of policy, reference model and critic; which of them it is says verl's `model_type`.

    Raises:
        ValueError: `engine_config` has no tree options.
    """

    def __init__(
        self, model_config: Any, engine_config: TreeVeOmniEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        BuildForTrees.__init__(
            self,
            model_config=model_config,
            engine_config=of_verl(engine_config, TreeVeOmniEngineConfig, key="veomni"),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        TreeEngine.__init__(self, head=HEADS[model_config.model_type], tree_config=engine_config.tree)
        # verl's switch for VeOmni's own replay, which knows flat rows; `RouterReplay` knows trees.
        self.enable_routing_replay = False

    @override
    def _maybe_apply_async_activation_offload(self, module: PreTrainedModel) -> None:
        self.watch_routers(module)
        super()._maybe_apply_async_activation_offload(module)
