"""From tree tokens back to trajectories: the expansion, which restores the flat gradient.

`expand` gathers values of tree tokens to (leaf, token) pairs, where any flat loss can read them. Its backward adds up
the pairs of one token, which is the flat gradient for every loss (docs/gradient_restoration.md). A weight on the pairs'
gradients declares another objective for shared tokens.

Legend: T tree tokens, F flat tokens = (leaf, token) pairs, S trajectories.
"""

from typing import Any

import torch
from torch import Tensor

from verl_tree.tree.layout import TreeLayout

SHARED_TOKEN_MODES = ("sum", "mean", "once")


def expand(
    values_T: Tensor,
    layout: TreeLayout,
    *,
    gradient_weight_F: Tensor | None = None,
    pairs: Tensor | slice = slice(None),
) -> Tensor:
    """Gather values of tree tokens, (T,) or (T, ...), to the trajectories of the pack, (F,) or (F, ...).

    The result is leaf after leaf, as in `layout.leaves` and `layout.leaf_offsets`. `gradient_weight_F` (F,) multiplies
    the gradient of every (leaf, token) pair and leaves the values as they are. `pairs` selects some of the F pairs; the
    weights are then those of the selected ones.
    """
    values_F = values_T.index_select(0, layout.tree_index_F[pairs])
    return values_F if gradient_weight_F is None else scale_gradient(values_F, gradient_weight_F)


def scale_gradient(values: Tensor, weight: Tensor) -> Tensor:
    """Return `values` unchanged, their gradient multiplied by `weight` along the first dimension."""
    return _ScaleGradient.apply(values, weight)


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,), (weight,) = grad_outputs, ctx.saved_tensors
        weight = weight.to(gradient.dtype)
        return gradient * weight.reshape(-1, *(1,) * (gradient.dim() - 1)), None


def shared_token_weights(layout: TreeLayout, trained_F: Tensor, mode: str) -> Tensor:
    """Compute gradient weights for `expand` that declare how the leaves of a shared token train it.

    Args:
        layout: The pack, or the forest of a whole mini-batch.
        trained_F: (F,) bool, the (leaf, token) pairs that the loss trains.
        mode: "sum": every leaf trains the token, which is the flat objective. "mean": the leaves that train it are
            averaged. "once": only the first of them in DFS order trains it.

    Returns:
        (F,) float32. Pairs that are not trained get 1 with "sum" and 0 otherwise.

    Raises:
        ValueError: The mode does not exist.
    """
    if mode not in SHARED_TOKEN_MODES:
        raise ValueError(f"tree.shared_tokens is {mode!r}: use one of {', '.join(SHARED_TOKEN_MODES)}")
    if mode == "sum":
        return torch.ones(layout.num_flat_tokens, device=trained_F.device)
    if mode == "mean":
        num_training_T = torch.zeros(layout.num_tokens, device=trained_F.device).index_add(
            0, layout.tree_index_F, trained_F.float()
        )
        return trained_F / num_training_T[layout.tree_index_F].clamp(min=1)
    pair_F = torch.arange(layout.num_flat_tokens, device=trained_F.device)
    never = layout.num_flat_tokens
    first_T = torch.full((layout.num_tokens,), never, device=trained_F.device).scatter_reduce(
        0, layout.tree_index_F, torch.where(trained_F, pair_F, never), "amin"
    )
    return (first_T[layout.tree_index_F] == pair_F).float()
