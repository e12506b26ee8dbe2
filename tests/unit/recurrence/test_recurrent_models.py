"""Hybrids on trees in float64, against the recurrence token by token on flat sequences."""

import numpy as np
import pytest
import torch
from float64_mode import Float64
from hybrid_cases import flat_scores, gradients_of_packs, loss_of
from peft import LoraConfig, get_peft_model
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
from tree_cases import DEEP, gradients, layout_of, relative_error

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import check_model, tree_attention_implementation
from verl_tree.attention.sharding import SequenceShard
from verl_tree.functional import tree_log_probs
from verl_tree.recurrence.bind import RecurrentLayers, num_bound_mixers


def assert_equals_flat(model, sequences, **options):
    with Float64():
        want = flat_scores(model, sequences)
        want_gradients = gradients(model, loss_of(*want))
        scores = tree_log_probs(model, sequences, calculate_entropy=True, **options)
        got = (scores.log_probs, scores.entropy)
        got_gradients = gradients(model, loss_of(*got))
    for got_all, want_all in zip(got, want, strict=True):
        for got_one, want_one in zip(got_all, want_all, strict=True):
            torch.testing.assert_close(got_one, want_one, rtol=1e-10, atol=1e-10)
    assert got_gradients.keys() == want_gradients.keys()
    for name, want_one in want_gradients.items():
        assert relative_error(got_gradients[name], want_one) < 1e-9, name
    recurrent = [value for name, value in want_gradients.items() if "linear_attn" in name]
    assert min(value.abs().max() for value in recurrent) > 1e-3
    return scores


def test_a_node_that_is_longer_than_a_chunk():
    prompt = (np.arange(150) * 11 % 61).tolist()
    assert_equals_flat(
        tiny_model("qwen3_5_text"), [[*prompt, 1, 2, 3], [*prompt, 4], prompt[:70], [*prompt[:70], 9, 9]]
    )


@pytest.mark.parametrize("packing", ["heuristic", "single_path"])
def test_several_packs(packing):
    assert_equals_flat(tiny_model("qwen3_next"), DEEP, capacity=11, packing=packing)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_plan_of_its_pack(use_reentrant):
    """Several packs, so that a layer that kept the last plan would recompute the first one wrongly."""
    model = tiny_model("qwen3_5_text").train()
    want = gradients_of_packs(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    got = gradients_of_packs(model)
    assert num_bound_mixers(model) == 0
    for name, want_one in want.items():
        torch.testing.assert_close(got[name], want_one, rtol=1e-12, atol=1e-12)


def test_lora():
    projections = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "up_proj"]
    lora = LoraConfig(r=3, lora_alpha=6, target_modules=projections, init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3_5_text"), lora).double()
    assert_equals_flat(model, DEEP)


def test_layers_are_restored_also_on_error():
    model = tiny_model("qwen3_next")
    mixer = model.model.layers[0].linear_attn
    before = vars(mixer).copy()
    with pytest.raises(ValueError, match="token id 99"):
        tree_log_probs(model, [[1, 99]])
    tree_log_probs(model, [[1, 2]])
    assert vars(mixer) == before
    assert not model.model.layers[0]._forward_pre_hooks
    assert not model.model._forward_hooks


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


def test_a_layer_that_does_not_run_is_named():
    model = tiny_model("qwen3_5_text")
    model.model.layers[2].linear_attn.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(RuntimeError, match=r"model.layers.2.linear_attn ran 0 times in one forward pass"):
        tree_log_probs(model, DEEP)


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
    with pytest.raises(ValueError, match="a plan of 2 context tokens without their states"):
        AttentionPlan.from_subtree_end(np.array([3, 3, 3]), num_context=2).chunks(64)
    with tree_attention_implementation(model, max_path_len=3):
        shard = SequenceShard(3)
        shard.num_ranks = 2
        plan = AttentionPlan.from_layout(layout_of([[1, 2], [1, 3]]), shard=shard)
        with pytest.raises(ValueError, match="set ulysses_sequence_parallel_size=1"):
            plan.chunks(64)
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
