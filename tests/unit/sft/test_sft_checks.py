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


@pytest.mark.parametrize(
    ("setting", "remedy"),
    [
        ("data.pad_mode=right", "set it to no_padding"),
        ("data.truncation=left", "set it to error"),
        ("data.use_dynamic_bsz=false", "set it to true"),
        ("data.balance_dp_token=true", "set it to false"),
        ("data.num_workers=8", "set it to 0"),
        ("engine.strategy=fsdp2", "set it to fsdp_tree"),
        ("engine.qat.enable=true", "set it to false"),
        ("model.mtp.enable=true", "set it to false"),
        ("tree.shared_tokens=max", "choose one of"),
        ("data.train_batch_size=0", "give a whole number of at least 1"),
        ("data.min_shared=half", "give a whole number of at least 1"),
        ("data.max_length=long", "this is no number; give one"),
        ("data.use_dynamic_bsz=7", "this is no switch"),
        ("engine=7", "this is no group of options"),
        ("optim.lr=-1", "give a finite number of at least 0"),
        ("trainer.save_freq=often", "after_each_epoch, or -1 for never"),
        ("data.min_reward=good", "give a number, or null"),
        ("data.tree_key=3", "give the name of a column"),
        ("trainer.test_freq=5", "there are no data.val_files"),
        ("trainer.save_freq=0", "set -1 for never"),
        ("data.train_files=nothing.parquet", "no such file in "),
        ("model.path=/no/model", "no such folder: /no/model"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(setting: str, remedy: str) -> None:
    message = refusal(setting)
    assert message.startswith(setting.replace("false", "False").replace("true", "True"))
    assert remedy in message


def test_a_setting_of_trees_is_refused_without_trees() -> None:
    assert "set it to sum" in refusal("tree.enabled=false", "tree.shared_tokens=once")
    assert "set it to fsdp2" in refusal("tree.enabled=false", "engine.strategy=fsdp_tree")


def test_rows_that_may_not_fit_into_a_pass_are_refused() -> None:
    long = "data.max_length=9000"
    validate(resolved(long))
    validate(resolved(long, "tree.relay=never", "tree.capacity=9000"))
    for options in (["tree.enabled=false"], ["tree.relay=never"]):
        assert refusal(long, *options).startswith("data.max_length=9000: a pass holds 8192 tokens")
    assert "a pass holds 100 tokens" in refusal("tree.relay=never", "tree.capacity=100")
    validate(resolved(long, "tree.enabled=false", "data.max_token_len_per_gpu=9000"))


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
