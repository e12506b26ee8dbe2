"""The chunked state space recurrence of Mamba-2 on a forest, in torch.

Along each path, for each head, with the state S (N, P) of the token before (zero before a root)::

    S   = exp(g) S + b x^T
    out = S^T c

The heads of a group share `b` and `c`. Chunks as in "Transformers are SSMs" (arXiv 2405.21060), section 6; what is new
in a tree is as in `delta_rule`. A token writes the same whatever the state is, so what a chunk adds to the states that
are read in it is computed for all chunks at once, and a step from chunk to chunk is one multiplication and one sum.

Everything is float32 whatever the dtype of the inputs, and float64 for float64.

Legend: T tokens, G groups of J heads, N state dim, P head dim, M chunks of C slots, R reads, E states
of a context.
"""

import torch
from torch import Tensor

from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.tree.plan import States


def tree_ssd(
    c_TGN: Tensor,
    b_TGN: Tensor,
    x_TGJP: Tensor,
    *,
    g_TGJ: Tensor,
    chunks: TreeChunks,
    states: States | None = None,
) -> Tensor:
    """Compute Mamba-2's recurrence along the paths of a forest, (T, G, J, P) in float32 or float64; differentiable.

    `g_TGJ` are logarithms of decays, at most 0. `states` (., G, J, N, P) are those that cross calls, if the chunks are
    of a relayed call.
    """
    assert states is not None or not (chunks.num_entered or chunks.left_L is not None), "states that cross calls"
    with torch.autocast(x_TGJP.device.type, enabled=False):
        dtype = torch.float64 if x_TGJP.dtype == torch.float64 else torch.float32
        c, b = (each[chunks.token_MC].transpose(1, 2).to(dtype) for each in (c_TGN, b_TGN))  # (M, G, C, N)
        x, g = (each[chunks.token_MC].movedim(1, 3).to(dtype) for each in (x_TGJP, g_TGJ.unsqueeze(-1)))
        before = chunks.before_MCC[:, None, None]
        # Products with a mask add exact zeros for tokens that are not on the path: no branch sees another.
        decay = before.to(dtype) @ g  # (M, G, J, C, 1), from the top of the chunk
        difference = decay - decay.transpose(-1, -2)
        # Masked before `exp`: an infinite factor would make the gradient of a masked entry undefined.
        between = difference.masked_fill(~before, -torch.inf).exp()
        inside = ((c @ b.transpose(-1, -2)).unsqueeze(2) * between) @ x
        before_E = states.enter(b_TGN, x_TGJP, g_TGJ) if states is not None and chunks.num_entered else None
        entered, left = _scan(b, x, decay=decay, between=between, chunks=chunks, entered=before_E)
        out = inside + decay.exp() * torch.einsum("mgcn,mgjnp->mgjcp", c, entered)
        out = out.movedim(3, 1).flatten(0, 1)[chunks.slot_T]
        return out if states is None or left is None else states.leave(out, left)


def _scan(
    b: Tensor, x: Tensor, *, decay: Tensor, between: Tensor, chunks: TreeChunks, entered: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Run through the chunks step by step, from the states `entered` (E, G, J, N, P) of other calls, if there are any.

    Return the states that the chunks are entered with, (M, G, J, N, P), and those after the cut tokens.
    """
    num_slots = x.shape[3]
    chunk_R, slot_R = chunks.read_slot_R // num_slots, chunks.read_slot_R % num_slots
    weighted = between[chunk_R, :, :, slot_R].unsqueeze(-1) * x[chunk_R]  # (R, G, J, C, P)
    added = torch.einsum("rgcn,rgjcp->rgjnp", b[chunk_R], weighted)
    kept = decay[chunk_R, :, :, slot_R].exp().unsqueeze(-1)  # (R, G, J, 1, 1)
    entries, read = [], []
    states = x.new_zeros(1, *x.shape[1:3], b.shape[-1], x.shape[-1])
    if entered is not None:
        states = torch.cat((entered, states))  # so -1 is zero
    for step in range(chunks.num_steps):
        first, end = chunks.chunk_bounds[step : step + 2]
        if step == 0 and entered is None:
            state = states.expand(end - first, -1, -1, -1, -1)
        else:
            state = states[chunks.entry_M[first:end]]
        entries.append(state)
        reads = slice(*chunks.read_bounds[step : step + 2])
        states = added[reads] + kept[reads] * state[chunk_R[reads] - first]
        if chunks.left_L is not None:
            read.append(states)
    return torch.cat(entries), None if chunks.left_L is None else torch.cat(read)[chunks.left_L]
