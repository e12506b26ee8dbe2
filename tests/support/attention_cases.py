"""Inputs of attention, a naive softmax, and sections of a forest behind their context.

Legend: T tokens, the last Q of them queries, P tokens of context, Hq and H heads, D head dim.
"""

import dataclasses

import torch

from verl_tree.attention import AttentionPlan

CPU_BACKENDS = ["varlen", "dense"]


def random_qkv(num_tokens, *, num_groups, num_kv_heads=2, head_dim=16, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    heads = (num_groups * num_kv_heads, num_kv_heads, num_kv_heads, num_groups * num_kv_heads)
    q, k, v, grad_out = (
        torch.randn(num_tokens, count, head_dim, dtype=torch.float64, generator=generator).to(dtype) for count in heads
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad_out


def naive_attention(q_QHD, k_THD, v_THD, sinks_H=None, *, visible_QT, softcap=None):
    """Softmax over the whole (Q, T) matrix, one query head at a time."""
    num_groups = q_QHD.shape[1] // k_THD.shape[1]
    heads = []
    for head in range(q_QHD.shape[1]):
        scores = q_QHD[:, head] @ k_THD[:, head // num_groups].T / q_QHD.shape[-1] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~visible_QT, -torch.inf).exp()
        denominator = weights.sum(-1, keepdim=True)
        if sinks_H is not None:
            denominator = denominator + sinks_H[head].exp()
        heads.append(weights / denominator @ v_THD[:, head // num_groups])
    return torch.stack(heads, dim=1)


def outputs_and_gradients(attend, qkv, grad_out):
    out = attend(*qkv)
    return out, *torch.autograd.grad(out, qkv, grad_out)


def worst_error(got, want, *, grad_out):
    """Return the largest error of output and gradients, each relative to its norm.

    Where every query sees one key, the gradients of queries and keys are zero: differences of two equal sums, and what
    is left depends on the processor. Their error is relative to the gradient of the output.
    """
    assert all(torch.isfinite(one).all() for one in got)
    unit = grad_out.double().norm()
    norms = [other.norm() if other.norm() > 1e-9 * unit else unit for other in want]
    return max(((one.double() - other).norm() / norm).item() for one, other, norm in zip(got, want, norms, strict=True))


def ids_of(options):
    return "-".join(f"{name}{value}" for name, value in options.items())


def within(layout, window):
    """(T, T) bool, the pairs of one path that are fewer than `window` positions apart."""
    position_T = layout.position_T
    visible_TT = layout.materialize()
    return visible_TT if window is None else visible_TT & (position_T[:, None] - position_T < window)


def leaves_for(options, qkv):
    """Return the inputs to differentiate, with logits of the sinks where asked for; one dominates its head."""
    sinks_H = torch.linspace(-1, 3, qkv[0].shape[1], dtype=qkv[0].dtype).requires_grad_()
    return [*qkv, sinks_H] if options.get("sinks") else qkv


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """Tokens `start` to `end - 1` of a forest as queries, behind the root path of the first of them as context."""

    token_T: torch.Tensor  # the tokens of the forest, context first
    num_context: int
    subtree_end_T: torch.Tensor
    visible_QT: torch.Tensor  # from the whole forest's mask

    @classmethod
    def of_layout(cls, layout, *, start, end, window=None):
        """Cut a section, which may begin and end inside a node, at a branch or at a root."""
        ends_T = layout.subtree_end_T
        context_P = (ends_T[:start] > start).nonzero().squeeze(-1)
        token_T = torch.cat((context_P, torch.arange(start, end)))
        num_context = len(context_P)
        subtree_end_T = num_context + ends_T[token_T].clamp(max=end) - start
        return cls(token_T, num_context, subtree_end_T, within(layout, window)[start:end][:, token_T])

    def plan(self, **options):
        return AttentionPlan.from_subtree_end(self.subtree_end_T, num_context=self.num_context, **options)

    def inputs(self, q_THD, k_THD, v_THD, grad_out_THD):
        """Return the section's share of a forest's inputs: leaves q, k and v, and the gradient of the output."""
        query_Q = self.token_T[self.num_context :]
        rows = (query_Q, self.token_T, self.token_T, query_Q)
        *qkv, grad_out = (x.detach()[row] for x, row in zip((q_THD, k_THD, v_THD, grad_out_THD), rows, strict=True))
        return *(x.requires_grad_() for x in qkv), grad_out


def draw_section(rng, layout):
    """Draw where a section begins and ends. Half of them begin at a token with one of the longest root paths."""
    starts = layout.position_T.argsort()[-10:] if rng.random() < 0.5 else torch.arange(layout.num_tokens)
    start = int(rng.choice(starts))
    return Section.of_layout(layout, start=start, end=int(rng.integers(start, layout.num_tokens)) + 1)
