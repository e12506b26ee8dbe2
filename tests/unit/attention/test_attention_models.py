"""Tiny transformers models through every CPU backend as a tree, against each flat sequence through eager attention.

Logits at every position of every sequence, and the gradients of all parameters. transformers' eager attention computes
its softmax in float32 whatever the model's dtype, which sets the tolerance; all else is float64.
"""

import pytest
import torch
from model_cases import flat_logits, loss_of, tree_logits
from tiny_models import ATTENTION, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)
from tree_cases import DEEP, flat_scores, gradients, relative_error

from verl_tree.attention.hf import check_model
from verl_tree.functional import tree_log_probs

TOLERANCE = 2e-6
VARLEN_REFUSES = {"gemma2": "scores softcapped at 2.0 are not served"}


def assert_equal(model, got, want):
    for got_one, want_one in zip(got, want, strict=True):
        assert relative_error(got_one, want_one) < TOLERANCE
    wanted, found = (gradients(model, loss_of(logits)) for logits in (want, got))
    assert wanted.keys() == found.keys()
    assert len(wanted) > 10
    for name, gradient in wanted.items():
        assert relative_error(found[name], gradient) < 10 * TOLERANCE, name


@pytest.mark.parametrize("backend", ["varlen", "dense", "auto"])
@pytest.mark.parametrize("name", ATTENTION)
def test_a_tree_gives_the_logits_and_gradients_of_flat_sequences(name, backend):
    model = tiny_model(name)
    check_model(model, max_path_len=max(map(len, DEEP)))
    if backend == "varlen" and name in VARLEN_REFUSES:
        with pytest.raises(ValueError, match=f"'varlen' cannot serve this input: varlen: .*{VARLEN_REFUSES[name]}"):
            tree_logits(model, DEEP, backend=backend)
        return
    assert_equal(model, tree_logits(model, DEEP, backend=backend), flat_logits(model, DEEP))


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
def test_tree_log_probs_equals_flat(name):
    model = tiny_model(name)
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
    model = tiny_model("gemma2")
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
    model = tiny_model("gemma2", use_bidirectional_attention=True)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM has use_bidirectional_attention=True"):
        check_model(model, max_path_len=3)
