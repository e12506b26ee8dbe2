"""Layers that carry a state from token to token, such as Gated DeltaNet, on trees (docs/recurrence.md)."""

MIXERS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
"""Classes of transformers whose sequence mixing is served: two functions of the instance, and nothing else."""

MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types that have such layers."""
