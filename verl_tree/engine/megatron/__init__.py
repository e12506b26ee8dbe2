"""verl's Megatron engines in its registry: trees under the strategy `megatron_tree`, and its own on a CPU.

Importing it needs Megatron.
"""

from verl_tree.configs import MODEL_ENGINES
from verl_tree.engine.megatron.engine import MegatronTreeEngine
from verl_tree.engine.megatron.flat import CPUEngineWithLMHead, CPUEngineWithValueHead
from verl_tree.engine.of_verl import register_engines

register_engines(
    MODEL_ENGINES["megatron"], tree=MegatronTreeEngine, policy=CPUEngineWithLMHead, critic=CPUEngineWithValueHead
)
