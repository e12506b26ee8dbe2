"""Tiny hybrids of every supported family, and the recurrence token by token as their oracle."""

import itertools
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from tree_cases import DEEP, TINY_SETTINGS, VOCAB_SIZE

from verl_tree.functional import tree_log_probs

SETTINGS: dict[str, Any] = TINY_SETTINGS | {
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}

FAMILIES = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM, EXPERTS),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM, {}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, EXPERTS),
}


def hybrid(family, *, seed=0, **settings):
    """Make a random float64 model in eval mode: two recurrent layers around one of full attention."""
    config_class, model_class, options = FAMILIES[family]
    torch.manual_seed(seed)
    model = model_class(config_class(**(SETTINGS | options | settings))).double().eval()
    if options:
        model.set_experts_implementation("eager")  # grouped products do not exist for float64
    draw_what_starts_constant(model)
    return model


def draw_what_starts_constant(model):
    """Draw norms and the parameters of decays, so that all gradients matter and states live for some ten tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "dt_bias")):
                parameter.normal_(mean=1.0 if "linear_attn.norm" in name else 0.0, std=0.2)
            if name.endswith("A_log"):
                parameter.uniform_(-3.0, 0.0)


def recurrence_by_token(query, key, value, g, beta, **_options):
    """Compute the gated delta rule one token after another, (B, T, H, D) each; it shares no code with the product."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query = query / query.shape[-1] ** 0.5
    state = value.new_zeros(*key.shape[:1], *key.shape[2:], value.shape[-1])
    outs = []
    for t in range(key.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        remembered = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        delta = (value[:, t] - remembered) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], delta)
        outs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]))
    return torch.stack(outs, dim=1), None


@contextmanager
def oracle(model):
    """Let the recurrent layers of a flat model run token by token."""
    mixers = [module for module in model.modules() if "chunk_gated_delta_rule" in vars(module)]
    before = [mixer.chunk_gated_delta_rule for mixer in mixers]
    for mixer in mixers:
        mixer.chunk_gated_delta_rule = recurrence_by_token
    try:
        yield
    finally:
        for mixer, rule in zip(mixers, before, strict=True):
            mixer.chunk_gated_delta_rule = rule


def flat_scores(model, sequences):
    """Return the (len - 1,) log-probs and entropies of each sequence; they run as one batch, padded at the right."""
    lens = [len(row) for row in sequences]
    token_ids = torch.zeros(len(sequences), max(lens), dtype=torch.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence)] = torch.as_tensor(sequence)
    with oracle(model):
        logits = model(input_ids=token_ids, use_cache=False).logits
    log_probs = logits.log_softmax(-1)
    chosen = log_probs[:, :-1].gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    return [row[: n - 1] for row, n in zip(chosen, lens, strict=True)], [
        row[: n - 1] for row, n in zip(entropies, lens, strict=True)
    ]


def loss_of(log_probs, entropies):
    """Add up terms with a coefficient of their own per (sequence, token), of either sign."""
    generator = torch.Generator().manual_seed(3)
    return sum(
        (torch.randn(len(each), dtype=torch.float64, generator=generator) * each).sum()
        for each in itertools.chain(log_probs, entropies)
    )


def gradients_of_packs(model):
    """Return the gradients of the loss of `DEEP` in several packs, by name."""
    model.zero_grad()
    scores = tree_log_probs(model, DEEP, calculate_entropy=True, capacity=11, packing="heuristic")
    loss_of(scores.log_probs, scores.entropy).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def chain_of_one_token_nodes(length):
    """Make a path whose every token has another leaf of one token beside it."""
    path = (np.arange(length) * 7 % VOCAB_SIZE).tolist()
    return [path] + [[*path[: at + 1], (path[at + 1] + 1) % VOCAB_SIZE] for at in range(length - 1)]
