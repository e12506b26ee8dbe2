"""What a command for fine-tuning is refused for, before anything starts."""

from pathlib import Path

import pytest
from input_cases import resolved_sft as resolved
from input_cases import write_model, write_rows

from verl_tree.records import StoredLeaf, StoredTree, write_trees
from verl_tree.sft.checks import validate


def refusal(*overrides: str) -> str:
    """Return why the configuration with these values is refused."""
    with pytest.raises(ValueError, match="=") as error:
        validate(resolved(*overrides))
    return str(error.value)


def test_a_processor_needs_no_other_setting() -> None:
    config = resolved()
    validate(config)
    validate(resolved("tree.enabled=false"))
    assert config.engine.strategy == "fsdp_tree"
    assert config.engine.mixed_precision.param_dtype == "fp32"
    assert config.model.override_config.attn_implementation == "sdpa"
    assert (config.engine.use_torch_compile, config.model.use_remove_padding) == (False, False)
    flat = resolved("trainer.device=cuda", "tree.enabled=false")
    assert flat.engine.strategy == "fsdp2"
    assert flat.engine.mixed_precision.param_dtype == "bf16"
    assert (flat.engine.use_torch_compile, flat.model.use_remove_padding) == (True, True)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refusal("trainer.device=cuda").startswith("trainer.device=cuda: torch sees no CUDA device")


def test_images_are_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "images.parquet", "messages", "images")
    assert "has the column images" in refusal(f"data.train_files={rows}")
    # The image column of stored trees says where images are; those leaves are refused one by one.
    leaf = StoredLeaf(0, 0, [1, 2], 1, is_trained=[0, 1], log_probs=[float("nan")] * 2)
    write_trees(tmp_path / "trees.parquet", [StoredTree(step=0, uid="a", leaves=(leaf,))])
    validate(resolved(f"data.train_files={tmp_path / 'trees.parquet'}"))
    assert "vision_config" in refusal(f"model.path={write_model(tmp_path / 'model', vision_config={})}")
