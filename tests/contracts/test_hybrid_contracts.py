"""What trees rely on in the forwards that verl 0.9.1 puts in place of those of Qwen3.5, and in transformers' mixers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from float64_mode import Float64
from tiny_models import DELTA_RULE, tiny_model
from transformers import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from tree_cases import DEEP, flat_scores, layout_of
from verl.models.transformers import qwen3_5 as verls

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import tree_attention_implementation
from verl_tree.families import MIXERS, RECURRENT_TYPES
from verl_tree.functional import tree_log_probs


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a model with a vision tower that runs verl's forwards, as `apply_monkey_patch` sets them."""
    for owner, forward in (
        (qwen3_5.Qwen3_5Model, verls.qwen3_5_base_forward),
        (qwen3_5.Qwen3_5DecoderLayer, verls.qwen3_5_decoder_layer_forward),
        (qwen3_5.Qwen3_5GatedDeltaNet, verls.qwen3_5_gated_delta_net_forward),
        (Qwen3_5ForConditionalGeneration, verls.forward_with_normal_backend),
    ):
        monkeypatch.setattr(owner, "forward", forward)
    return tiny_model("qwen3_5", size="engine")


def called(module: torch.nn.Module, function: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return the keywords of every call of a module."""
    calls: list[dict[str, Any]] = []
    handle = module.register_forward_pre_hook(lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True)
    function()
    handle.remove()
    return calls


def run(model: Any, **options: Any) -> Any:
    layout = layout_of(DEEP)
    with tree_attention_implementation(model, max_path_len=9):
        return model(
            input_ids=layout.token_ids_T[None],
            position_ids=layout.position_T[None],
            use_cache=False,
            tree_plan=AttentionPlan.from_layout(layout),
            **options,
        )


def test_verls_decoder_layer_gets_the_plan_and_keeps_it_from_the_mixer(model: Any) -> None:
    layer = model.model.language_model.layers[0]
    (of_layer,) = called(layer, lambda: run(model))
    assert isinstance(of_layer["tree_plan"], AttentionPlan)
    (of_mixer,) = called(layer.linear_attn, lambda: run(model))
    assert "tree_plan" not in of_mixer


def test_verls_forward_runs_the_vision_tower_on_a_dummy_image(model: Any) -> None:
    """So the tower must keep an attention of its own, and a tree's plan does not reach it."""
    (call,) = called(model.model.visual, lambda: run(model))
    assert "tree_plan" not in call


def test_verls_forward_drops_logits_to_keep(model: Any) -> None:
    assert run(model, logits_to_keep=torch.tensor([0, 2])).logits.shape[1] == layout_of(DEEP).num_tokens


def test_log_probs_are_those_of_transformers_own_forward(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    got = tree_log_probs(model, DEEP).log_probs
    monkeypatch.undo()
    assert "verl" not in Qwen3_5ForConditionalGeneration.forward.__module__
    want = tree_log_probs(model, DEEP).log_probs
    for got_one, want_one in zip(got, want, strict=True):
        torch.testing.assert_close(got_one, want_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", DELTA_RULE)
def test_mixers_call_the_two_functions_of_the_instance_by_these_arguments(family: str) -> None:
    model = tiny_model(family)
    mixer = model.model.layers[0].linear_attn
    assert type(mixer).__name__ in MIXERS
    assert model.config.model_type in RECURRENT_TYPES
    assert mixer.causal_conv1d_fn is None, "there is no CUDA here, so the layer runs its own convolution"
    rule, seen = mixer.chunk_gated_delta_rule, {}

    def conv(x: torch.Tensor, weight: torch.Tensor, bias: None, activation: str, seq_idx: None) -> torch.Tensor:
        seen["conv"] = (x.shape, weight.shape, bias, activation, seq_idx)
        padded = torch.nn.functional.pad(x, (weight.shape[1] - 1, 0))
        y = torch.nn.functional.conv1d(padded, weight[:, None], groups=len(weight))
        return torch.nn.functional.silu(y)

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen["rule"] = ([each.shape for each in args], kwargs)
        return rule(*args, **kwargs)

    token_ids = torch.tensor([[1, 2, 3, 4, 5]])
    want = model(input_ids=token_ids, use_cache=False).logits
    mixer.causal_conv1d_fn, mixer.chunk_gated_delta_rule = conv, spy
    torch.testing.assert_close(model(input_ids=token_ids, use_cache=False).logits, want)
    channels = 2 * mixer.key_dim + mixer.value_dim
    assert seen["conv"] == ((1, channels, 5), (channels, 4), None, "silu", None)
    shapes, options = seen["rule"]
    assert shapes == [(1, 5, 4, 8), (1, 5, 4, 8), (1, 5, 4, 6)]
    assert options["g"].max() <= 0
    assert options["beta"].min() >= 0
    assert options["use_qk_l2norm_in_kernel"] is True
    assert (options["initial_state"], options["output_final_state"]) == (None, False)
    assert options.get("cu_seqlens") is None
    assert "chunk_size" in inspect.signature(rule).parameters


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("lfm2", {"conv_bias": False, "conv_L_cache": 4}),
        ("lfm2_moe", {}),
        ("olmo_hybrid", {"linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False, "rope_parameters": None}),
        ("granitemoehybrid", {"mamba_n_groups": 1, "mamba_proj_bias": True, "position_embedding_type": "rope"}),
        ("granite dense", {"mamba_conv_bias": False, "hidden_act": "gelu", "time_step_limit": (0.4, 1.5)}),
    ],
)
def test_other_mixers_compute_one_path_as_their_own_forwards_do(name: str, settings: dict[str, Any]) -> None:
    """Settings that the published models do not have change what transformers computes, and what trees do."""
    model = tiny_model(name, **settings)
    path = [(each * 11) % 61 for each in range(40)]
    with Float64():
        want, _ = flat_scores(model, path)
        (got,) = tree_log_probs(model, [path]).log_probs
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
        others, _ = flat_scores(tiny_model(name), path)
    assert not settings or (others - want).abs().max() > 1e-3
