"""Triton kernels of tree attention, forward and backward. Imported only where triton is installed and needed.

They run FlashAttention-2 (https://arxiv.org/abs/2307.08691) on the tiles of `verl_tree.attention.blocks`. A program
owns one block of queries: it walks the full tiles of its list without a mask, then the partial ones with
`key <= query < subtree_end[key]`. No other program writes its rows. There are no atomics and every sum has a fixed
order, so two runs give the same bits. The gradients of keys and values are in `triton_key_kernels.py`.

The index of the next tile is loaded an iteration ahead and carried through the loop. An address that is loaded in the
iteration that uses it leaves Triton nothing to prefetch, and ptxas runs one wgmma after the other.

Scores are in base 2 (`exp2` is one instruction); `lse` is the natural log-sum-exp. Sums are float32. A head dim that is
no power of two is padded with zeros in registers (`DIM` to `PADDED_DIM`). Offsets are int64 at the start of a block and
int32 inside it.

Sliding windows (`positions`, `window`), softcaps (`scale_tanh`) and attention sinks (`sinks`) are None where a layer
has none. Triton compiles the kernel anew for None, without a trace of the option. With a softcap, `scale_log2` is that
of the cap, since `softcap * tanh` takes the place of the score. A sink is one more key with the value zero, so the sum
of a row starts with it.

The first `num_context` tokens are keys only. So the query of row `i` is token `num_context + i`. Loads and stores go by
rows, the mask and the positions by tokens. The kernels are not specialised on this number nor on those of tokens and
heads, so all run the same code.

Legend: T tokens, the last Q of them queries, L queries and K keys of a tile, D head dim (padded), R row blocks, G query
    heads per key-value head.
"""

import triton
import triton.language as tl

from verl_tree.attention.triton_tiles import LN_2, LOG2_E, is_visible, is_within, load_row, load_tile, store_tile, tanh


