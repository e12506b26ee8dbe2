"""Models of transformers that attention refuses, and what serves them. Their numbers are in `test_families.py`."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)
from tree_cases import DEEP, flat_scores

from verl_tree.attention.hf import check_model
from verl_tree.functional import tree_log_probs


def test_a_softcap_is_refused_by_varlen():
    with pytest.raises(
        ValueError, match=r"'varlen' cannot serve this input: varlen: .*softcapped at 2\.0 are not served"
    ):
        tree_log_probs(tiny_model("gemma2"), DEEP, backend="varlen")


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
