"""Whole runs of model families beside the tiny Qwen3: their inputs, their options, and what each step must show."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hybrid_cases import draw_what_starts_constant
from replayed_runs import Metrics
from tiny_run import make_inputs
from transformers import (
    AutoConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

NUM_STEPS = 3
IMAGES_FOLDER = Path(sys.prefix) / "images"
"""Where scripts/setup.sh puts torchvision, which no other test is to import (requirements/images.lock)."""

_SHARED = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_TOKENS = {"max_position_embeddings": 256, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}


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


def make_mixture(folder: Path) -> None:
    """Put a Qwen3-MoE in the place of the tiny Qwen3, with its vocabulary and its heads."""
    make_inputs(folder)
    config = Qwen3MoeConfig(
        **_taken_over(folder, *_SHARED, "num_hidden_layers"),
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        **_TOKENS,
    )
    torch.manual_seed(3)
    _replace(folder, Qwen3MoeForCausalLM(config))


def make_hybrid(folder: Path) -> None:
    """Put a Qwen3-Next in the place of the tiny Qwen3, in the sizes that vLLM's CPU kernels take."""
    make_inputs(folder)
    config = Qwen3NextConfig(
        **_taken_over(folder, *_SHARED),
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        initializer_range=0.1,
        shared_expert_intermediate_size=32,
        **_TOKENS,
    )
    torch.manual_seed(3)
    model = Qwen3NextForCausalLM(config)
    draw_what_starts_constant(model)
    _replace(folder, model)


def _taken_over(folder: Path, *names: str) -> dict[str, int]:
    """Return settings of the tiny Qwen3."""
    dense = AutoConfig.from_pretrained(folder / "model").to_dict()
    return {name: dense[name] for name in names}


def _replace(folder: Path, model: PreTrainedModel) -> None:
    (folder / "model" / "model.safetensors").unlink()
    model.save_pretrained(folder / "model")


def make_vision(folder: Path) -> None:
    """Write a Qwen3-VL with its processor, and prompts with images."""
    program = Path(__file__).with_name("tiny_vision.py")
    subprocess.run([sys.executable, str(program), str(folder)], check=True)


FAMILIES = {
    # Router replay changes nothing where a step has one update, for the weights are the same. So routes that were
    # recorded for other tokens, or got lost on their way through the rows, would be seen.
    "Qwen3-MoE": Family(make_mixture, of_trees=("actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2",)),
    # The engine samples with a recurrent state in bfloat16, and gets float32 weights after each step.
    "Qwen3-Next": Family(make_hybrid, ("actor_rollout_ref.rollout.dtype=bfloat16", "tree.relay=never")),
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
