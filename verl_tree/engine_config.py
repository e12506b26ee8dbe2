"""The engine config that carries the `tree:` options.

verl's workers see only `actor_rollout_ref` and `critic`, so the options travel there in a `TreeFSDPEngineConfig`.
"""

from dataclasses import dataclass, field

from verl.workers.config import FSDPEngineConfig

from verl_tree.config import TreeConfig
from verl_tree.configs import FLAT_STRATEGY, TREE_STRATEGY


@dataclass
class TreeFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP engine config (`verl.workers.config.FSDPEngineConfig`, 0.9.1) with the tree options.

    `fsdp_config._target_` selects it for both values of `tree.enabled`, so it accepts the strategies of both engines.
    `tree` may be given as a mapping. The class is neither frozen nor slotted because verl's class is neither.

    Attributes:
        tree: The options of trees.
        freeze_vision_tower: verl's `actor.freeze_vision_tower`, which its own engines do not read.
    """

    tree: TreeConfig = field(default_factory=TreeConfig)
    freeze_vision_tower: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", TreeConfig.from_mapping(self.tree))
        # verl's check accepts only its own strategies. Ours runs on FSDP2, so it is checked under that name.
        strategy = self.strategy
        if strategy == TREE_STRATEGY:
            object.__setattr__(self, "strategy", FLAT_STRATEGY)
        super().__post_init__()
        object.__setattr__(self, "strategy", strategy)
