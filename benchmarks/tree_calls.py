"""Calls of tree attention for the checks: drawn inputs, results with gradients, the mask, memory filled with NaN."""

import torch
from check_cases import Layer

from verl_tree.attention import AttentionPlan, tree_attention


def random_inputs(layer: Layer, plan: AttentionPlan, *, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Draw queries, keys, values and, where asked for, sinks; and the gradient of the output. The same for all."""
    generator = torch.Generator(device=device).manual_seed(plan.num_tokens + layer.head_dim)
    num_heads, num_kv_heads = layer.heads

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(layer.torch_dtype)

    queries = (plan.num_queries, num_heads, layer.head_dim)
    keys = (plan.num_tokens, num_kv_heads, layer.head_dim)
    inputs, grad_out = [random(*shape) for shape in (queries, keys, keys)], random(*queries)
    return [*inputs, *([random(num_heads)] if layer.sinks else [])], grad_out


def results_of(
    backend: str,
    layer: Layer,
    plan: AttentionPlan,
    inputs: list[torch.Tensor],
    grad_out: torch.Tensor,
    *,
    fill: bool = False,
) -> dict[str, torch.Tensor]:
    """Return `out`, `dq`, `dk`, `dv` and, where there are sinks, `dsinks`. `fill`: in memory full of NaN."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    num_bytes = 2 * sum(each.numel() * 4 for each in (*inputs, grad_out))
    asked = {"window": layer.window, "softcap": layer.softcap, "sinks": leaves[3] if layer.sinks else None}
    if fill:
        poison(num_bytes)
    out = tree_attention(*leaves[:3], plan, backend=backend, **asked)
    if fill:
        poison(num_bytes)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    names = ("out", "dq", "dk", "dv", "dsinks")[: 1 + len(leaves)]
    return dict(zip(names, (out.detach(), *gradients), strict=True))


def visible_pairs(
    plan: AttentionPlan, *, window: int | None = None, queries: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what each query sees, (Q, T) bool; with `queries` (row numbers of q) only the rows of these."""
    end_T, position_T = plan.subtree_end_T, plan.position_T
    key_T = torch.arange(plan.num_tokens, device=end_T.device)
    token_Q = key_T[plan.num_context :] if queries is None else queries + plan.num_context
    visible_QT = (key_T <= token_Q[:, None]) & (token_Q[:, None] < end_T)
    return visible_QT if window is None else visible_QT & (position_T[token_Q, None] - position_T < window)


def poison(num_bytes: int) -> None:
    """Leave NaN in what the caching allocator of the GPU will hand out next, in blocks of several sizes."""
    blocks = [torch.full((max(num_bytes >> shift, 512) // 4,), torch.nan, device="cuda") for shift in range(6)]
    del blocks
