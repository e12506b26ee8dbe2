"""Engines for verl's registry: `fsdp_tree`, and verl's own FSDP engines on a CPU."""

from verl_tree.engine.cpu import CPUEngineWithLMHead, CPUEngineWithValueHead
from verl_tree.engine.fsdp_tree import FSDPTreeEngineWithLMHead
from verl_tree.engine.fsdp_tree_value import FSDPTreeEngineWithValueHead

__all__ = [
    "CPUEngineWithLMHead",
    "CPUEngineWithValueHead",
    "FSDPTreeEngineWithLMHead",
    "FSDPTreeEngineWithValueHead",
]
