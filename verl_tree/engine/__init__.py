"""Engines in verl's registry: ours where verl has found what they are built on, and its own on a CPU."""

import importlib

from verl.workers import engine as engines_of_verl
from verl.workers.engine.base import EngineRegistry

from verl_tree.config import TREE_STRATEGY
from verl_tree.engine.fsdp.engine import FSDPTreeEngine
from verl_tree.engine.fsdp.flat import CPUEngineWithLMHead, CPUEngineWithValueHead
from verl_tree.engine.heads import HEADS
from verl_tree.engine.step import TreeEngine

__all__ = ["CPUEngineWithLMHead", "CPUEngineWithValueHead", "FSDPTreeEngine", "TreeEngine"]

for model_type in HEADS:
    EngineRegistry.register(model_type, backend=TREE_STRATEGY, device=["cuda", "cpu"])(FSDPTreeEngine)
# verl registers its own for cuda and npu only.
EngineRegistry.register("language_model", backend=["fsdp", "fsdp2"], device="cpu")(CPUEngineWithLMHead)
EngineRegistry.register("value_model", backend=["fsdp", "fsdp2"], device="cpu")(CPUEngineWithValueHead)
if engines_of_verl.VeOmniEngine is not None:
    importlib.import_module("verl_tree.engine.veomni")
if engines_of_verl.MegatronEngine is not None:
    importlib.import_module("verl_tree.engine.megatron")
