"""verl's VeOmni engines in its registry: trees under the strategy `veomni_tree`, and its own on a CPU.

Importing it needs VeOmni.
"""

from verl.utils.device import get_device_name
from verl.workers.engine.base import EngineRegistry

from verl_tree.configs import VEOMNI_TREE_STRATEGY
from verl_tree.cpu import veomni_experts
from verl_tree.engine.heads import HEADS
from verl_tree.engine.veomni.engine import VeOmniTreeEngine
from verl_tree.engine.veomni.flat import CPUEngineWithLMHead, CPUEngineWithValueHead

for model_type in HEADS:
    EngineRegistry.register(model_type, backend=VEOMNI_TREE_STRATEGY, device=["cuda", "cpu"])(VeOmniTreeEngine)
# verl registers its own for cuda and npu only.
EngineRegistry.register("language_model", backend=["veomni"], device="cpu")(CPUEngineWithLMHead)
EngineRegistry.register("value_model", backend=["veomni"], device="cpu")(CPUEngineWithValueHead)
if get_device_name() == "cpu":
    veomni_experts.register()
