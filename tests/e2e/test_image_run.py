"""A whole training run of a tiny Qwen3-VL on prompts with images: three steps on trees, and on verl's own engine."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from replayed_runs import run_both, worst_difference

IMAGES_FOLDER = Path(sys.prefix) / "images"
"""Where scripts/setup.sh puts torchvision, which no other test is to import (requirements/images.lock)."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (IMAGES_FOLDER / "torchvision").is_dir(),
        reason=f"{IMAGES_FOLDER} has no torchvision: run scripts/setup.sh with Python 3.11",
    ),
]

NUM_STEPS = 3
TOLERANCE = 1e-4
"""Relative, of metrics; AdamW divides by gradients that are almost zero."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Write the inputs, and let the processes of the runs find torchvision."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(IMAGES_FOLDER), prepend=os.pathsep)
        program = Path(__file__).parents[1] / "support" / "tiny_vision.py"
        subprocess.run([sys.executable, str(program), str(folder)], check=True)
        yield folder


def test_steps_equal_those_of_verls_engine(folder: Path, record_property: Callable[[str, object], None]) -> None:
    """A group's sessions share the prompt with its image; other groups have other images behind the same token ids."""
    options = (
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.agent.default_agent_loop=looking",
        # Else the engine tries a video when it starts.
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image:1,video:0}",
    )
    tree, flat = run_both(folder, *options, num_steps=NUM_STEPS)
    worst = worst_difference(tree, flat)
    assert max(worst.values()) <= TOLERANCE, worst
    for metrics in tree.values():
        assert metrics["tree/por"] > 0.4
        assert metrics["tree/sections"] > 0, "a larger tree than the capacity is relayed"
        assert metrics["tree/failed_sessions"] == 0
        # The engine's tower sees the same images, with the weights that were trained last; other images are 0.2 off.
        # The loop's bias, which the trainer does not know, lifts all log-probs by 0.03.
        assert abs(metrics["rollout_corr/kl"]) < 0.05
    assert tree[NUM_STEPS]["actor/kl_loss"] > 1e-3, "the weights have moved"
    record_property("Qwen3-VL | whole run", max(worst.values()))
