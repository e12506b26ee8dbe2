"""Layers that carry a state from token to token, such as Gated DeltaNet, on trees (docs/recurrence.md)."""

DELTA_RULES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
OLMO_HYBRID = ("OlmoHybridGatedDeltaNet",)
SHORT_CONVS = ("Lfm2ShortConv", "Lfm2MoeShortConv")
MAMBA2 = ("GraniteMoeHybridMambaLayer",)

MIXERS = DELTA_RULES + OLMO_HYBRID + SHORT_CONVS + MAMBA2
"""Classes of transformers whose sequence mixing is served."""

MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
)
"""Model types that have such layers."""

LAYER_TYPES = ("linear_attention", "conv", "mamba")
"""What `config.layer_types` calls such layers."""
