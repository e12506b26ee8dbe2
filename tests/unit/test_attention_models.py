"""Tiny transformers models through every CPU backend as a tree, against each flat sequence through eager attention.

Logits at every position of every sequence, and the gradients of all parameters. transformers' eager attention computes
its softmax in float32 whatever the model's dtype, which sets the tolerance; all else is float64.
"""

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from tree_cases import DEEP, TINY_SETTINGS, flat_scores, gradients, layout_of, relative_error, tiny_model

from verl_tree.attention import AttentionPlan
from verl_tree.attention.transformers import ATTENTION_NAME, check_model, register
from verl_tree.functional import tree_log_probs

TOLERANCE = 2e-6
LONGEST = max(map(len, DEEP))
WINDOW = 4  # of paths of up to nine tokens
ALTERNATING = ["sliding_attention", "full_attention"]


def build(config_class, model_class, **settings):
    register()
    torch.manual_seed(0)
    model = model_class(config_class(**(TINY_SETTINGS | {"pad_token_id": 0} | settings))).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "bias" in name:
                parameter.normal_()
    return model


def gemma2():
    """Layers 0 and 2 slide, 1 is full; both softcaps bite: scores of several units, logits likewise."""
    return build(
        Gemma2Config,
        Gemma2ForCausalLM,
        num_hidden_layers=3,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=2,
    )


def gpt_oss(*layer_types):
    """Sinks in every layer. Experts one by one, as grouped products exist for float32 and narrower only."""
    model = build(
        GptOssConfig,
        GptOssForCausalLM,
        layer_types=list(layer_types),
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model.set_experts_implementation("eager")
    return model


MODELS = {
    "qwen3": tiny_model,
    "llama": lambda: tiny_model("llama"),
    "qwen2": lambda: tiny_model("qwen2"),
    "qwen2 window": lambda: tiny_model("qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen2 wide window": lambda: tiny_model(
        "qwen2", use_sliding_window=True, sliding_window=LONGEST, max_window_layers=0
    ),
    "mistral window": lambda: build(MistralConfig, MistralForCausalLM, sliding_window=WINDOW),
    "gemma2": gemma2,
    "gemma3": lambda: build(Gemma3TextConfig, Gemma3ForCausalLM, layer_types=ALTERNATING, sliding_window=WINDOW),
    "gpt-oss": lambda: gpt_oss("sliding_attention", "full_attention"),
    "gpt-oss full": lambda: gpt_oss("full_attention", "full_attention"),
}

VARLEN_REFUSES = {"gemma2": "scores softcapped at 2.0 are not served"}


def flat_logits(model, sequences):
    model.set_attn_implementation("eager")
    return [model(input_ids=torch.tensor([row]), use_cache=False).logits[0] for row in sequences]


def tree_logits(model, sequences, *, backend):
    layout = layout_of(sequences)
    model.set_attn_implementation(ATTENTION_NAME)
    logits_TV = model(
        input_ids=layout.token_ids_T[None],
        position_ids=layout.position_T[None],
        attention_mask=None,
        use_cache=False,
        tree_plan=AttentionPlan.from_layout(layout, backend=backend),
    ).logits[0]
    by_leaf = logits_TV[layout.tree_index_F].split(np.diff(layout.leaf_offsets).tolist())
    return [by_leaf[layout.leaves.tolist().index(sequence)] for sequence in range(len(sequences))]


def loss_of(logits):
    """A signed sum over everything, different for every (sequence, position, token)."""
    generator = torch.Generator().manual_seed(1)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in logits)


def assert_equal(model, got, want):
    for got_one, want_one in zip(got, want, strict=True):
        assert relative_error(got_one, want_one) < TOLERANCE
    wanted, found = (gradients(model, loss_of(logits)) for logits in (want, got))
    assert wanted.keys() == found.keys() and len(wanted) > 10
    for name, gradient in wanted.items():
        assert relative_error(found[name], gradient) < 10 * TOLERANCE, name


@pytest.mark.parametrize("backend", ["varlen", "dense", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_a_tree_gives_the_logits_and_gradients_of_flat_sequences(name, backend):
    model = MODELS[name]()
    check_model(model, max_path_len=LONGEST)
    if backend == "varlen" and name in VARLEN_REFUSES:
        with pytest.raises(ValueError, match=f"'varlen' cannot serve this input: varlen: .*{VARLEN_REFUSES[name]}"):
            tree_logits(model, DEEP, backend=backend)
        return
    assert_equal(model, tree_logits(model, DEEP, backend=backend), flat_logits(model, DEEP))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_tree_log_probs_equals_flat(name):
    model = MODELS[name]()
    for capacity in (None, 12):
        got = tree_log_probs(model, DEEP, capacity=capacity).log_probs
        want = [
            logits[:-1].log_softmax(-1).gather(-1, torch.tensor(row)[1:, None]).squeeze(-1)
            for row, logits in zip(DEEP, flat_logits(model, DEEP), strict=True)
        ]
        assert_equal(model, got, want)


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_off_by_one_is_found(off):
    """Guards the tolerance."""
    model = MODELS["gemma2"]()
    want = flat_logits(model, DEEP)
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.sliding_window += off
    got = tree_logits(model, DEEP, backend="dense")
    errors = [relative_error(got_one, want_one) for got_one, want_one in zip(got, want, strict=True)]
    assert max(errors) > 1000 * TOLERANCE


def test_the_remedies_for_attention_dropout_serve_gpt2():
    """Its config has another name for it than most, and a default that is not 0."""
    settings = {
        "bos_token_id": 1,
        "eos_token_id": 1,
        "vocab_size": 64,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
    }
    model = GPT2LMHeadModel(GPT2Config(**settings)).double().train()
    remedy = r"attention dropout 0\.1: load .* of 0 \(attention_dropout or attn_pdrop .*\), or call model\.eval\(\)"
    with pytest.raises(ValueError, match=remedy):
        tree_log_probs(model, DEEP)
    without = GPT2LMHeadModel(GPT2Config(**settings, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)).double().train()
    for served in (model.eval(), without):
        for log_probs, row in zip(tree_log_probs(served, DEEP).log_probs, DEEP, strict=True):
            torch.testing.assert_close(log_probs, flat_scores(served, row)[0], rtol=1e-10, atol=1e-10)


def test_bidirectional_attention_is_refused():
    model = build(Gemma2Config, Gemma2ForCausalLM, use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has use_bidirectional_attention=True"):
        check_model(model, max_path_len=3)
