"""Attention sinks on top of a finished softmax.

A sink is a learnable logit per head that takes probability and gives no value: one more key with the value zero. It can
join after any kernel, from the output and the log-sum-exp alone:

    lse' = logaddexp(lse, sink),    out' = out * exp(lse - lse').

The probabilities of the other keys are `exp(score - lse')`, and `delta = sum(out' * grad_out)` is that of the whole
softmax. So a flash kernel's backward pass, called with `out'` and `lse'`, is right for queries, keys and values. The
gradient of the sink is `-p * delta` with `p = exp(sink - lse')`, summed over the queries.

Legend: Q queries, D head dim; x the dimensions of the heads, in any order and number.
"""

import torch


def absorb_sinks(out_xQD: torch.Tensor, lse_xQ: torch.Tensor, sinks_x1: torch.Tensor) -> None:
    """Add the sinks to the softmax of every query: `out_xQD` and `lse_xQ` change in place."""
    before_xQ = lse_xQ.clone()
    torch.logaddexp(before_xQ, sinks_x1, out=lse_xQ)
    out_xQD.mul_((before_xQ - lse_xQ).exp().unsqueeze(-1))


def sink_gradient(
    grad_out_xQD: torch.Tensor, out_xQD: torch.Tensor, lse_xQ: torch.Tensor, sinks_x1: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks' logits, (x), from the output and log-sum-exp with the sinks included."""
    return sink_gradient_of_delta((grad_out_xQD.to(lse_xQ.dtype) * out_xQD).sum(-1), lse_xQ, sinks_x1)


def sink_gradient_of_delta(delta_xQ: torch.Tensor, lse_xQ: torch.Tensor, sinks_x1: torch.Tensor) -> torch.Tensor:
    """Return `sink_gradient` from `delta = sum(out * grad_out)` of every query, if a backward pass has found it."""
    return -((sinks_x1 - lse_xQ).exp() * delta_xQ).sum(-1)
