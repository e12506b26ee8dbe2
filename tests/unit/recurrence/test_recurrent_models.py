"""Hybrids on trees: recomputation, and what is refused. `test_recurrent_families.py` compares their numbers."""

import numpy as np
import pytest
import torch
from hybrid_cases import gradients_of_packs
from tiny_models import tiny_model
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
)
from tree_cases import DEEP, layout_of

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import check_model, tree_attention_implementation
from verl_tree.functional import tree_log_probs
from verl_tree.recurrence.bind import RecurrentLayers, num_bound_mixers


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_plan_of_its_pack(use_reentrant):
    """Several packs, so that a layer that kept the last plan would recompute the first one wrongly."""
    model = tiny_model("qwen3_5_text").train()
    want = gradients_of_packs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    got = gradients_of_packs(model)
    assert num_bound_mixers(model) == 0
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def call(model, *, plan, **options):
    return model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False, tree_plan=plan, **options)


def plan_of_three():
    return AttentionPlan.from_layout(layout_of([[1, 2], [1, 3]]))


def test_a_layer_without_the_plan_is_refused():
    model = tiny_model("qwen3_5_text", layer_types=["linear_attention"] * 3)
    RecurrentLayers(model).bind()
    with pytest.raises(ValueError, match=r"model.layers.0.linear_attn got no tree_plan"):
        call(model, plan=None)
    call(model, plan=plan_of_three())
    with pytest.raises(ValueError, match=r"model.layers.1.linear_attn got no tree_plan"):
        model.model.layers[1].linear_attn(torch.zeros(1, 3, 32, dtype=torch.float64))


def test_a_layer_that_ran_on_another_pack_is_named():
    model = tiny_model("qwen3_5_text")
    other = plan_of_three()

    def swap(_layer, args, kwargs):
        return args, kwargs | {"tree_plan": other}

    model.model.layers[2].register_forward_pre_hook(swap, with_kwargs=True)
    with (
        tree_attention_implementation(model, max_path_len=3),
        pytest.raises(RuntimeError, match=r"model.layers.2.linear_attn ran 1 times .* or on another pack"),
    ):
        call(model, plan=plan_of_three())


def test_what_recurrent_layers_do_not_serve_is_refused():
    model = tiny_model("qwen3_5_text")
    with tree_attention_implementation(model, max_path_len=3):
        with pytest.raises(ValueError, match="linear_attn got a plan of 1 context tokens without their states"):
            call(model, plan=AttentionPlan.from_subtree_end(np.full(4, 4), num_context=1))
        with pytest.raises(ValueError, match="pass use_cache=False"):
            call(model, plan=plan_of_three(), past_key_values=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match=r"do not follow the tree \(model.layers.0.linear_attn is the first\)"):
        check_model(model, max_path_len=3)
    model.model.layers[0].compile()
    with pytest.raises(ValueError, match="linear_attn is in a compiled layer"):
        tree_log_probs(model, DEEP)


def test_other_recurrent_models_are_refused_by_name():
    tiny = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
    mamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    bamba = BambaForCausalLM(BambaConfig(**tiny, **mamba, num_hidden_layers=2, attn_layer_indices=[1]))
    falcon = FalconH1ForCausalLM(FalconH1Config(**tiny, **mamba, mamba_d_ssm=64, num_hidden_layers=1))
    nemotron = NemotronHForCausalLM(
        NemotronHConfig(
            **tiny,
            layers_block_type=["mamba", "attention"],
            mamba_num_heads=4,
            mamba_head_dim=16,
            ssm_state_size=8,
            n_groups=1,
        )
    )
    for model, reason in (
        (bamba, r"\(model type bamba\) has layers \(a recurrent state\).* trees serve Qwen3NextGatedDeltaNet"),
        (falcon, r"\(model type falcon_h1\) has layers .* train it flat"),
        (nemotron, r"\(model type nemotron_h\).*transformers' own forward is wrong beyond one chunk"),
    ):
        with pytest.raises(ValueError, match=reason):
            tree_log_probs(model, [[1, 2]])
