"""Attention and its gradients, rounded where a flash kernel rounds: what a correct kernel may err.

Flash kernels multiply on tensor cores. So the probabilities, the gradients of the scores and all results are rounded to
the dtype of the inputs; sums are kept in float32. This is done here by plain matrix products over the whole mask, with
the backward pass written out, so it shares no code with any backend. In float64 nothing is rounded.

Legend: Q queries, T keys, Hq query heads, Hkv key-value heads, H heads of either, D head dim.
"""

import torch


def rounded_attention(
    inputs: list[torch.Tensor],
    grad_out_QHD: torch.Tensor,
    visible_QT: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
) -> dict[str, torch.Tensor]:
    """Return `out`, `dq`, `dk`, `dv` and, where there are sinks, `dsinks`, in the dtype of the inputs.

    Args:
        inputs: Queries (Q, Hq, D), keys and values (T, Hkv, D), and optionally the logits of the sinks (Hq,).
        grad_out_QHD: Gradient of the output.
        visible_QT: What each query sees, bool.
        scale: Factor on the scores.
        softcap: Bound of the scores.
    """
    q_QHD, k_THD, v_THD, *sinks = inputs
    dtype = q_QHD.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    num_groups = q_QHD.shape[1] // k_THD.shape[1]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(wide)

    q_HQD, grad_out_HQD = (x.to(wide).transpose(0, 1) for x in (q_QHD, grad_out_QHD))
    k_HTD, v_HTD = (x.to(wide).transpose(0, 1).repeat_interleave(num_groups, 0) for x in (k_THD, v_THD))
    scores_HQT = q_HQD @ k_HTD.mT * scale
    if softcap is not None:
        scores_HQT = softcap * (scores_HQT / softcap).tanh()
    slope_HQT = 1.0 if softcap is None else 1 - (scores_HQT / softcap).square()
    scores_HQT = scores_HQT.masked_fill_(~visible_QT, -torch.inf)
    most_HQ1 = scores_HQT.amax(-1, keepdim=True)
    probs_HQT = scores_HQT.sub_(most_HQ1).exp_()
    total_HQ1 = probs_HQT.sum(-1, keepdim=True)
    sinks_HQ1 = [(each.to(wide)[:, None, None] - most_HQ1).exp() for each in sinks]
    total_HQ1 = total_HQ1 + sum(sinks_HQ1)
    out_HQD = rounded(rounded(probs_HQT) @ v_HTD / total_HQ1)

    probs_HQT /= total_HQ1
    delta_HQ1 = (grad_out_HQD * out_HQD).sum(-1, keepdim=True)
    dscores_HQT = rounded(probs_HQT * (grad_out_HQD @ v_HTD.mT - delta_HQ1) * slope_HQT)
    of_heads = {
        "dk": scale * dscores_HQT.mT @ q_HQD,
        "dv": rounded(probs_HQT).mT @ grad_out_HQD,
    }
    results = {"out": out_HQD, "dq": scale * dscores_HQT @ k_HTD}
    results |= {name: x_HTD.unflatten(0, (-1, num_groups)).sum(1) for name, x_HTD in of_heads.items()}
    results = {name: x_HTD.transpose(0, 1).to(dtype) for name, x_HTD in results.items()}
    if sinks:
        results["dsinks"] = -(sinks_HQ1[0] / total_HQ1 * delta_HQ1).sum((1, 2)).to(dtype)
    return results


def worst_token_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest relative error of a token of a head; infinite where anything is not a number.

    The error is the norm of the difference of a row of `got` and `want`, (tokens, H, D), over the norm of the wanted
    row or the root mean square of all rows, whichever is larger. So one wrong pair of one query shows. Gradients of
    sinks, (Hq,), are one row.
    """
    if not torch.isfinite(got).all():
        return float("inf")
    norm_R = want.norm(dim=-1)
    return ((got.double() - want.double()).norm(dim=-1) / norm_R.clamp(min=_mean_norm(norm_R, want))).max().item()


def mean_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root mean square of the differences of all rows over that of the wanted rows."""
    if not torch.isfinite(got).all():
        return float("inf")
    differences_R = (got.double() - want.double()).norm(dim=-1)
    return differences_R.square().mean().sqrt().item() / _mean_norm(want.norm(dim=-1), want)


def _mean_norm(norm_R: torch.Tensor, want: torch.Tensor) -> float:
    """Return the root mean square of the rows' norms.

    Where every query sees itself only, the gradients of queries and keys are zero but for rounding. Errors of such rows
    count as if the rows had elements of one.
    """
    mean = norm_R.square().mean().sqrt().item()
    ones = want.shape[-1] ** 0.5
    return mean if mean > 1e-6 * ones else ones
