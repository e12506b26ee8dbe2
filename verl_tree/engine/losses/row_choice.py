"""Live rows of which an update computes some, drawn at random, if it is to compute fewer tokens (`tree.keep_tokens`).

Row i is kept with probability p_i and then weighs 1 / p_i, so the gradient is the same on average. What a row adds to
the squared error of the gradient is (1 / p_i - 1) |g_i|^2, and it costs the tree tokens that only it has, c_i. Least
error at a given cost has p_i ~ |g_i| / sqrt(c_i), and |g_i| is taken to be as large as the weights of its tokens: the
root of the sum of their squares. `benchmarks/row_choice.py` compares that with other rules (docs/advantages.md).

verl's losses of live rows are proportional to the advantages, so the weight of a row goes there.

Legend: B rows of a mini-batch, S live ones, N nodes of their forest.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

from verl_tree.engine.losses.live_rows import token_weights
from verl_tree.engine.rows.columns import jagged
from verl_tree.tree import TokenForest

Floats = NDArray[np.float64]
_LEAST = 1e-300
"""In place of 0 under a logarithm."""


def choose_rows(data: TensorDict, live: NDArray[np.bool_], *, share: float) -> NDArray[np.bool_]:
    """Draw live rows, and give their weights to `data["advantages"]`; return which are kept, (B,).

    `share` is the part of the live rows' tree tokens that is computed on average. The draw depends on the rows alone,
    so ranks that have the same rows draw alike.
    """
    weight, row_of = token_weights(data)
    sizes_B = np.sqrt(np.bincount(row_of, weight.square(), minlength=len(data)))
    rows, ids = np.flatnonzero(live), data["input_ids"].unbind(dim=0)
    if not np.isfinite(sizes_B).all() or not len(rows):
        return live  # the loss shows what is wrong
    tokens = [ids[row].cpu().numpy() for row in rows.tolist()]
    p_S = probabilities(TokenForest.from_sequences(tokens), sizes_B[rows], share=share)
    seed = [crc32(np.concatenate(tokens).tobytes()), crc32(sizes_B.tobytes())]
    kept_S = np.random.default_rng(seed).random(len(rows)) < p_S
    weight_B = np.zeros(len(data))
    weight_B[rows[kept_S]] = 1.0 / p_S[kept_S]
    values, offsets = jagged(data["advantages"])
    of_tokens = torch.from_numpy(weight_B)[row_of].to(values)
    data["advantages"] = torch.nested.nested_tensor_from_jagged(values * of_tokens, offsets)
    return weight_B > 0


def probabilities(forest: TokenForest, sizes_S: Sequence[float] | Floats, *, share: float) -> Floats:
    """Return with which probability each row is kept, (S,), so that the mean of the tree tokens is `share` of all."""
    sizes_S = np.asarray(sizes_S, dtype=np.float64)
    in_order = sizes_S[forest.order] / np.sqrt(_own_tokens(forest))
    node_lens = forest.node_end - forest.node_start
    low, high = 0.0, 1.0 / in_order.min()
    # At the upper end every row is kept.
    for _ in range(100):
        scale = (low + high) / 2
        p = np.minimum(1.0, scale * in_order)
        # A token is computed unless all rows below it are left out.
        missed = np.concatenate([[0.0], np.cumsum(np.log(np.maximum(1.0 - p, _LEAST)))])
        is_there_N = -np.expm1(missed[forest.node_last_leaf] - missed[forest.node_first_leaf])
        low, high = (low, scale) if node_lens @ is_there_N > share * forest.num_tokens else (scale, high)
    p_S = np.empty(len(in_order))
    p_S[forest.order] = np.minimum(1.0, high * in_order)
    return p_S


def _own_tokens(forest: TokenForest) -> NDArray[np.int64]:
    """Count the tokens that no other row has, in DFS order, (S,); at least 1."""
    shared = np.maximum(forest.lcp, np.append(forest.lcp[1:], 0))
    return np.maximum(forest.sequence_lens[forest.order] - shared, 1)
