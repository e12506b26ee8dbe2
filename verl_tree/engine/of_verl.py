"""How an engine of ours is made of one of verl's: the same four configs, and its engine config says what trees need."""

from typing import Any

from verl.workers.engine.base import BaseEngine, EngineRegistry

from verl_tree.configs import ModelEngine
from verl_tree.engine.heads import HEADS
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.step import TreeEngine
from verl_tree.engine_config import TreeEngineConfig, of_verl


class EngineOfVerl(TreeEngine):
    """A tree engine with the constructor of verl's engines.

    A subclass also derives, behind this class, from the one that builds it, a subclass of verl's engine. It serves
    policy, reference model and critic: verl's `model_type` says which of them.

    Attributes:
        config_class: The engine config that it takes.
        config_key: Where that config stands.

    Raises:
        ValueError: `engine_config` has no tree options.
    """

    config_class: type[TreeEngineConfig]
    config_key: str

    def __init__(
        self, model_config: Any, engine_config: TreeEngineConfig, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        # The constructor that comes behind those of this project in the order of the bases: that of the build.
        engine_of_verl: Any = super(ModelCalls, self)
        engine_of_verl.__init__(
            model_config=model_config,
            engine_config=of_verl(engine_config, self.config_class, key=self.config_key),
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        TreeEngine.__init__(self, head=HEADS[model_config.model_type], tree_config=engine_config.tree)


def register_engines(
    kind: ModelEngine, *, tree: type[EngineOfVerl], policy: type[BaseEngine], critic: type[BaseEngine]
) -> None:
    """Give verl's registry the tree engine of a kind, and verl's own for a CPU, where it has them for GPUs only."""
    for model_type in HEADS:
        EngineRegistry.register(model_type, backend=kind.tree, device=["cuda", "cpu"])(tree)
    EngineRegistry.register("language_model", backend=list(kind.flat), device="cpu")(policy)
    EngineRegistry.register("value_model", backend=list(kind.flat), device="cpu")(critic)
