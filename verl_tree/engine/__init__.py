"""Engines in verl's registry: ours where verl has found what they are built on, and its own on a CPU."""

import importlib

from verl.workers import engine as engines_of_verl

from verl_tree.configs import FSDP, MODEL_ENGINES
from verl_tree.engine.fsdp.engine import FSDPTreeEngine
from verl_tree.engine.fsdp.flat import CPUEngineWithLMHead, CPUEngineWithValueHead
from verl_tree.engine.of_verl import register_engines
from verl_tree.engine.step import TreeEngine

__all__ = ["CPUEngineWithLMHead", "CPUEngineWithValueHead", "FSDPTreeEngine", "TreeEngine"]

register_engines(MODEL_ENGINES[FSDP], tree=FSDPTreeEngine, policy=CPUEngineWithLMHead, critic=CPUEngineWithValueHead)
if engines_of_verl.VeOmniEngine is not None:
    importlib.import_module("verl_tree.engine.veomni")
if engines_of_verl.MegatronEngine is not None:
    importlib.import_module("verl_tree.engine.megatron")
