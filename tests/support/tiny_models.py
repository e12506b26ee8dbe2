"""Tiny random models of every family, in three sizes: for float64, for engines on ranks, and for vLLM.

A name is a row of `MODELS`, or any `model_type` of transformers that needs nothing but the settings of its size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from verl_tree.attention.hf import register

Size = Literal["float64", "engine", "vllm"]
Settings = Mapping[str, Any]

VOCAB_SIZE = 61
WINDOW = 4  # of paths of up to nine tokens
IMAGE, VIDEO, START, END = 60, 61, 62, 63
"""Tokens of the models with images, whose vocabulary has 64."""

SIZES: dict[Size, Settings] = {
    "float64": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB_SIZE,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    },
    "vllm": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "bos_token_id": None,
    },
}
TINY_SETTINGS = SIZES["float64"]
# Gradients matter and probabilities differ; of the default initialisation they hardly do.
SIZES["engine"] = TINY_SETTINGS | {"initializer_range": 0.08}

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERT = _EXPERTS | {"shared_expert_intermediate_size": 24}
_CONVS = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_MAMBA = {
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "shared_intermediate_size": 24,
    "attention_multiplier": 0.35,
    "num_experts_per_tok": 2,
}
_GPT_OSS = _ROPE | {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_THREE_LAYERS = {"num_hidden_layers": 3, "vocab_size": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """A model that has settings of its own.

    Attributes:
        model_type: Of transformers' configs.
        title: Its row of docs/models.md.
        settings: Of the text part.
        vision: Of the vision tower; a model with one has its settings in parts.
        tokens: Of the model around the two parts.
        vllm: In place of `settings` where vLLM's kernels take other sizes.
        auto: The class that makes the model.
    """

    model_type: str
    title: str = ""
    settings: Settings = field(default_factory=dict)
    vision: Settings | None = None
    tokens: Settings = field(default_factory=dict)
    vllm: Settings = field(default_factory=dict)
    auto: type = AutoModelForCausalLM


ATTENTION = {
    "qwen3": Tiny(model_type="qwen3", title="Qwen3"),
    "llama": Tiny(model_type="llama", title="Llama"),
    "qwen2": Tiny(model_type="qwen2"),
    "qwen2 window": Tiny(
        model_type="qwen2",
        title="Qwen2",
        settings={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2 wide window": Tiny(  # as long as the longest path
        model_type="qwen2", settings={"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    ),
    "mistral window": Tiny(model_type="mistral", title="Mistral", settings={"sliding_window": WINDOW}),
    # Layers 0 and 2 slide, 1 is full; scores and logits of several units make both softcaps act.
    "gemma2": Tiny(
        model_type="gemma2",
        title="Gemma 2",
        settings={
            "num_hidden_layers": 3,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 2,
        },
    ),
    "gemma3": Tiny(model_type="gemma3_text", title="Gemma 3, text", settings=_ALTERNATING),
    "gpt-oss": Tiny(model_type="gpt_oss", title="gpt-oss", settings=_GPT_OSS | _ALTERNATING),
    "gpt-oss full": Tiny(model_type="gpt_oss", settings=_GPT_OSS | {"layer_types": ["full_attention"] * 2}),
    # Layer 1 has experts, of which each token takes two, layer 0 a plain MLP.
    "qwen3 moe": Tiny(
        model_type="qwen3_moe",
        title="Qwen3-MoE",
        settings=_EXPERTS
        | {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0]},
        vllm={"moe_intermediate_size": 32, "mlp_only_layers": [], "tie_word_embeddings": False},
    ),
}
"""Models whose layers are attention alone."""

RECURRENT = {
    "qwen3_next": Tiny(
        model_type="qwen3_next",
        title="Qwen3-Next",
        settings=_HYBRID | _SHARED_EXPERT,
        vllm={
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "initializer_range": 0.1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5_text": Tiny(model_type="qwen3_5_text", title="Qwen3.5", settings=_HYBRID),
    "qwen3_5_moe_text": Tiny(model_type="qwen3_5_moe_text", title="Qwen3.5-MoE", settings=_HYBRID | _SHARED_EXPERT),
    "olmo_hybrid": Tiny(model_type="olmo_hybrid", title="OLMo-Hybrid", settings=_HYBRID | _ROPE),
    "lfm2": Tiny(
        model_type="lfm2",
        title="LFM2",
        settings=_CONVS | {"conv_bias": True, "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": Tiny(model_type="lfm2_moe", title="LFM2-MoE", settings=_CONVS | _EXPERTS | {"num_dense_layers": 1}),
    "granitemoehybrid": Tiny(
        model_type="granitemoehybrid", title="Granite-4 hybrid", settings=_MAMBA | {"num_local_experts": 4}
    ),
    "granite dense": Tiny(model_type="granitemoehybrid", settings=_MAMBA | {"num_local_experts": 0}),
}
"""Two recurrent layers around one of attention."""

DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # Qwen's, gated

_QWEN3_VL = _THREE_LAYERS | {
    "rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
}
# DeepStack is behind both vision blocks.
_DEEP_VISION = _VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
# The sizes of patches are those of VeOmni's blank images, whatever the model's.
_QWEN3_5_VISION = _VISION | {"num_position_embeddings": 16, "patch_size": 16}

IMAGES = {  # of three layers of text
    "qwen2_5_vl": Tiny(
        model_type="qwen2_5_vl",
        title="Qwen2.5-VL",
        settings=_THREE_LAYERS | {"rope_parameters": _ROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]}},
        vision=_VISION | {"window_size": 56, "fullatt_block_indexes": [1]},
        tokens=_TOKENS,
        auto=AutoModelForImageTextToText,
    ),
    "qwen3_vl": Tiny(
        model_type="qwen3_vl",
        title="Qwen3-VL",
        settings=_QWEN3_VL,
        vision=_DEEP_VISION,
        tokens=_TOKENS,
        auto=AutoModelForImageTextToText,
    ),
    "qwen3_vl_moe": Tiny(
        model_type="qwen3_vl_moe",
        title="Qwen3-VL-MoE",
        settings=_QWEN3_VL | _EXPERTS,
        vision=_DEEP_VISION,
        tokens=_TOKENS,
        auto=AutoModelForImageTextToText,
    ),
}
MODELS = (
    ATTENTION
    | RECURRENT
    | IMAGES
    | {
        "qwen3 critic": Tiny(
            model_type="qwen3",
            settings={"num_labels": 1, "classifier_dropout": 0.0},
            auto=AutoModelForTokenClassification,
        ),
        # With a vision tower, as every published checkpoint.
        "qwen3_5": Tiny(
            model_type="qwen3_5",
            title="Qwen3.5",
            settings=_HYBRID,
            vision=_QWEN3_5_VISION,
            auto=AutoModelForImageTextToText,
        ),
        "qwen3_5_moe": Tiny(
            model_type="qwen3_5_moe",
            title="Qwen3.5-MoE",
            settings=_HYBRID | _SHARED_EXPERT,
            vision=_QWEN3_5_VISION,
            auto=AutoModelForImageTextToText,
        ),
    }
)

TITLES = {name: row.title for name, row in MODELS.items() if row.title}
"""Rows of docs/models.md by name; two models are Qwen3.5."""


def tiny_model(name: str = "qwen3", *, size: Size = "float64", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """Make a random model in eval mode; `settings` are those of its text part.

    In float64 it computes so throughout, but for what asks for float32 (`float64_mode.py`): transformers' RMSNorm
    does, so torch's replaces it, the same formula. Experts run one by one, for grouped products do not exist.
    """
    register()
    torch.manual_seed(seed)
    row = MODELS.get(name, Tiny(model_type=name))
    model = row.auto.from_config(_config(row, size, settings))
    if size == "float64":
        model.double().set_experts_implementation("eager")
        _use_norms_of_float64(model)
    _draw_what_starts_constant(model, decays_only=size == "vllm")
    return model.eval()


def _config(row: Tiny, size: Size, settings: Settings) -> Any:
    text = {**SIZES[size], **row.settings, **(row.vllm if size == "vllm" else {}), **settings}
    if row.vision is None:
        return AutoConfig.for_model(row.model_type, **text)
    shared = {"initializer_range": text["initializer_range"]} if "initializer_range" in text else {}
    vision = {**row.vision, **shared, "out_hidden_size": text["hidden_size"]}
    outer = {"tie_word_embeddings": text["tie_word_embeddings"], **row.tokens}
    return AutoConfig.for_model(row.model_type, text_config=text, vision_config=vision, **outer)


@torch.no_grad()
def _draw_what_starts_constant(model: PreTrainedModel, *, decays_only: bool) -> None:
    """Draw norms and biases, so that all gradients matter, and decays, so that states live for some ten tokens."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-3.0, 0.0)
        elif name.endswith("dt_bias"):
            parameter.normal_(std=0.2)
        elif decays_only:
            continue
        elif "sinks" in name:
            parameter.normal_()
        elif parameter.min() == parameter.max():
            parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.normal_(std=0.1)


def _use_norms_of_float64(model: PreTrainedModel) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and "variance_epsilon" in vars(child):
                norm = torch.nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight.data.uniform_(0.5, 1.5)
                setattr(parent, name, norm)
