"""The chunked gated delta rule on a forest, in torch.

Along each path, for each head, with the state S (K, V) of the token before (zero before a root)::

    S' = exp(g) S
    S  = S' + k (beta (v - S'^T k))^T
    out = S^T q

Inside a chunk the recurrence is solved for all tokens at once, as in "Parallelizing Linear Transformers with the Delta
Rule over Sequence Length" (arXiv 2406.06484) and "Gated Delta Networks" (arXiv 2412.06464). What is new in a tree:
"before" is the ancestor relation, decays add up along paths, and a state is read after any token of a chunk.

Queries, keys, decays and states are float32 whatever the dtype of the inputs, and float64 for float64.

Legend: T tokens, H heads, K key dim, V value dim, M chunks of C slots, R reads, E states of the context.
"""

import torch
from torch import Tensor

from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.tree.plan import States

L2_NORM_EPS = 1e-6
"""Of transformers' and flash-linear-attention's kernels."""


def tree_gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    *,
    g_TH: Tensor,
    beta_TH: Tensor,
    chunks: TreeChunks,
    normalizes: bool = True,
    states: States | None = None,
) -> Tensor:
    """Compute the gated delta rule along the paths of a forest, (T, H, V) in the dtype of the queries; differentiable.

    `g_TH` are logarithms of decays, at most 0. With `normalizes`, queries and keys get the length 1, in their own
    dtype, as transformers' layers ask for. Queries are then divided by sqrt(K). `states` (., H, K, V) are those that
    cross calls, if the chunks are of a relayed call.
    """
    assert states is not None or not (chunks.num_entered or chunks.left_L is not None), "states that cross calls"
    with torch.autocast(q_THK.device.type, enabled=False):
        dtype = torch.float64 if q_THK.dtype == torch.float64 else torch.float32
        if normalizes:
            q_THK, k_THK = _normalized(q_THK), _normalized(k_THK)
        by_token = (q_THK, k_THK, v_THV, g_TH.unsqueeze(-1), beta_TH.unsqueeze(-1))
        q, k, v, g, beta = (x[chunks.token_MC].transpose(1, 2).to(dtype) for x in by_token)  # (M, H, C, .)
        q = q * q.shape[-1] ** -0.5
        before = chunks.before_MCC.unsqueeze(1)
        # Products with a mask add exact zeros for tokens that are not on the path: no branch sees another.
        decay = before.to(dtype) @ g
        difference = decay - decay.transpose(-1, -2)
        # Masked before `exp`: an infinite factor would make the gradient of a masked entry undefined.
        between = difference.masked_fill(~before, -torch.inf).exp()
        entered = states.enter(k_THK, v_THV, g_TH, beta_TH) if states is not None and chunks.num_entered else None
        out, left = _scan(q, k, v, beta=beta, decay=decay, between=between, chunks=chunks, entered=entered)
        out = out.transpose(1, 2).flatten(0, 1)[chunks.slot_T].to(q_THK.dtype)
        return out if states is None or left is None else states.leave(out, left)


def _scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    decay: Tensor,
    between: Tensor,
    chunks: TreeChunks,
    entered: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run through the chunks step by step; all but the states `entered` (E, H, K, V) are (M, H, C, .).

    `decay` is summed from the top of the chunk, `between` its exponential from token to token, 0 off the path. Return
    the output, and the states after the cut tokens, if there are any.
    """
    strictly = (k @ k.transpose(-1, -2) * between * beta).tril(-1)
    # Written values, and how the entering state changes them.
    right = torch.cat((v * beta, k * (beta * decay.exp())), dim=-1)
    solved = torch.linalg.solve_triangular(
        strictly + torch.eye(strictly.shape[-1], dtype=strictly.dtype, device=strictly.device),
        right,
        upper=False,
        unitriangular=True,
    )
    written, erased = solved.split((v.shape[-1], k.shape[-1]), dim=-1)

    # A state that is read: what the chunk has written up to there, and what is left of the state it was entered with.
    size = q.shape[2]
    chunk_R, slot_R = chunks.read_slot_R // size, chunks.read_slot_R % size
    keys_read = (k[chunk_R] * between[chunk_R, :, slot_R].unsqueeze(-1)).transpose(-1, -2)  # (R, H, K, C)
    kept_read = decay[chunk_R, :, slot_R].exp().unsqueeze(-1)  # (R, H, 1, 1)
    entries, written_all, read = [], [], []
    states = v.new_zeros(1, k.shape[1], k.shape[-1], v.shape[-1])
    if entered is not None:
        states = torch.cat((entered, states))  # so -1 is zero
    for step in range(chunks.num_steps):
        first, end = chunks.chunk_bounds[step : step + 2]
        if step == 0 and entered is None:
            state = states.expand(end - first, -1, -1, -1)
            values = written[first:end]
        else:
            state = states[chunks.entry_M[first:end]]
            values = written[first:end] - erased[first:end] @ state
        entries.append(state)
        written_all.append(values)
        reads = slice(*chunks.read_bounds[step : step + 2])
        chunk = chunk_R[reads] - first
        states = keys_read[reads] @ values[chunk] + kept_read[reads] * state[chunk]
        if chunks.left_L is not None:
            read.append(states)
    inside = (q @ k.transpose(-1, -2) * between) @ torch.cat(written_all)
    out = inside + (q * decay.exp()) @ torch.cat(entries)
    return out, None if chunks.left_L is None else torch.cat(read)[chunks.left_L]


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_NORM_EPS)
