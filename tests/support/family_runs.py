"""Whole runs of model families beside the tiny Qwen3: their inputs, their options, and what each step must show."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from replayed_runs import Metrics
from tiny_models import tiny_model
from tiny_run import make_inputs
from transformers import AutoConfig

NUM_STEPS = 3
IMAGES_FOLDER = Path(sys.prefix) / "images"
"""Where scripts/setup.sh puts torchvision, which no other test is to import (requirements/images.lock)."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family's whole run.

    Attributes:
        make: Writes its inputs.
        options: Overrides of every run.
        of_trees: Overrides that verl's own engine does not get.
        largest_kl: How far samples may be from the trained weights (`rollout_corr/kl`).
        marks: What pytest has to know.
    """

    make: Callable[[Path], None]
    options: tuple[str, ...] = ()
    of_trees: tuple[str, ...] = ()
    largest_kl: float = 0.02
    marks: tuple[pytest.MarkDecorator, ...] = ()


def make_text(folder: Path, *, family: str) -> None:
    """Put a family's model in the place of the tiny Qwen3, with its vocabulary."""
    make_inputs(folder)
    vocab_size = AutoConfig.from_pretrained(folder / "model").vocab_size
    (folder / "model" / "model.safetensors").unlink()
    tiny_model(family, size="vllm", seed=3, vocab_size=vocab_size).save_pretrained(folder / "model")


def make_vision(folder: Path) -> None:
    """Write a Qwen3-VL with its processor, and prompts with images."""
    program = Path(__file__).with_name("tiny_vision.py")
    subprocess.run([sys.executable, str(program), str(folder)], check=True)


FAMILIES = {
    # Router replay changes nothing where a step has one update, for the weights are the same. So routes that were
    # recorded for other tokens, or got lost on their way through the rows, would be seen.
    "Qwen3-MoE": Family(
        partial(make_text, family="qwen3 moe"), of_trees=("actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2",)
    ),
    # The engine samples with a recurrent state in bfloat16, and gets float32 weights after each step.
    "Qwen3-Next": Family(
        partial(make_text, family="qwen3_next"), ("actor_rollout_ref.rollout.dtype=bfloat16", "tree.relay=never")
    ),
    # A group's sessions share the prompt with its image; other groups have other images behind the same token ids.
    "Qwen3-VL": Family(
        make_vision,
        (
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.rollout.agent.default_agent_loop=looking",
            # Else the engine tries a video when it starts.
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image:1,video:0}",
        ),
        # The engine's tower sees the same images, with the weights that were trained last; other images are 0.2 off.
        # The loop's bias, which the trainer does not know, lifts all log-probs by 0.03.
        largest_kl=0.05,
        marks=(
            pytest.mark.skipif(
                not (IMAGES_FOLDER / "torchvision").is_dir(),
                reason=f"{IMAGES_FOLDER} has no torchvision: run scripts/setup.sh with Python 3.11",
            ),
        ),
    ),
}


every_family = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=each.marks) for name, each in FAMILIES.items()]
)
"""The parametrisation of a test over the families."""


@contextmanager
def inputs(name: str, folder: Path) -> Iterator[Family]:
    """Write a family's inputs; in the context its processes find what they need."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "Qwen3-VL":
            patch.setenv("PYTHONPATH", str(IMAGES_FOLDER), prepend=os.pathsep)
        FAMILIES[name].make(folder)
        yield FAMILIES[name]


def check_steps(name: str, steps: Metrics) -> None:
    """Assert that every step trained trees of samples of the weights that it had."""
    assert sorted(steps) == list(range(1, NUM_STEPS + 1))
    for metrics in steps.values():
        assert metrics["tree/por"] > 0.4
        assert metrics["tree/failed_sessions"] == 0
        assert abs(metrics["rollout_corr/kl"]) < FAMILIES[name].largest_kl
        match name:
            case "Qwen3-MoE":
                assert metrics["tree/route_conflicts"] == 0
            case "Qwen3-Next":
                assert metrics["tree/leaves_per_session"] == 4.0
            case "Qwen3-VL":
                assert metrics["tree/sections"] > 0, "a larger tree than the capacity is relayed"
    assert steps[NUM_STEPS]["actor/kl_loss"] > 1e-3, "the weights have moved"
