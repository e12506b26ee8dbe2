"""The engine configs that carry the `tree:` options.

verl's workers see only `actor_rollout_ref` and `critic`, so the options travel there in an engine config.
"""

from dataclasses import dataclass, field, replace
from typing import TypeVar

from verl.workers.config import EngineConfig, FSDPEngineConfig, McoreEngineConfig, VeOmniEngineConfig

from verl_tree.config import TreeConfig
from verl_tree.configs import FLAT_STRATEGIES

Config = TypeVar("Config", bound="TreeEngineConfig")


@dataclass
class TreeEngineConfig(EngineConfig):
    """What one of verl's engine configs has besides, in a class that derives from both (verl 0.9.1).

    `_target_` selects that class for both values of `tree.enabled`, so it accepts the strategies of both engines.
    `tree` may be given as a mapping. The class is neither frozen nor slotted because verl's class is neither.

    Attributes:
        tree: The options of trees.
        freeze_vision_tower: verl's `actor.freeze_vision_tower`, which its own engines do not read.
    """

    tree: TreeConfig = field(default_factory=TreeConfig)
    freeze_vision_tower: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", TreeConfig.from_mapping(self.tree))
        # verl's check accepts only its own strategies, and ours runs on one of them.
        strategy = self.strategy
        object.__setattr__(self, "strategy", FLAT_STRATEGIES.get(strategy, strategy))
        super().__post_init__()
        object.__setattr__(self, "strategy", strategy)


def of_verl(engine_config: object, wanted: type[Config], *, key: str) -> Config:
    """Return an engine config under the strategy of verl's engine on which ours is built; verl's code knows no other.

    Raises:
        ValueError: It has no tree options; `key` is where they are said.
    """
    if not isinstance(engine_config, wanted):
        raise ValueError(
            f"a tree engine got an engine config of type {type(engine_config).__name__}: set "
            f"{key}._target_={wanted.__module__}.{wanted.__name__} (the config tree_ppo does for FSDP2)"
        )
    return replace(engine_config, strategy=FLAT_STRATEGIES.get(engine_config.strategy, engine_config.strategy))


@dataclass
class TreeFSDPEngineConfig(TreeEngineConfig, FSDPEngineConfig):
    """verl's FSDP engine config with the tree options."""


@dataclass
class TreeVeOmniEngineConfig(TreeEngineConfig, VeOmniEngineConfig):
    """verl's VeOmni engine config with the tree options."""


@dataclass
class TreeMegatronEngineConfig(TreeEngineConfig, McoreEngineConfig):
    """verl's Megatron engine config with the tree options."""
