"""The tree mask in flash-attn-4's Hopper kernels. This module can be imported only with the extra `fa4`.

The kernels are called directly, not through `flash_attn_func`, so that we choose what is saved for the backward pass.
They skip the tiles that no table names, and apply `tree_mask` to partial tiles only.

We rely on three properties of 4.0.0b36 (flash_attn/cute/block_sparse_utils.py, mask.py and flash_fwd_sm90.py):

- A list is visited from its end. The forward kernel masks what lies past the last token only in the first partial tile
  it visits. So lists must ascend.
- Where a tile reaches past the last key, `tree_mask` gets the key modulo the number of keys. So `subtree_end` needs no
  padding.
- `seqlen_info` counts the queries and keys of the call. A query counts once, also where its heads are packed.

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

# The extra `fa4` is not installed where types are checked.
# pyright: reportMissingImports=false

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
import cutlass.cute as cute
import torch
from flash_attn.cute import flash_bwd_sm90, interface, utils
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from flash_attn.cute.tile_scheduler import SingleTileScheduler

if "block_sparse_tensors_bwd" not in inspect.signature(interface.flash_attn_func).parameters:
    raise ImportError(
        f"{interface.__file__} has no block-sparse backward: an older copy, such as flash-attn (FA2) ships, hides "
        "flash-attn-4"
    )


@cute.jit
def tree_mask(_batch, _head, query, key, seqlen_info, aux_tensors):
    """Return `key <= token < subtree_end[key]` for the token of a query, which the kernel gives by its row.

    The kernel asks pair by pair, with vectors of one element.
    """
    token = query + utils.scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, cutlass.Int32)
    subtree_end = utils.scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
    return (key <= token) & (token < subtree_end)


@cute.jit
def heads_first_tree_mask(batch, head, query, key, seqlen_info, aux_tensors):
    """Return what `tree_mask` does.

    flash-attn-4 finds a compiled kernel by its mask, so the kernel of another order of programs needs a mask of its
    own.
    """
    return tree_mask(batch, head, query, key, seqlen_info, aux_tensors)


class HeadsFirstScheduler(SingleTileScheduler):
    """Order of the backward pass's programs: all heads of a key block, then those of the next block.

    flash-attn-4's own order is all key blocks of a head, then those of the next head. Then the last head's root, whose
    list is the longest, starts late and runs alone. Here the grid is (heads, blocks, batch).
    """

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):  # noqa: ARG004, upstream's signature
        """Return the scheduler of one program, which it knows by its place in the grid."""
        head, block, batch = cute.arch.block_idx()
        return SingleTileScheduler(params, (block, head, batch), loc=loc, ip=ip)

    @staticmethod
    def get_grid_shape(params, *, loc=None, ip=None):
        """Return the number of programs in every dimension of the grid."""
        num_blocks, num_heads, num_batches = SingleTileScheduler.get_grid_shape(params, loc=loc, ip=ip)
        return num_heads, num_blocks, num_batches


_scheduler_lock = threading.Lock()


@contextmanager
def _order_of_programs(*, heads_first: bool) -> Iterator[None]:
    """Compile backward kernels with the scheduler of an order.

    The kernel reads its scheduler's class from a name of its module and takes no other, so the name is set for the
    time of one call. All threads see it. So calls of either order take turns, or one would be compiled with the other's
    scheduler and kept.
    """
    with _scheduler_lock:
        flash_bwd_sm90.SingleTileScheduler = HeadsFirstScheduler if heads_first else SingleTileScheduler
        try:
            yield
        finally:
            flash_bwd_sm90.SingleTileScheduler = SingleTileScheduler


def forward(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    subtree_end_T: torch.Tensor,
    *,
    key_tables: tuple[torch.Tensor, ...],
    block_lens: tuple[int, int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (Q, Hq, D) and log-sum-exp, float32 (1, Hq, Q), of one pack in bf16 or fp16 on an SM90 device.

    `key_tables` are the key blocks of every query block (`BlockRows.tables`), `block_lens` the queries and keys of a
    block.
    """
    # How many values follow the two differs between betas.
    out_1QHD, lse_1HQ, *_ = interface._flash_attn_fwd(
        q_QHD.unsqueeze(0),
        k_THD.unsqueeze(0),
        v_THD.unsqueeze(0),
        softmax_scale=scale,
        mask_mod=tree_mask,
        block_sparse_tensors=_block_sparse(key_tables, block_lens),
        aux_tensors=[subtree_end_T],
        # Always on, also without gradients. Off would select another kernel, which no self-test has run.
        return_lse=True,
    )
    return out_1QHD.squeeze(0), lse_1HQ


def backward(
    grad_out_QHD: torch.Tensor,
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    out_QHD: torch.Tensor,
    lse_1HQ: torch.Tensor,
    subtree_end_T: torch.Tensor,
    *,
    query_tables: tuple[torch.Tensor, ...],
    block_lens: tuple[int, int],
    scale: float,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of queries, keys and values from the inputs and results of `forward`.

    `query_tables` are the query blocks of every key block (`BlockRows.tables`), `block_lens` the queries and keys of a
    block. `heads_first` is the order of `HeadsFirstScheduler`.
    """
    with _order_of_programs(heads_first=heads_first):
        gradients = interface._flash_attn_bwd(
            q_QHD.unsqueeze(0),
            k_THD.unsqueeze(0),
            v_THD.unsqueeze(0),
            out_QHD.unsqueeze(0),
            grad_out_QHD.unsqueeze(0),
            lse_1HQ,
            softmax_scale=scale,
            mask_mod=heads_first_tree_mask if heads_first else tree_mask,
            block_sparse_tensors=_block_sparse(query_tables, block_lens),
            aux_tensors=[subtree_end_T],
        )
    dq_1QHD, dk_1THD, dv_1THD = gradients
    return dq_1QHD.squeeze(0), dk_1THD.squeeze(0), dv_1THD.squeeze(0)


def _block_sparse(tables: tuple[torch.Tensor, ...], block_lens: tuple[int, int]) -> BlockSparseTensorsTorch:
    num_partial_11R, partial_11RW, num_full_11R, full_11RW = tables
    return BlockSparseTensorsTorch(
        mask_block_cnt=num_partial_11R,
        mask_block_idx=partial_11RW,
        full_block_cnt=num_full_11R,
        full_block_idx=full_11RW,
        block_size=block_lens,
    )
