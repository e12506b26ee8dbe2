"""Models and rows with images: what is accepted before a training run starts, and what is refused with a remedy."""

from collections.abc import Callable
from pathlib import Path

import pytest
from input_cases import refusal, resolved, write_model, write_rows
from tiny_models import TITLES
from verl.utils.config import omega_conf_to_dataclass

from rollout_hooks.loops import BUILT_IN
from verl_tree.families import IMAGE_TYPES
from verl_tree.launch.checks import validate
from verl_tree.launch.checks.images import FREEZE
from verl_tree.launch.checks.loop_entries import LOOPS_KEY

ROOT = Path(__file__).parents[3]
MODEL = "actor_rollout_ref.model.path"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
SIZE = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"


def image_model(tmp_path: Path, model_type: str = "qwen3_vl") -> str:
    """Write the config of a model with a vision tower."""
    text = {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": f"{model_type}_text"}
    return f"{MODEL}={write_model(tmp_path / model_type, model_type=model_type, vision_config={}, text_config=text)}"


@pytest.mark.parametrize("model_type", IMAGE_TYPES)
def test_models_and_rows_with_images_are_accepted(model_type: str, tmp_path: Path) -> None:
    images = write_rows(tmp_path / "images.parquet", "images")
    model = image_model(tmp_path, model_type)
    validate(resolved(model))
    validate(resolved(model, f"data.train_files={images}", f"data.val_files={images}"))


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_vl_moe", "gemma3"])
def test_other_families_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    message = refusal(image_model(tmp_path, model_type))
    assert "(vision_config); give a text model, or a policy of the type qwen2_5_vl or qwen3_vl" in message


@pytest.mark.parametrize("column", ["videos", "audios"])
def test_videos_and_sounds_are_refused(column: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", column)
    message = refusal(image_model(tmp_path), f"data.train_files={rows}")
    assert message.startswith(f"data.{column[:-1]}_key={column}: {rows}")


def test_a_frozen_tower_reaches_the_engine() -> None:
    config = resolved(f"{FREEZE}=true")
    validate(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config).freeze_vision_tower
    assert not omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config).freeze_vision_tower


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("tree.enabled=false", "verl's own FSDP engine ignores it; set tree.enabled=true or false here"),
        ("actor_rollout_ref.model.lora_rank=8", "keep adapters out of it by actor_rollout_ref.model.exclude_modules"),
    ],
)
def test_a_tower_that_would_not_be_frozen_is_refused(override: str, remedy: str) -> None:
    message = refusal(f"{FREEZE}=true", override)
    assert message.startswith(f"{FREEZE}=True")
    assert remedy in message


def test_images_of_a_text_model_are_refused(tmp_path: Path) -> None:
    images = write_rows(tmp_path / "images.parquet", "images")
    assert refusal(f"data.train_files={images}").startswith(f"data.image_key=images: {images}")


@pytest.mark.parametrize(
    ("override", "remedy", "column"),
    [
        (f"{SIZE}=2", "one rank computes a model with images alone; set 1", "Ulysses"),
        ("tree.sharing=prompt", "the driver does not know which images are in prompts; set it to full", None),
        ("tree.capacity=auto", "the memory is measured without images; give a number", None),
        ("actor_rollout_ref.model.tiled_mlp.enabled=true", "set it to false", None),
        ("actor_rollout_ref.model.enable_activation_offload=true", "set it to false", None),
        ("critic.enable=true", "there is no critic that reads images", "critic"),
    ],
)
def test_what_images_do_not_go_with_is_refused(
    override: str, remedy: str, column: str | None, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    others = ["trainer.n_gpus_per_node=2"] if override.startswith(SIZE) else []
    others += ["tree.memory_gib=4"] if "capacity" in override else []
    # The refusals of a column, which docs/models.md shows, are those of every type.
    for model_type in IMAGE_TYPES if column else IMAGE_TYPES[-1:]:
        message = refusal(image_model(tmp_path, model_type), override, *others)
        assert message.lower().startswith(override.lower())
        assert remedy in message
        if column:
            record_property(f"{TITLES[model_type]} | {column}", "refused")


def test_critics_with_a_vision_tower_are_refused(tmp_path: Path) -> None:
    folder = image_model(tmp_path).partition("=")[2]
    assert "multimodal model" in refusal("critic.enable=true", f"critic.model.path={folder}")


@pytest.mark.parametrize("loop", ["tool_agent", *BUILT_IN])
def test_every_loop_takes_rows_with_images(loop: str, tmp_path: Path) -> None:
    images = write_rows(tmp_path / "images.parquet", "images")
    rows = [f"data.train_files={images}", f"data.val_files={images}"]
    # This one is nothing without an agent, which an entry of a file names.
    agent = [f"{LOOPS_KEY}={ROOT}/recipes/blackbox_openai_agent/loops.yaml"] if loop == "blackbox" else []
    named = "openai_agent" if agent else loop
    validate(resolved(image_model(tmp_path), *rows, *agent, f"{LOOP}={named}"))
