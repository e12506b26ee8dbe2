"""A critic with LoRA: its new value head is trained, whole, comes back from a checkpoint and into a merged model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_verl import full
from tiny_models import tiny_model

pytest.importorskip("verl")

from built_engines import build_engine, saved
from transformers.modeling_utils import load_state_dict
from verl.model_merger.base_model_merger import ModelMergerConfig
from verl.model_merger.fsdp_model_merger import FSDPModelMerger

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.engine import CPUEngineWithValueHead, FSDPTreeEngine

NAMED, ALL = ["q_proj", "v_proj"], "all-linear"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Save a small model without a value head, and make a process group of this process alone."""
    with saved(tiny_model(size="engine"), tmp_path_factory.mktemp("critic")) as folder:
        yield folder


def build(folder: Path, *, engine: type = FSDPTreeEngine, **model: Any) -> Any:
    """Build a critic with random adapters and head."""
    model |= {"model_type": "value_model", "lora_rank": 4, "lora_alpha": 8}
    return build_engine(engine, folder, model=model, model_dtype="fp32")


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    """Copy the whole parameters, under the names of the model and not of PEFT."""
    named = engine.module.named_parameters()
    return {name.removeprefix("base_model.model."): full(each.detach()).clone() for name, each in named}


def trained(engine: Any) -> set[str]:
    """Return the names of what is trained, without adapters."""
    named = engine.module.named_parameters()
    return {
        name.removeprefix("base_model.model.") for name, each in named if each.requires_grad and "lora_" not in name
    }


@pytest.mark.parametrize("engine", [FSDPTreeEngine, CPUEngineWithValueHead])
def test_the_value_head_is_trained_whole(folder: Path, engine: type) -> None:
    """With `all-linear` it has an adapter, too; the rest has adapters only."""
    assert trained(build(folder, engine=engine, target_modules=NAMED)) == {"score.weight", "score.bias"}
    assert trained(build(folder, engine=engine, target_modules=ALL)) == {
        "score.base_layer.weight",
        "score.base_layer.bias",
    }


@pytest.mark.parametrize("target_modules", [NAMED, ALL], ids=["named", "all-linear"])
def test_head_and_adapters_come_back_and_are_merged(folder: Path, tmp_path: Path, target_modules: Any) -> None:
    """By verl's own checkpoints and merger, which writes bfloat16 and adapters beside the model."""
    engine = build(folder, target_modules=target_modules)
    with torch.no_grad():
        for each in engine.module.parameters():
            each.to_local().normal_(std=0.1)
    saved = parameters(engine)
    engine.save_checkpoint(str(tmp_path / "saved"))
    resumed = build(folder, target_modules=target_modules)
    assert any(not torch.equal(each, saved[name]) for name, each in parameters(resumed).items() if "score" in name)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    for name, each in parameters(resumed).items():
        assert torch.equal(each, saved[name]), name

    merged = tmp_path / "merged"
    paths = {"local_dir": str(tmp_path / "saved"), "target_dir": str(merged)}
    merger = ModelMergerConfig(
        operation="merge", backend="fsdp", **paths, hf_model_config_path=str(tmp_path / "saved" / "huggingface")
    )
    FSDPModelMerger(merger).merge_and_save()
    whole = load_state_dict(str(merged / "model.safetensors"))
    for name in ("score.weight", "score.bias"):
        of_head = saved.get(name, saved.get(name.replace("score", "score.base_layer")))
        assert torch.equal(whole[name], of_head.to(whole[name].dtype))
    again = parameters(build(merged, target_modules=target_modules, lora_adapter_path=str(merged / "lora_adapter")))
    adapters = [name for name in saved if "lora_" in name]
    assert any("score" in name for name in adapters) == (target_modules == ALL)
    for name in adapters:
        torch.testing.assert_close(again[name], saved[name].bfloat16().float(), rtol=2**-8, atol=0.0)
