"""Tiny transformers models of every supported family, and their logits as a tree and as flat sequences."""

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from tree_cases import DEEP, TINY_SETTINGS, layout_of, tiny_model

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register

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
    """Make a Gemma 2: layers 0 and 2 slide, 1 is full; scores and logits of several units make both softcaps act."""
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
    """Make a gpt-oss with sinks. Experts run one by one: grouped products do not exist for float64."""
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


def qwen3_moe():
    """Make a Qwen3-MoE: layer 1 has experts, of which each token takes two, layer 0 a plain MLP."""
    model = build(
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[0],
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
    "qwen3 moe": qwen3_moe,
}


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
    """Return a signed sum over everything, different for every (sequence, position, token)."""
    generator = torch.Generator().manual_seed(1)
    return sum((x * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum() for x in logits)
