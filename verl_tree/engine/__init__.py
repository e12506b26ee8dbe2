"""Engines in verl's registry: trees under the strategy `fsdp_tree`, and verl's own FSDP engines on a CPU."""

from verl.workers.engine.base import EngineRegistry

from verl_tree.config import TREE_STRATEGY
from verl_tree.engine.fsdp_flat import CPUEngineWithLMHead, CPUEngineWithValueHead
from verl_tree.engine.fsdp_tree import FSDPTreeEngineWithLMHead
from verl_tree.engine.fsdp_tree_critic import FSDPTreeEngineWithValueHead

__all__ = [
    "CPUEngineWithLMHead",
    "CPUEngineWithValueHead",
    "FSDPTreeEngineWithLMHead",
    "FSDPTreeEngineWithValueHead",
]

for model_type, tree_engine, cpu_engine in (
    ("language_model", FSDPTreeEngineWithLMHead, CPUEngineWithLMHead),
    ("value_model", FSDPTreeEngineWithValueHead, CPUEngineWithValueHead),
):
    EngineRegistry.register(model_type, backend=TREE_STRATEGY, device=["cuda", "cpu"])(tree_engine)
    # verl registers its own for cuda and npu only.
    EngineRegistry.register(model_type, backend=["fsdp", "fsdp2"], device="cpu")(cpu_engine)
