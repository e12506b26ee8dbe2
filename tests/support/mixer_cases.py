"""Tiny models whose recurrent layers are other than Qwen's, and any on trees beside flat sequences, token by token."""

from contextlib import contextmanager

import torch
from float64_mode import Float64
from hybrid_cases import FAMILIES, draw_what_starts_constant, flat_scores, hybrid, loss_of
from torch.nn import functional as F
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
)
from tree_cases import TINY_SETTINGS, gradients, relative_error

from verl_tree.functional import tree_log_probs

DELTA_RULE = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONVS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
MAMBA = {
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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

OTHERS = {
    "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM, DELTA_RULE),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, CONVS | {"conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM, CONVS | EXPERTS | {"num_dense_layers": 1}),
    "granitemoehybrid": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, MAMBA | {"num_local_experts": 4}),
    "granite dense": (GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, MAMBA | {"num_local_experts": 0}),
}
"""Configuration and settings by name: two recurrent layers around one of attention."""

MIXER_NAMES = ("linear_attn", ".conv.", "mamba")
"""What the parameters of such layers are called."""


def make_other(name, **settings):
    """Make a random float32 model."""
    config_class, model_class, options = OTHERS[name]
    torch.manual_seed(0)
    model = model_class(
        config_class(**(TINY_SETTINGS | {"num_hidden_layers": 3, "pad_token_id": 0} | options | settings))
    )
    draw_what_starts_constant(model)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if each.endswith(("norm.weight", "layernorm.weight")):
                parameter.uniform_(0.5, 1.5)
            if each.endswith(("bias", "mamba.D")):
                parameter.normal_(std=0.5)
            if each.endswith("mamba.A_log"):
                parameter.uniform_(-2.0, 1.0)
        for each, buffer in model.named_buffers():
            if each.endswith("expert_bias"):
                buffer.normal_(std=0.1)
    return model


def other_hybrid(name, **settings):
    """Make a random float64 model in eval mode."""
    model = make_other(name, **settings).double().eval()
    if name == "lfm2_moe":
        model.set_experts_implementation("eager")  # grouped products do not exist for float64
    return model


def mamba_by_token(mixer, hidden_states, **_options):
    """Compute the layer one token after another, (B, T, E); each head has its own copies of `b` and `c`."""
    batch, num_tokens, _ = hidden_states.shape
    inner = mixer.num_heads * mixer.head_dim
    projected = mixer.in_proj(hidden_states)
    gate, dt = projected[..., :inner], projected[..., -mixer.num_heads :]
    width = mixer.conv_kernel_size
    padded = F.pad(projected[..., inner : -mixer.num_heads], (0, 0, width - 1, 0))
    convolved = sum(padded[:, at : at + num_tokens] * mixer.conv1d.weight[:, 0, at] for at in range(width))
    convolved = F.silu(convolved + mixer.conv1d.bias)
    x = convolved[..., :inner].reshape(batch, num_tokens, mixer.num_heads, mixer.head_dim)
    b, c = (
        each.reshape(batch, num_tokens, mixer.n_groups, -1).repeat_interleave(mixer.num_heads // mixer.n_groups, 2)
        for each in convolved[..., inner:].chunk(2, dim=-1)
    )
    dt = (1 + (dt + mixer.dt_bias).exp()).log()
    state = x.new_zeros(batch, mixer.num_heads, mixer.head_dim, mixer.ssm_state_size)
    outs = []
    for t in range(num_tokens):
        kept = (-mixer.A_log.exp() * dt[:, t]).exp()[..., None, None]
        state = state * kept + torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b[:, t])
        outs.append(torch.einsum("bhpn,bhn->bhp", state, c[:, t]) + mixer.D[:, None] * x[:, t])
    out = torch.stack(outs, dim=1).flatten(2)
    return mixer.out_proj(mixer.norm(out, gate))


@contextmanager
def mamba_oracle(model):
    """Let the Mamba-2 layers of a flat model run token by token."""
    mixers = [module for module in model.modules() if type(module).__name__ == "GraniteMoeHybridMambaLayer"]
    for mixer in mixers:
        mixer.forward = lambda *args, mixer=mixer, **kwargs: mamba_by_token(mixer, *args, **kwargs)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.forward


def make(name):
    return hybrid(name) if name in FAMILIES else other_hybrid(name)


def flat_side(model, sequences):
    """Return the log-probs and entropies of flat sequences, and the gradients."""
    with Float64(), mamba_oracle(model):
        want = flat_scores(model, sequences)
        return want, gradients(model, loss_of(*want))


def errors(model, sequences, *, flat=None, **options):
    """Return the worst relative errors of log-probs and entropies, and of gradients, and the scores of the tree.

    `flat` is what `flat_side` has returned, if it was of another model.
    """
    want, want_gradients = flat or flat_side(model, sequences)
    with Float64():
        scores = tree_log_probs(model, sequences, calculate_entropy=True, **options)
        got = (scores.log_probs, scores.entropy)
        got_gradients = gradients(model, loss_of(*got))
    assert got_gradients.keys() == want_gradients.keys()
    recurrent = [value for name, value in want_gradients.items() if any(each in name for each in MIXER_NAMES)]
    assert min(value.abs().max() for value in recurrent) > 1e-3
    of_scores = [relative_error(*each) for pair in zip(got, want, strict=True) for each in zip(*pair, strict=True)]
    of_gradients = [relative_error(got_gradients[name], value) for name, value in want_gradients.items()]
    return max(of_scores), max(of_gradients), scores


def assert_equals_flat(model, forests, **options):
    """Compare on several forests; return the worst errors and the flat tokens that the trees have saved."""
    found = [errors(model, sequences, **options) for sequences in forests]
    of_scores, of_gradients = (max(each[at] for each in found) for at in (0, 1))
    assert of_scores <= 1e-10
    assert of_gradients <= 1e-9
    return of_scores, of_gradients, sum(each.num_flat_tokens - each.num_tree_tokens for *_, each in found)
