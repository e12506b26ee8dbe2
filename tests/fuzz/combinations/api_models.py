"""Tiny float64 models of every family that `tree_log_probs` serves, most of them from `tests/support`."""

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tiny_models import ATTENTION, IMAGES, RECURRENT, VOCAB_SIZE, WINDOW, tiny_model

from .drawing import Settings

HEADS = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
LATENT = HEADS | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
NO_DROPOUT = {"residual_dropout": 0.0, "embedding_dropout": 0.0}

MORE: dict[str, dict[str, Any]] = {
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "starcoder2": NO_DROPOUT | {"sliding_window": WINDOW},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": GPT2 | {"resid_pdrop": 0.0},
    "olmo2": {},
    "phi3": {},
    "cohere2": {"sliding_window": WINDOW},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "deepseek_v3": LATENT | ROUTED | {"first_k_dense_replace": 1},
}
"""Settings of the families that are tested here alone."""

FAMILIES = (*ATTENTION, *RECURRENT, *MORE, *(f"{name} text" for name in IMAGES))

DROPOUTS = {
    "seed_oss": "residual_dropout",
    "starcoder2": "residual_dropout",
    "mixtral": "router_jitter_noise",
    "gpt2": "resid_pdrop",
}
"""Settings by which a layer draws random numbers elsewhere than in attention; only the last one's is a module."""

ATTENTION_LORA = {"gpt2": ["c_attn"], "phi3": ["qkv_proj"], "deepseek_v3": ["q_b_proj", "kv_b_proj", "o_proj"]}
"""PEFT breaks the latent attention of DeepSeek-V3 under `all-linear`, without trees as well."""


def make_model(settings: Settings) -> Any:
    """Make the model of a draw; two calls make equal ones."""
    family, dropout = settings["family"], settings["dropout"]
    options = dict(MORE.get(family, {}))
    if dropout in ("functional", "module"):
        options[DROPOUTS[family]] = 0.2
    model: Any = tiny_model(family.removesuffix(" text"), **options)
    if dropout == "attention":
        for module in model.modules():
            if "attention_dropout" in vars(module):
                module.attention_dropout = 0.2
    if settings["lora"]:
        torch.manual_seed(1)
        targets: Any = "all-linear"
        if settings["lora"] == "attention" or family == "deepseek_v3":
            targets = ATTENTION_LORA.get(family, ["q_proj", "v_proj"])
        model.enable_input_require_grads()  # for checkpoints of the reentrant kind
        lora = LoraConfig(
            r=3, target_modules=targets, init_lora_weights=False, lora_dropout=0.2 if dropout == "lora" else 0.0
        )
        model = get_peft_model(model, lora).double()
    for name, parameter in model.named_parameters():
        if is_frozen(name, settings["frozen"]):
            parameter.requires_grad_(False)
    if settings["frozen"] == "embeddings":
        model.enable_input_require_grads()
    return model.train(settings["training"])


def is_frozen(name: str, what: str | None) -> bool:
    """Return whether a parameter is frozen in a draw without LoRA."""
    match what:
        case "embeddings":
            return "embed_tokens" in name or ".wte." in name
        case "first layer":
            return ".layers.0." in name or ".h.0." in name
        case "norms":
            return "norm" in name
    return False


assert VOCAB_SIZE < 64, "the vision models have 64 tokens, and the drawn ones fit all"
