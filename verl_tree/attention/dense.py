"""The oracle: a plain softmax under the boolean mask, for every device, dtype and option.

It shares no kernel with the fast backends. Queries are computed in blocks, and a block is recomputed in the backward
pass. So nothing of size T x T ever lives, but it is slow.

Legend: T tokens, the last Q of them queries; L queries and K keys of a block, H key-value heads, G query heads per
    key-value head, D head dim.
"""

import torch
from torch.utils.checkpoint import checkpoint

from verl_tree.attention.options import ScoreOptions
from verl_tree.tree.plan import AttentionPlan

QUERY_BLOCK_LEN = 512


def dense_attention(
    q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan, *, options: ScoreOptions
) -> torch.Tensor:
    """Compute attention as `AttentionBackend.attend`; values may have a head dim of their own."""
    subtree_end_T, position_T = plan.subtree_end_T.to(q_QHD.device), plan.position_T.to(q_QHD.device)
    blocks = []
    for start in range(0, plan.num_queries, QUERY_BLOCK_LEN):
        q_LHD = q_QHD[start : start + QUERY_BLOCK_LEN]
        # In DFS preorder, keys behind the block's last query are invisible to all its queries.
        end = plan.num_context + start + len(q_LHD)
        block = (q_LHD, k_THD[:end], v_THD[:end], subtree_end_T[:end], position_T[:end], options)
        blocks.append(checkpoint(_block_attention, *block, use_reentrant=False))
    return torch.cat(blocks)


def _block_attention(
    q_LHD: torch.Tensor,
    k_KHD: torch.Tensor,
    v_KHD: torch.Tensor,
    subtree_end_K: torch.Tensor,
    position_K: torch.Tensor,
    options: ScoreOptions,
) -> torch.Tensor:
    """Return the attention of the last L of K tokens to all K."""
    # Reduced precision keeps its scores and probabilities in float32, as flash kernels do.
    wide = torch.float32 if q_LHD.dtype in (torch.bfloat16, torch.float16) else q_LHD.dtype
    q_HGLD = q_LHD.to(wide).unflatten(1, (k_KHD.shape[1], -1)).permute(1, 2, 0, 3)
    k_HKD, v_HKD = k_KHD.to(wide).transpose(0, 1), v_KHD.to(wide).transpose(0, 1)
    scores_HGLK = (q_HGLD @ k_HKD.transpose(1, 2).unsqueeze(1)) * options.scale
    if options.softcap is not None:
        scores_HGLK = options.softcap * (scores_HGLK / options.softcap).tanh()
    visible_LK = _visible(subtree_end_K, position_K, num_queries=q_LHD.shape[0], window=options.window)
    scores_HGLK = scores_HGLK.masked_fill(~visible_LK, -torch.inf)
    if options.sinks_H is None:
        probs_HGLK = scores_HGLK.softmax(-1)
    else:
        sinks_HGL1 = options.sinks_H.to(wide).view(*q_HGLD.shape[:2], 1, 1).expand(*q_HGLD.shape[:3], 1)
        probs_HGLK = torch.cat((scores_HGLK, sinks_HGL1), dim=-1).softmax(-1)[..., :-1]
    out_LHGD = (probs_HGLK @ v_HKD.unsqueeze(1)).permute(2, 0, 1, 3)
    return out_LHGD.flatten(1, 2).to(q_LHD.dtype)


def _visible(
    subtree_end_K: torch.Tensor, position_K: torch.Tensor, *, num_queries: int, window: int | None
) -> torch.Tensor:
    """Return what the last L of K tokens see, (L, K) bool."""
    key_K = torch.arange(len(subtree_end_K), device=subtree_end_K.device)
    query_L = key_K[-num_queries:, None]
    visible_LK = (key_K <= query_L) & (query_L < subtree_end_K)
    if window is not None:
        visible_LK &= position_K[-num_queries:, None] - position_K < window
    return visible_LK