@triton.jit
def _forward_tile(
    acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, key_start, num_tokens,
    stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
    KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_KD = load_tile(k, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    s_LK = tl.dot(q_LD, tl.trans(k_KD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_LK = tanh(s_LK * scale_tanh)
    if MASKED:
        key_K = key_start + tl.arange(0, KEY_BLOCK)
        end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
        visible_LK = is_visible(token_L[:, None], key_K[None, :], end_K[None, :])
        if window is not None:
            position_K = tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
            visible_LK &= is_within(position_L[:, None], position_K[None, :], window)
        s_LK = tl.where(visible_LK, s_LK, float("-inf"))
    new_max_L = tl.maximum(max_L, tl.max(s_LK, 1) * scale_log2)
    # The maximum of a row that has seen no key is -inf, and -inf - (-inf) would be NaN.
    base_L = tl.where(new_max_L == float("-inf"), 0.0, new_max_L) if MASKED else new_max_L
    p_LK = tl.exp2(s_LK * scale_log2 - base_L[:, None])
    rescale_L = tl.exp2(max_L - base_L)
    sum_L = sum_L * rescale_L + tl.sum(p_LK, 1)
    v_KD = load_tile(v, key_start, num_tokens, stride_vt, stride_vd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    acc_LD = tl.dot(p_LK.to(v_KD.dtype), v_KD, acc_LD * rescale_L[:, None], input_precision=PRECISION)
    return acc_LD, sum_L, new_max_L


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_rows", "num_heads", "window"])
def forward_kernel(
    q, k, v, subtree_end, out, lse, rows, indices,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
    num_tokens, num_context, num_rows, num_heads, num_groups, scale_log2, positions, window, scale_tanh, sinks,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output (Q, Hq, D) and log-sum-exp (Hq, Q) of one query block and one query head.

    Grid: R * Hq programs. Programs of one key-value head are neighbours, so that they read its keys and values from L2.
    Among them, those of one query block are neighbours.
    """
    program = tl.program_id(0)
    group = program % num_groups
    query_block, start, middle, end = load_row(rows, (program // num_groups) % num_rows, 4)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head = program // num_groups // num_rows
    head = kv_head * num_groups + group
    k += kv_head.to(tl.int64) * stride_kh
    v += kv_head.to(tl.int64) * stride_vh
    num_queries = num_tokens - num_context
    query_start = query_block * QUERY_BLOCK
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    token_L = num_context + query_L
    q_LD = load_tile(
        q + head.to(tl.int64) * stride_qh, query_start, num_queries, stride_qt, stride_qd, QUERY_BLOCK, DIM, PADDED_DIM,
        True,
    )  # fmt: skip
    position_L = None if positions is None else tl.load(positions + token_L, mask=query_L < num_queries, other=0)
    acc_LD = tl.zeros((QUERY_BLOCK, PADDED_DIM), tl.float32)
    if sinks is not None:
        sum_L = tl.full((QUERY_BLOCK,), 1.0, tl.float32)
        max_L = tl.zeros((QUERY_BLOCK,), tl.float32) + tl.load(sinks + head) * LOG2_E
    else:
        sum_L = tl.zeros((QUERY_BLOCK,), tl.float32)
        max_L = tl.full((QUERY_BLOCK,), float("-inf"), tl.float32)
    block = tl.load(indices + start)
    for position in range(start, middle):
        acc_LD, sum_L, max_L = _forward_tile(
            acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, block * KEY_BLOCK, num_tokens,
            stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
            KEY_BLOCK, DIM, PADDED_DIM, PRECISION, False,
        )  # fmt: skip
        block = tl.load(indices + tl.minimum(position + 1, end - 1))
    for position in range(middle, end):
        acc_LD, sum_L, max_L = _forward_tile(
            acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, block * KEY_BLOCK, num_tokens,
            stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
            KEY_BLOCK, DIM, PADDED_DIM, PRECISION, True,
        )  # fmt: skip
        block = tl.load(indices + tl.minimum(position + 1, end - 1))
    # Every query sees itself, so only rows past Q have an empty sum. They are not stored.
    is_empty_L = sum_L == 0.0
    sum_L = tl.where(is_empty_L, 1.0, sum_L)
    lse_L = tl.where(is_empty_L, 0.0, max_L * LN_2 + tl.log(sum_L))
    tl.store(lse + head.to(tl.int64) * num_queries + query_L, lse_L, mask=query_L < num_queries)
    store_tile(
        out + head.to(tl.int64) * DIM, acc_LD / sum_L[:, None], query_start, num_queries, num_heads * DIM, QUERY_BLOCK,
        DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries", "num_heads"])
def delta_kernel(
    out, grad_out, delta, stride_ot, stride_oh, stride_od, num_queries, num_heads,
    BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Compute `delta = sum over D of out * grad_out`, float32 (Hq, Q); `out` is contiguous, `grad_out` strided.

    Grid: ceil(Q / BLOCK) * Hq programs.
    """
    program = tl.program_id(0)
    head = (program % num_heads).to(tl.int64)
    start = program // num_heads * BLOCK
    out_LD = load_tile(out + head * DIM, start, num_queries, num_heads * DIM, 1, BLOCK, DIM, PADDED_DIM, True)
    grad_LD = load_tile(
        grad_out + head * stride_oh, start, num_queries, stride_ot, stride_od, BLOCK, DIM, PADDED_DIM, True
    )
    query_L = start + tl.arange(0, BLOCK)
    delta_L = tl.sum(out_LD.to(tl.float32) * grad_LD.to(tl.float32), 1)
    tl.store(delta + head * num_queries + query_L, delta_L, mask=query_L < num_queries)


@triton.jit
def _dq_tile(
    dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, key_start, num_tokens,
    stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
    KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_KD = load_tile(k, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    v_KD = load_tile(v, key_start, num_tokens, stride_vt, stride_vd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    s_LK = tl.dot(q_LD, tl.trans(k_KD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_LK = tanh(s_LK * scale_tanh)
    p_LK = tl.exp2(s_LK * scale_log2 - (lse_L * LOG2_E)[:, None])
    if MASKED:
        key_K = key_start + tl.arange(0, KEY_BLOCK)
        end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
        visible_LK = is_visible(token_L[:, None], key_K[None, :], end_K[None, :])
        if window is not None:
            position_K = tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
            visible_LK &= is_within(position_L[:, None], position_K[None, :], window)
        p_LK = tl.where(visible_LK, p_LK, 0.0)
    if scale_tanh is not None:
        p_LK *= 1.0 - s_LK * s_LK
    dp_LK = tl.dot(grad_LD, tl.trans(v_KD), input_precision=PRECISION)
    ds_LK = p_LK * (dp_LK - delta_L[:, None])
    return tl.dot(ds_LK.to(k_KD.dtype), k_KD, dq_LD, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_rows", "num_heads", "window"])
def dq_kernel(
    q, k, v, grad_out, lse, delta, subtree_end, dq, rows, indices,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_od, num_tokens, num_context, num_rows, num_heads, num_groups, scale, scale_log2,
    positions, window, scale_tanh,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries (Q, Hq, D) of a query block and a query head; the grid is the forward's."""
    program = tl.program_id(0)
    group = program % num_groups
    query_block, start, middle, end = load_row(rows, (program // num_groups) % num_rows, 4)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head = program // num_groups // num_rows
    head = (kv_head * num_groups + group).to(tl.int64)
    k += kv_head.to(tl.int64) * stride_kh
    v += kv_head.to(tl.int64) * stride_vh
    num_queries = num_tokens - num_context
    query_start = query_block * QUERY_BLOCK
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    token_L = num_context + query_L
    q_LD = load_tile(
        q + head * stride_qh, query_start, num_queries, stride_qt, stride_qd, QUERY_BLOCK, DIM, PADDED_DIM, True
    )
    grad_LD = load_tile(
        grad_out + head * stride_oh, query_start, num_queries, stride_ot, stride_od, QUERY_BLOCK, DIM, PADDED_DIM, True
    )
    lse_L = tl.load(lse + head * num_queries + query_L, mask=query_L < num_queries, other=0.0)
    delta_L = tl.load(delta + head * num_queries + query_L, mask=query_L < num_queries, other=0.0)
    position_L = None if positions is None else tl.load(positions + token_L, mask=query_L < num_queries, other=0)
    dq_LD = tl.zeros((QUERY_BLOCK, PADDED_DIM), tl.float32)
    block = tl.load(indices + start)
    for position in range(start, middle):
        dq_LD = _dq_tile(
            dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, block * KEY_BLOCK,
            num_tokens, stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window,
            scale_tanh, KEY_BLOCK, DIM, PADDED_DIM, PRECISION, False,
        )  # fmt: skip
        block = tl.load(indices + tl.minimum(position + 1, end - 1))
    for position in range(middle, end):
        dq_LD = _dq_tile(
            dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, block * KEY_BLOCK,
            num_tokens, stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window,
            scale_tanh, KEY_BLOCK, DIM, PADDED_DIM, PRECISION, True,
        )  # fmt: skip
        block = tl.load(indices + tl.minimum(position + 1, end - 1))
    store_tile(dq + head * DIM, dq_LD * scale, query_start, num_queries, num_heads * DIM, QUERY_BLOCK, DIM, PADDED_DIM)
