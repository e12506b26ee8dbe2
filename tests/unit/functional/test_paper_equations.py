"""Gradient restoration, equation by equation of the Tree Training paper (section 2.3.2), inside a real model.

At every linear layer, the gradients of a tree token are the sums of those that the same token has in all sequences:

- 16: of what the layer returns, dY; 19: of what it takes, dX.
- 20: of what attention returns, dO (what `o_proj` takes).
- 21: of values, dV, and in the same way of queries and keys (what `v_proj`, `q_proj` and `k_proj` return).
- 23: queries and keys pass through RoPE between projection and attention, so their sums need the original positions.

The loss gives every (sequence, token) pair a coefficient of its own.
"""

from collections import defaultdict

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from tree_cases import DEEP, flat_scores, layout_of

from verl_tree.functional import tree_log_probs

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Gradients:
    """Records the gradients of what linear layers take and return: (tokens, features), one for each pass."""

    def __init__(self, model: nn.Module) -> None:
        self.found: defaultdict[str, list[Tensor]] = defaultdict(list)
        for name, module in model.named_modules():
            if name.endswith(LAYERS):
                module.register_forward_hook(self._watch(name))

    def _watch(self, name: str):
        def watch(_module, taken, returned) -> None:
            taken[0].register_hook(lambda grad: self.found[f"{name} dX"].append(grad[0]))
            returned.register_hook(lambda grad: self.found[f"{name} dY"].append(grad[0]))

        return watch


def coefficients() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(len(sequence) - 1, dtype=torch.float64, generator=generator) for sequence in DEEP]


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_gradient_of_a_shared_token_is_the_sum_over_its_sequences_in_every_layer(spoilt):
    """`spoilt` gives the copies' sum a wrong token, to see that the comparison can fail."""
    flat_model, tree_model = tiny_model(), tiny_model()
    flat, tree = Gradients(flat_model), Gradients(tree_model)
    coefficient = coefficients()
    scored = tree_log_probs(tree_model, DEEP).log_probs
    torch.stack([(c * log_probs).sum() for c, log_probs in zip(coefficient, scored, strict=True)]).sum().backward()
    for c, sequence in zip(coefficient, DEEP, strict=True):
        if len(sequence) > 1:
            (c * flat_scores(flat_model, sequence)[0]).sum().backward()

    layout = layout_of(DEEP)
    index_F, offsets = layout.tree_index_F, layout.leaf_offsets
    places = {int(leaf): index_F[offsets[i] : offsets[i + 1]] for i, leaf in enumerate(layout.leaves)}
    scored_sequences = [number for number, sequence in enumerate(DEEP) if len(sequence) > 1]
    assert len(tree.found) == 2 * 2 * len(LAYERS)
    errors = {}
    for name, (got_TE,) in tree.found.items():
        want_TE = torch.zeros_like(got_TE)
        for number, grad_SE in zip(scored_sequences, flat.found[name], strict=True):
            want_TE.index_add_(0, places[number], grad_SE)
        if spoilt:
            want_TE[1] = want_TE[2]
        errors[name] = float((got_TE - want_TE).abs().max() / want_TE.abs().max())
    assert all((error > 1e-3) == spoilt and (error < 1e-12) != spoilt for error in errors.values()), errors
