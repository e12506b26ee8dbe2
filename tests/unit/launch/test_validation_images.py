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
from verl_tree.launch.checks.loop_entries import LOOPS_KEY

ROOT = Path(__file__).parents[3]
MODEL = "actor_rollout_ref.model.path"
FREEZE = "actor_rollout_ref.actor.freeze_vision_tower"
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


def test_a_frozen_tower_reaches_the_engine() -> None:
    config = resolved(f"{FREEZE}=true")
    validate(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor.fsdp_config).freeze_vision_tower
    assert not omega_conf_to_dataclass(config.actor_rollout_ref.ref.fsdp_config).freeze_vision_tower


@pytest.mark.parametrize(("column", "override"), [("Ulysses", f"{SIZE}=2"), ("critic", "critic.enable=true")])
def test_what_the_page_of_models_says_is_refused_is_so_of_every_type(
    column: str, override: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for model_type in IMAGE_TYPES:
        message = refusal(image_model(tmp_path, model_type), override, "trainer.n_gpus_per_node=2")
        assert message.lower().startswith(override.lower())
        record_property(f"{TITLES[model_type]} | {column}", "refused")


@pytest.mark.parametrize("loop", ["tool_agent", *BUILT_IN])
def test_every_loop_takes_rows_with_images(loop: str, tmp_path: Path) -> None:
    images = write_rows(tmp_path / "images.parquet", "images")
    rows = [f"data.train_files={images}", f"data.val_files={images}"]
    # This one is nothing without an agent, which an entry of a file names.
    agent = [f"{LOOPS_KEY}={ROOT}/recipes/blackbox_openai_agent/loops.yaml"] if loop == "blackbox" else []
    named = "openai_agent" if agent else loop
    validate(resolved(image_model(tmp_path), *rows, *agent, f"{LOOP}={named}"))
