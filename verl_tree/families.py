"""Families of models that need something of trees, or are refused; every other causal LM is served as it is.

A family that calls transformers' attention interface in all its layers needs no line here. It is served if its layers
see a token's own path only, and `verl_tree.attention.hf.check_model` finds that out. Here is what cannot be found out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Mixing = Literal["delta_rule", "delta_rule_three_convs", "short_conv", "mamba2"]
"""How a recurrent layer computes, which says what stands in for it (`verl_tree.recurrence.stand_ins`)."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the models of some types."""

    name: str
    model_types: tuple[str, ...]  # `model_type` of transformers' configs
    mixers: tuple[str, ...] = ()  # Classes of transformers of its recurrent layers
    mixing: Mixing | None = None  # How these compute
    reads_images: bool = False  # Its positions, and its way from pixels to embeddings, are served
    refused: str = ""  # Why its recurrent layers are not served


FAMILIES = (
    Family("Qwen3-Next", ("qwen3_next",), mixers=("Qwen3NextGatedDeltaNet",), mixing="delta_rule"),
    Family(
        "Qwen3.5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        mixers=("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"),
        mixing="delta_rule",
    ),
    Family("OLMo-Hybrid", ("olmo_hybrid",), mixers=("OlmoHybridGatedDeltaNet",), mixing="delta_rule_three_convs"),
    Family("LFM2", ("lfm2", "lfm2_moe"), mixers=("Lfm2ShortConv", "Lfm2MoeShortConv"), mixing="short_conv"),
    Family("Granite-4 hybrid", ("granitemoehybrid",), mixers=("GraniteMoeHybridMambaLayer",), mixing="mamba2"),
    Family("Qwen2.5-VL", ("qwen2_5_vl",), reads_images=True),
    Family("Qwen3-VL", ("qwen3_vl", "qwen3_vl_moe"), reads_images=True),
    Family(
        "Nemotron-H",
        ("nemotron_h",),
        refused="transformers' own forward is wrong beyond one chunk, so there is nothing to compare with",
    ),
    Family(
        "Kimi Linear",
        ("kimi_linear",),
        refused="its code is not in transformers, so there is nothing to compare with",
    ),
)


def _types(families: Iterable[Family]) -> tuple[str, ...]:
    return tuple(model_type for family in families for model_type in family.model_types)


MIXERS: dict[str, Mixing] = {
    mixer: family.mixing for family in FAMILIES if family.mixing is not None for mixer in family.mixers
}
"""How each class of recurrent layers that is served computes."""

RECURRENT_TYPES = _types(family for family in FAMILIES if family.mixers)
IMAGE_TYPES = _types(family for family in FAMILIES if family.reads_images)
REFUSED = {model_type: family.refused for family in FAMILIES for model_type in family.model_types if family.refused}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's config that say how many experts a layer has."""

VEOMNI_TYPES = (
    "gemma3_text",
    "gpt_oss",
    "llama",
    "qwen2",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""Types whose VeOmni models compute trees as verl's own engine computes flat rows (`tests/e2e/test_engines.py`).

VeOmni 0.1.12 has more: docs/engines.md says what is known of them.
"""
VEOMNI_CRITICS = ("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe")
"""Those of which VeOmni has a token classifier, which a critic is; of others it builds a language model."""

RECURRENT_LAYERS = ("linear_attention", "conv", "mamba")
"""What `config.layer_types` calls recurrent layers."""

ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
"""What it calls layers in which a token sees its own path and nothing else."""

LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}
"""Config keys of families that change the logits behind their head, with the value that changes nothing."""


def has_recurrent_layers(settings: Mapping[str, Any]) -> bool:
    """Whether a model has some, by what its config.json says; some Granite-4 have attention only."""
    layer_types = (dict(settings) | (settings.get("text_config") or {})).get("layer_types")
    is_recurrent = settings.get("model_type") in RECURRENT_TYPES
    return is_recurrent and not set(RECURRENT_LAYERS).isdisjoint(layer_types or RECURRENT_LAYERS)


def has_token_classifier(settings: Mapping[str, Any]) -> bool:
    """Whether transformers or the model's own code has a token classifier, which a critic is; True if unknown."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    unserved = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.keys()
    has_own = "AutoModelForTokenClassification" in (settings.get("auto_map") or {})
    return has_own or settings.get("model_type") not in unserved
