"""Attention sinks on top of a finished softmax: a learnable logit per head that takes probability and gives no value.

A sink is one more key with the value zero. So a kernel of our own starts its sums with it, and for any other it joins
after the kernel, from the output and the log-sum-exp alone:

    lse' = logaddexp(lse, sink),    out' = out * exp(lse - lse').

The probabilities of the other keys are `exp(score - lse')`, and `delta = sum(out' * grad_out)` is that of the whole
softmax, so a flash kernel's backward pass that is called with `out'` and `lse'` is right for queries, keys and values.
The sink's own score gradient is `p * (0 - delta)` with `p = exp(sink - lse')`, summed over the queries.

Legend: T queries, D head dim; x the dimensions of the heads, in whatever order and number the caller has them.
"""

import torch


def absorb_sinks(out_xTD: torch.Tensor, lse_xT: torch.Tensor, sinks_x1: torch.Tensor) -> None:
    """Add the sinks to the softmax of every query, in place.

    Args:
        out_xTD: Output of the softmax without sinks.
        lse_xT: Its log-sum-exp.
        sinks_x1: Logits of the sinks, broadcast over the queries.
    """
    before_xT = lse_xT.clone()
    torch.logaddexp(before_xT, sinks_x1, out=lse_xT)
    out_xTD.mul_((before_xT - lse_xT).exp().unsqueeze(-1))


def sink_gradient(
    grad_out_xTD: torch.Tensor, out_xTD: torch.Tensor, lse_xT: torch.Tensor, sinks_x1: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks' logits.

    Args:
        grad_out_xTD: Gradient of the output.
        out_xTD: Output, sinks included.
        lse_xT: Log-sum-exp, sinks included.
        sinks_x1: Logits of the sinks.

    Returns:
        One number per head, (x), in the dtype of `lse_xT`.
    """
    return sink_gradient_of_delta((grad_out_xTD.to(lse_xT.dtype) * out_xTD).sum(-1), lse_xT, sinks_x1)


def sink_gradient_of_delta(delta_xT: torch.Tensor, lse_xT: torch.Tensor, sinks_x1: torch.Tensor) -> torch.Tensor:
    """Return `sink_gradient` where a backward pass has already found `delta = sum(out * grad_out)` of every query."""
    return -((sinks_x1 - lse_xT).exp() * delta_xT).sum(-1)
