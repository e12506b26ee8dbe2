"""verl's Megatron engines in its registry: trees under the strategy `megatron_tree`, and its own on a CPU.

Importing it needs Megatron.
"""

from verl.workers.engine.base import EngineRegistry

from verl_tree.configs import MEGATRON_TREE_STRATEGY
from verl_tree.engine.heads import HEADS
from verl_tree.engine.megatron.engine import MegatronTreeEngine
from verl_tree.engine.megatron.flat import CPUEngineWithLMHead, CPUEngineWithValueHead

for model_type in HEADS:
    EngineRegistry.register(model_type, backend=MEGATRON_TREE_STRATEGY, device=["cuda", "cpu"])(MegatronTreeEngine)
# verl registers its own for cuda and npu only.
EngineRegistry.register("language_model", backend=["megatron"], device="cpu")(CPUEngineWithLMHead)
EngineRegistry.register("value_model", backend=["megatron"], device="cpu")(CPUEngineWithValueHead)
