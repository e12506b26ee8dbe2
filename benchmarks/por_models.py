"""The models of por.py: random weights in the published sizes of Qwen3, and what an update of them costs.

Sizes are those of `config.json` of Qwen/Qwen3-0.6B, -1.7B, -4B and -8B. For a CPU: `0.6B-layer` and `8B-layer`, one
layer of these with a vocabulary of 1,024; `7M`, small enough for passes of thousands of tokens in seconds; `0.5M`;
`0.3M`, whose layers hold more than its logits, as those of large models do; and `tiny`.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from verl_tree.attention import AttentionPlan, ScoreOptions, choose_backend
from verl_tree.attention.varlen import choose_provider
from verl_tree.tree.layout import TreeLayout


def _sizes(
    *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, head_dim: int = 128, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "head_dim": head_dim,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40_960,
        **more,
    }


_ONE_LAYER: dict[str, Any] = {"layers": 1, "vocab_size": 1024}

SIZES: dict[str, dict[str, Any]] = {
    "0.6B": _sizes(hidden=1024, layers=28, heads=16, kv_heads=8, intermediate=3072),
    "1.7B": _sizes(hidden=2048, layers=28, heads=16, kv_heads=8, intermediate=6144),
    "4B": _sizes(hidden=2560, layers=36, heads=32, kv_heads=8, intermediate=9728),
    "8B": _sizes(hidden=4096, layers=36, heads=32, kv_heads=8, intermediate=12_288, tie_word_embeddings=False),
    "0.6B-layer": _sizes(hidden=1024, heads=16, kv_heads=8, intermediate=3072, **_ONE_LAYER),
    "8B-layer": _sizes(hidden=4096, heads=32, kv_heads=8, intermediate=12_288, **_ONE_LAYER),
    "7M": _sizes(hidden=512, layers=2, heads=8, kv_heads=4, intermediate=1536, head_dim=64, vocab_size=1024),
    "0.5M": _sizes(hidden=128, layers=2, heads=4, kv_heads=2, intermediate=384, head_dim=32, vocab_size=512),
    "0.3M": _sizes(hidden=64, layers=4, heads=4, kv_heads=2, intermediate=256, head_dim=16, vocab_size=256),
    "tiny": _sizes(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, head_dim=16, vocab_size=512),
}

PEAK_TFLOPS = {"H200": 989.5, "H100 PCIe": 756.5, "H100": 989.5, "H20": 148.0, "A100": 312.0, "B200": 2250.0}
"""Dense bf16 TFLOP/s by the makers' data sheets, by a part of the device's name; the first that fits counts."""


TOO_LARGE_WITH_STEP = {"8B"}
"""Models that do not fit on one card beside their gradients and the states of the optimiser."""


def new_model(name: str, *, dtype: torch.dtype, device: torch.device, num_layers: int | None = None) -> PreTrainedModel:
    """Make a model with random weights in training mode; `num_layers` replaces the number of its layers."""
    sizes: dict[str, Any] = SIZES[name] if num_layers is None else SIZES[name] | {"num_hidden_layers": num_layers}
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**sizes), dtype=dtype)
    return model.train()


def small_qwen3(hidden_size: int, *, layers: int, vocab_size: int, **more: Any) -> PreTrainedModel:
    """Make a float32 Qwen3 with heads of 64 and random weights; `more` are settings of its configuration."""
    heads = {"heads": hidden_size // 64, "kv_heads": max(hidden_size // 128, 1), "head_dim": 64}
    sizes = _sizes(hidden=hidden_size, layers=layers, intermediate=3 * hidden_size, vocab_size=vocab_size, **heads)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3Config(**(sizes | more)), dtype=torch.float32).train()


def small_mixture(*, layers: int, vocab_size: int) -> PreTrainedModel:
    """Make a float32 Qwen3-MoE of hidden size 128 with 8 experts, of which a token takes two, and random weights."""
    sizes = _sizes(hidden=128, layers=layers, intermediate=256, vocab_size=vocab_size, heads=4, kv_heads=2, head_dim=32)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**(sizes | experts)), dtype=torch.float32).train()


def peak_flops(device: torch.device, *, peak_tflops: float | None) -> float | None:
    """Return the FLOP/s that the device can do at most: as given, from the table, or None where neither knows."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class Counts:
    """What an update computes with gradient, once: recomputation and passes without gradient do not count."""

    num_tokens: int = 0
    num_pairs: int = 0  # visible (query, key) pairs
    num_projected: int = 0  # positions that are projected to the vocabulary

    @classmethod
    def of_layout(cls, layout: TreeLayout) -> Self:
        """Count a pack on the host whose tokens are all scored."""
        return cls(
            num_tokens=layout.num_tokens,
            num_pairs=int((layout.position_T + 1).sum()),
            num_projected=len(layout.parent_T[layout.parent_T >= 0].unique()),
        )

    def __add__(self, other: Self) -> "Counts":
        return Counts(
            self.num_tokens + other.num_tokens,
            self.num_pairs + other.num_pairs,
            self.num_projected + other.num_projected,
        )


def model_flops(model: PreTrainedModel, counts: Counts) -> float:
    """Return the floating-point operations of the matrix products, forward and backward.

    2 a weight and token forward and 4 backward; 4 Hq D a visible pair and layer forward and 8 backward. That is how
    PaLM (https://arxiv.org/abs/2204.02311, appendix B) counts for the MFU.
    """
    config = model.config
    num_weights = sum(weight.numel() for weight in model.model.layers.parameters() if weight.dim() == 2)
    per_pair = 12 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    per_position = 6 * config.hidden_size * config.vocab_size
    return 6.0 * num_weights * counts.num_tokens + per_pair * counts.num_pairs + per_position * counts.num_projected


def attention_kernel(model: PreTrainedModel, *, backend: str, num_queries: int = 512) -> str:
    """Return the attention backend that serves a model, and behind it the provider if it is `varlen`."""
    config = model.config
    q_QHD, k_THD = (
        torch.empty(num_queries, num_heads, config.head_dim, dtype=model.dtype, device=model.device)
        for num_heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    chain_T = torch.full((num_queries,), num_queries, dtype=torch.int32, device=model.device)
    plan = AttentionPlan.from_subtree_end(chain_T)
    options = ScoreOptions(scale=config.head_dim**-0.5)
    name = choose_backend(q_QHD, k_THD, k_THD, plan, backend=backend, options=options)
    return f"varlen ({choose_provider(q_QHD, is_windowed=False).name})" if name == "varlen" else name
