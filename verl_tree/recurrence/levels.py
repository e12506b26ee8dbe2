"""The nodes of a forest in the order in which a kernel for sequences of several lengths computes them.

Such a kernel takes sequences one after another, a state to start each of them with, and returns the state after each.
It reads no state in the middle of a sequence. So a node is a sequence, and starts with the state after its parent. The
nodes with children are computed level by level, one call for each. All nodes without children come last, in one call,
wherever they branch off: nobody waits for them, and their states need not be kept.

Example, 0 has the children 1 and 4, 1 has 2 and 3; 5 is a tree of its own::

    0 ┬ 1 ┬ 2        call 0: node 0           inner, starts with zero
      │   └ 3        call 1: node 1           inner, starts with state 0 of call 0
      └ 4            call 2: nodes 5 4 2 3    one starts with zero; of call 0: state 0; of call 1: states 0 and 0
    5

Legend: T tokens of a pack, N nodes of a call, M chunks of a call, L leaves, H heads, K key dim, V value dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device

VarlenKernel = Callable[..., tuple[Tensor, Tensor | None]]
"""`chunk_gated_delta_rule` of flash-linear-attention, or what takes its arguments and returns its results."""


@dataclass(frozen=True, slots=True, eq=False)
class LevelCall:
    """The nodes of one call. Tensors are int64, on the device.

    Attributes:
        num_tokens: Tokens of all nodes.
        cu_seqlens_N: (N + 1,) the first place of each node among the call's tokens, and one past the last.
        chunk_indices_M2: The node of each chunk, and the chunk's number in it.
        parent_N: The state of the call before that a node starts with. Empty in a call whose nodes start with zero, and
            in that of the leaves.
        leaf_parent_L: The state of this call that each leaf below it starts with, in the order of the leaves.
    """

    num_tokens: int
    cu_seqlens_N: Tensor
    chunk_indices_M2: Tensor
    parent_N: Tensor
    leaf_parent_L: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TreeLevels:
    """The calls of a pack.

    Attributes:
        token_T: int64, the tokens in the order of the calls.
        place_T: int64, the place of each token in that order.
        inner: One call for each level of the nodes with children.
        leaves: The call of the nodes without children, ordered by the level of their parents.
        num_root_leaves: How many of these start with zero. They come first.
        num_nodes: Nodes of all calls.
    """

    token_T: Tensor
    place_T: Tensor
    inner: tuple[LevelCall, ...]
    leaves: LevelCall
    num_root_leaves: int
    num_nodes: int

    @classmethod
    def of_plan(cls, plan: AttentionPlan, *, chunk_size: int) -> Self:
        """Return the calls for a kernel with chunks of `chunk_size` tokens, ordered once for all layers."""
        return plan.once(("levels", chunk_size), lambda plan: cls._order(plan, chunk_size=chunk_size))

    @classmethod
    def _order(cls, plan: AttentionPlan, *, chunk_size: int) -> Self:
        start, last, parent = plan.runs.behind_context()
        level = np.zeros(len(start), dtype=np.int64)
        for node in np.flatnonzero(parent >= 0):  # a parent comes before its children
            level[node] = level[parent[node]] + 1
        is_inner = np.isin(np.arange(len(start)), parent)
        leaves = np.flatnonzero(~is_inner)
        leaves = leaves[np.argsort(level[leaves], kind="stable")]
        calls = [np.flatnonzero(is_inner & (level == each)) for each in range(level[is_inner].max(initial=-1) + 1)]
        state = np.full(len(start), -1)  # of a node in its call
        for nodes in calls:
            state[nodes] = np.arange(len(nodes))
        calls.append(leaves)

        order = np.concatenate(calls)
        token_T = np.concatenate([np.arange(start[node], last[node] + 1) for node in order])
        place_T = np.empty_like(token_T)
        place_T[token_T] = np.arange(len(token_T))
        arrays, lens = [token_T, place_T], []
        for each, nodes in enumerate(calls):
            starting = nodes if 0 < each < len(calls) - 1 else nodes[:0]
            below = leaves[level[leaves] == each + 1]
            segments = _segments(last[nodes] - start[nodes] + 1, chunk_size=chunk_size)
            arrays += [*segments, state[parent[starting]], state[parent[below]]]
            lens.append(int(segments[0][-1]))
        token_T, place_T, *of_calls = to_device([torch.from_numpy(each) for each in arrays], plan.subtree_end_T.device)
        *inner, last_call = (LevelCall(num, *of_calls[4 * each : 4 * each + 4]) for each, num in enumerate(lens))
        return cls(
            token_T,
            place_T,
            inner=tuple(inner),
            leaves=last_call,
            num_root_leaves=int((parent[leaves] < 0).sum()),
            num_nodes=len(start),
        )


def _segments(lens_N: np.ndarray, *, chunk_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `cu_seqlens_N` and `chunk_indices_M2` of nodes of so many tokens."""
    chunks_N = -(-lens_N // chunk_size)
    node_M = np.repeat(np.arange(len(lens_N)), chunks_N)
    chunk_M = np.arange(len(node_M)) - np.repeat(np.cumsum(chunks_N) - chunks_N, chunks_N)
    return np.append(0, np.cumsum(lens_N)), np.stack([node_M, chunk_M], axis=1)


def rule_by_levels(
    kernel: VarlenKernel,
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    *,
    g_TH: Tensor,
    beta_TH: Tensor,
    levels: TreeLevels,
    normalizes: bool,
) -> Tensor:
    """Compute the gated delta rule as `tree_gated_delta_rule` does, with a kernel that is called once for each level.

    Gradients go through the states, so the kernel must take that of a final state and return that of an initial one.
    """
    calls = (*levels.inner, levels.leaves)
    lens = [call.num_tokens for call in calls]
    # `split` has one backward for all calls. One for each slice would write all tokens each time.
    by_call = zip(
        *(x.index_select(0, levels.token_T).split(lens) for x in (q_THK, k_THK, v_THV, g_TH, beta_TH)), strict=True
    )
    outs: list[Tensor] = []
    of_leaves: list[Tensor] = []
    state: Tensor | None = None
    for call, (q, k, v, g, beta) in zip(calls, by_call, strict=True):
        is_last = call is levels.leaves
        # Children of one parent add up their gradients. Unlike those of `index_select`, these sums repeat on a GPU.
        if state is None:
            starting = None
        elif is_last:
            starting = torch.cat([state.new_zeros(levels.num_root_leaves, *state.shape[1:]), *of_leaves])
        else:
            starting = state[call.parent_N]
        out, state = kernel(
            q.unsqueeze(0),
            k.unsqueeze(0),
            v.unsqueeze(0),
            g=g.unsqueeze(0),
            beta=beta.unsqueeze(0),
            initial_state=starting,
            output_final_state=not is_last,
            use_qk_l2norm_in_kernel=normalizes,
            cu_seqlens=call.cu_seqlens_N,
            chunk_indices=call.chunk_indices_M2,
        )
        outs.append(out.squeeze(0))
        if state is not None:
            of_leaves.append(state[call.leaf_parent_L])
    return torch.cat(outs).index_select(0, levels.place_T)
