"""A whole training run of a tiny Qwen3-Next, sampled in bfloat16: three steps on trees, and on verl's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hybrid_cases import draw_what_starts_constant
from replayed_runs import run_both, worst_difference
from transformers import AutoConfig, Qwen3NextConfig, Qwen3NextForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STEPS = 3
TOLERANCE = 1e-4
"""Relative, of metrics; AdamW divides by gradients that are almost zero."""


def make_hybrid(folder: Path) -> None:
    """Put a Qwen3-Next in the place of the tiny Qwen3, in the sizes that vLLM's CPU kernels take."""
    dense = AutoConfig.from_pretrained(folder / "model").to_dict()
    shared = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    torch.manual_seed(3)
    config = Qwen3NextConfig(
        **{name: dense[name] for name in shared},
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
        max_position_embeddings=256,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    model = Qwen3NextForCausalLM(config)
    draw_what_starts_constant(model)
    (folder / "model" / "model.safetensors").unlink()
    model.save_pretrained(folder / "model")


def test_steps_equal_those_of_verls_engine(folder: Path, record_property: Callable[[str, object], None]) -> None:
    """The engine samples with a recurrent state in bfloat16, and gets float32 weights after each step."""
    make_hybrid(folder)
    options = ("actor_rollout_ref.rollout.dtype=bfloat16", "tree.relay=never")
    tree, flat = run_both(folder, *options, num_steps=NUM_STEPS)
    worst = worst_difference(tree, flat)
    assert max(worst.values()) <= TOLERANCE, worst
    for metrics in tree.values():
        assert metrics["tree/por"] > 0.4
        assert metrics["tree/leaves_per_session"] == 4.0
        # Samples are those of the trained weights, but for bfloat16.
        assert abs(metrics["rollout_corr/kl"]) < 0.02
    assert tree[NUM_STEPS]["actor/kl_loss"] > 1e-3, "the weights have moved"
    record_property("Qwen3-Next | whole run", max(worst.values()))
