"""verl's FSDP engines and ours, built in this process alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import group_of_one
from transformers import PreTrainedModel
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine import FSDPTreeEngine
from verl_tree.engine_config import TreeFSDPEngineConfig
from verl_tree.testing.local_worker import FP32


@contextmanager
def saved(model: PreTrainedModel, folder: Path) -> Iterator[Path]:
    """Save a model, and make a process group of this process alone while active."""
    if torch.cuda.is_available():
        pytest.skip("builds engines on the CPU platform")
    model.save_pretrained(folder)
    with group_of_one():
        yield folder


def build_engine(kind: Any, folder: Path, *, model: dict[str, Any] | None = None, **config: Any) -> Any:
    """Build an engine of some class; `model` are options of its model, `config` those of the engine."""
    engine = kind(
        model_config=HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            **model or {},
        ),
        engine_config=TreeFSDPEngineConfig(
            strategy=TREE_STRATEGY if kind is FSDPTreeEngine else FLAT_STRATEGY,
            mixed_precision=FP32,
            use_torch_compile=False,
            **config,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine
