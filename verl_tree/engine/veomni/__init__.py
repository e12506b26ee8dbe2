"""verl's VeOmni engines in its registry: trees under the strategy `veomni_tree`, and its own on a CPU.

Importing it needs VeOmni.
"""

from verl.utils.device import get_device_name

from verl_tree.configs import MODEL_ENGINES
from verl_tree.cpu import veomni_kernels
from verl_tree.engine.of_verl import register_engines
from verl_tree.engine.veomni.engine import VeOmniTreeEngine
from verl_tree.engine.veomni.flat import CPUEngineWithLMHead, CPUEngineWithValueHead

register_engines(
    MODEL_ENGINES["veomni"], tree=VeOmniTreeEngine, policy=CPUEngineWithLMHead, critic=CPUEngineWithValueHead
)
if get_device_name() == "cpu":
    veomni_kernels.register()
