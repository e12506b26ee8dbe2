"""A whole training run of a tiny Qwen3-MoE: three steps on trees, and the same on verl's own engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from replayed_runs import run_both, worst_difference
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NUM_STEPS = 3
TOLERANCE = 1e-4
"""Relative, of metrics; AdamW divides by gradients that are almost zero."""


def make_mixture(folder: Path) -> None:
    """Put a Qwen3-MoE in the place of the tiny Qwen3, with its vocabulary and its heads."""
    dense = AutoConfig.from_pretrained(folder / "model").to_dict()
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    )
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        **{name: dense[name] for name in shared},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        max_position_embeddings=256,
        eos_token_id=0,
        pad_token_id=1,
        bos_token_id=None,
    )
    (folder / "model" / "model.safetensors").unlink()
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")


def test_steps_equal_those_of_verls_engine(folder: Path, record_property: Callable[[str, object], None]) -> None:
    """With router replay, which changes nothing where a step has one update, for the weights are the same.

    So routes that were recorded for other tokens, or got lost on their way through the rows, would be seen.
    """
    make_mixture(folder)
    routes = "actor_rollout_ref.actor.fsdp_config.router_replay.mode=R2"
    tree, flat = run_both(folder, num_steps=NUM_STEPS, of_trees=(routes,))
    worst = worst_difference(tree, flat)
    assert max(worst.values()) <= TOLERANCE, worst
    for metrics in tree.values():
        assert metrics["tree/route_conflicts"] == 0
        assert metrics["tree/por"] > 0.4
        # The engine samples from the weights that were trained: experts arrive there, too.
        assert abs(metrics["rollout_corr/kl"]) < 0.02
    assert tree[NUM_STEPS]["actor/kl_loss"] > 1e-3, "the weights have moved"
    record_property("Qwen3-MoE | whole run", max(worst.values()))
