"""The gated delta rule and Mamba-2 token by token, as oracles of hybrids, and scores of flat sequences."""

import itertools
from contextlib import contextmanager

import numpy as np
import torch
from float64_mode import Float64
from tiny_models import VOCAB_SIZE
from torch.nn import functional as F
from tree_cases import DEEP, gradients, relative_error

from verl_tree.functional import tree_log_probs

MIXER_NAMES = ("linear_attn", ".conv.", "mamba")
"""What parameters of recurrent layers are called."""


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
