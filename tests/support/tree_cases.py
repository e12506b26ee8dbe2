"""Forests of the tests of attention, log-probs and expansion, and their scores."""

import numpy as np
import torch
from tiny_models import VOCAB_SIZE

from verl_tree.packing import pack
from verl_tree.packing.counts import ForestCounts
from verl_tree.relay.run import Loss, RelayRun
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

# A tree five nodes deep, and a second root. 1 is a strict prefix of 0, 5 duplicates 0, 6 has one token.
DEEP = [
    [7, 3, 9, 4, 1, 8, 8, 2],
    [7, 3, 9, 4],
    [7, 3, 9, 4, 1, 5],
    [7, 3, 2, 2, 6],
    [7, 3, 9, 4, 1, 8, 6, 6, 0],
    [7, 3, 9, 4, 1, 8, 8, 2],
    [7],
    [12, 3, 9, 4],
    [7, 3, 9, 60, 11],
]


def random_sequences(
    rng: np.random.Generator, *, num_sequences: int, mean_len: int, vocab_size: int = VOCAB_SIZE
) -> list:
    """Draw trajectories that fork from, extend, repeat or cut short earlier ones, or start anew."""
    sequences: list[list[int]] = []

    def new_tokens() -> list[int]:
        return rng.integers(0, vocab_size, 1 + rng.geometric(1 / mean_len)).tolist()

    for _ in range(num_sequences):
        start = list(sequences[rng.integers(len(sequences))]) if sequences else []
        match rng.choice(
            ["root", "one token", "repeat", "prefix", "extend", "fork"], p=[0.08, 0.04, 0.08, 0.1, 0.2, 0.5]
        ):
            case "root":
                sequences.append(new_tokens())
            case "one token":
                sequences.append(start[:1] or [0])
            case "repeat":
                sequences.append(start or new_tokens())
            case "prefix":
                sequences.append(start[: rng.integers(1, len(start) + 1)] if start else new_tokens())
            case "extend":
                sequences.append(start + new_tokens())
            case "fork":
                sequences.append(start[: rng.integers(0, len(start) + 1)] + new_tokens())
    return sequences


def layout_of(sequences: list) -> TreeLayout:
    return TreeLayout.from_forest(TokenForest.from_sequences([np.asarray(sequence) for sequence in sequences]))


def flat_scores(
    model: torch.nn.Module, sequence: list, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (len - 1,) log-probs and entropies of one sequence, computed directly with the model's SDPA."""
    token_ids = torch.tensor([list(sequence)])
    logits = model(input_ids=token_ids, use_cache=False).logits[0, :-1] / temperature
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, token_ids[0, 1:, None]).squeeze(-1), -(log_probs.exp() * log_probs).sum(-1)


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the gradient of every parameter that the loss reaches."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: gradient for name, gradient in zip(named, found, strict=True) if gradient is not None}


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm, or over 1e-3 for (nearly) exact zeros."""
    return ((got - want).norm() / want.norm().clamp(min=1e-3)).item()


def union_num_tokens(forest, leaves):
    """Count the tree tokens of some leaves, which are distinct and in DFS order: the union of their root paths."""
    lens = forest.sequence_lens[np.asarray(leaves, dtype=np.int64)]
    return int(lens.sum() - forest.subset_lcp(leaves).sum())


def counts_of(sequences, *, capacity=10):
    """Count a forest and the packing made of it."""
    forest = TokenForest.from_sequences(sequences)
    packing = pack(forest, capacity=capacity)
    return ForestCounts(
        num_flat_tokens=forest.num_flat_tokens,
        num_tree_tokens=forest.num_tokens,
        num_packed_tokens=packing.num_tokens,
        num_nodes=forest.num_nodes,
        num_leaves=forest.num_leaves,
        num_packs=len(packing.packs),
        num_lower_bound_tokens=packing.lower_bound,
        num_capacity_tokens=packing.num_capacity_tokens or 0,
        depth=forest.depth,
    )


def run_all(run: RelayRun, loss: Loss) -> torch.Tensor:
    """Make all calls, with the backward of each; return the scores (C, T)."""
    for number in range(run.num_first):
        run.first(number)
    for number in range(run.num_last):
        run.last(number, loss).backward()
    return run.scores_CT
