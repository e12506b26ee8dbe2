"""Triton kernels of tree attention, forward and backward. Imported only where triton is installed and needed.

They run FlashAttention-2 (https://arxiv.org/abs/2307.08691) on the tiles of `verl_tree.attention.blocks`. A program
owns one block of rows: queries, or keys for the gradients of keys and values. It walks the full tiles of its list
without a mask, then the partial ones with `key <= query < subtree_end[key]`. No other program writes its rows. There
are no atomics and every sum has a fixed order, so two runs give the same bits.

Scores are in base 2 (`exp2` is one instruction); `lse` is the natural log-sum-exp. Sums are float32. A head dim that is
no power of two is padded with zeros in registers (`DIM` to `PADDED_DIM`). Offsets are int64 at the start of a block and
int32 inside it.

Sliding windows (`positions`, `window`), softcaps (`scale_tanh`) and attention sinks (`sinks`) are None where a layer
has none. Triton compiles the kernel anew for None, without a trace of the option. With a softcap, `scale_log2` is that
of the cap, since `softcap * tanh` takes the place of the score. A sink is one more key with the value zero, so the sum
of a row starts with it.

The first `num_context` tokens are keys only. So the query of row `i` is token `num_context + i`. Loads and stores go by
rows, the mask and the positions by tokens. The kernels are not specialised on the number, so 0 runs the same code.

Legend: T tokens, the last Q of them queries, L queries and K keys of a tile, D head dim (padded), R row blocks, G query
    heads per key-value head.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _is_visible(query, key, end):
    """Return the tree mask, broadcast: false for keys past T, whose `end` is at most 0, and for queries past T."""
    return (key <= query) & (query < end)


@triton.jit
def _is_within(query_position, key_position, window):
    """Return the window mask, broadcast, from positions on one path: a query sees itself and `window - 1` before."""
    return query_position - key_position < window


@triton.jit
def _tanh(x):
    """Return tanh, good to the rounding of 1 in float32, without overflow. Triton's interpreter has none."""
    return 2.0 / (1.0 + tl.exp2(x * (-2.0 * LOG2_E))) - 1.0


@triton.jit
def _load_tile(
    ptr, start, stop, stride_t, stride_d, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """Load (BLOCK, D) rows from `start` on, with zeros past D and, if `BOUNDED`, from row `stop` on."""
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_DIM)
    ptrs = ptr + start.to(tl.int64) * stride_t + (row[:, None] * stride_t + column[None, :] * stride_d)
    if BOUNDED:
        if DIM != PADDED_DIM:
            mask = ((start + row) < stop)[:, None] & (column < DIM)[None, :]
        else:
            mask = ((start + row) < stop)[:, None]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    elif DIM != PADDED_DIM:
        tile = tl.load(ptrs, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def _store_tile(
    ptr, tile, start, stop, stride_t, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):  # fmt: skip
    """Write the rows of a (BLOCK, D) tile that come before `stop`. The columns of the output are contiguous."""
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_DIM)
    mask = ((start + row) < stop)[:, None] & (column < DIM)[None, :]
    ptrs = ptr + start.to(tl.int64) * stride_t + (row[:, None] * stride_t + column[None, :])
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row(rows, number):
    """Load block, start, middle and end of one row of `BlockRows.rows_R4`."""
    row = rows + 4 * number
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def _forward_tile(
    acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, key_start, num_tokens,
    stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
    KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_KD = _load_tile(k, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    s_LK = tl.dot(q_LD, tl.trans(k_KD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_LK = _tanh(s_LK * scale_tanh)
    if MASKED:
        key_K = key_start + tl.arange(0, KEY_BLOCK)
        end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
        visible_LK = _is_visible(token_L[:, None], key_K[None, :], end_K[None, :])
        if window is not None:
            position_K = tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
            visible_LK &= _is_within(position_L[:, None], position_K[None, :], window)
        s_LK = tl.where(visible_LK, s_LK, float("-inf"))
    new_max_L = tl.maximum(max_L, tl.max(s_LK, 1) * scale_log2)
    # The maximum of a row that has seen no key is -inf, and -inf - (-inf) would be NaN.
    base_L = tl.where(new_max_L == float("-inf"), 0.0, new_max_L) if MASKED else new_max_L
    p_LK = tl.exp2(s_LK * scale_log2 - base_L[:, None])
    rescale_L = tl.exp2(max_L - base_L)
    sum_L = sum_L * rescale_L + tl.sum(p_LK, 1)
    v_KD = _load_tile(v, key_start, num_tokens, stride_vt, stride_vd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    acc_LD = tl.dot(p_LK.to(v_KD.dtype), v_KD, acc_LD * rescale_L[:, None], input_precision=PRECISION)
    return acc_LD, sum_L, new_max_L


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_rows", "window"])
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
    query_block, start, middle, end = _row(rows, (program // num_groups) % num_rows)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head = program // num_groups // num_rows
    head = kv_head * num_groups + group
    k += kv_head.to(tl.int64) * stride_kh
    v += kv_head.to(tl.int64) * stride_vh
    num_queries = num_tokens - num_context
    query_start = query_block * QUERY_BLOCK
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    token_L = num_context + query_L
    q_LD = _load_tile(
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
    for position in range(start, middle):
        acc_LD, sum_L, max_L = _forward_tile(
            acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, tl.load(indices + position) * KEY_BLOCK, num_tokens,
            stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
            KEY_BLOCK, DIM, PADDED_DIM, PRECISION, False,
        )  # fmt: skip
    for position in range(middle, end):
        acc_LD, sum_L, max_L = _forward_tile(
            acc_LD, sum_L, max_L, q_LD, k, v, subtree_end, token_L, tl.load(indices + position) * KEY_BLOCK, num_tokens,
            stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
            KEY_BLOCK, DIM, PADDED_DIM, PRECISION, True,
        )  # fmt: skip
    # Every query sees itself, so only rows past Q have an empty sum. They are not stored.
    is_empty_L = sum_L == 0.0
    sum_L = tl.where(is_empty_L, 1.0, sum_L)
    lse_L = tl.where(is_empty_L, 0.0, max_L * LN_2 + tl.log(sum_L))
    tl.store(lse + head.to(tl.int64) * num_queries + query_L, lse_L, mask=query_L < num_queries)
    _store_tile(
        out + head.to(tl.int64) * DIM, acc_LD / sum_L[:, None], query_start, num_queries, num_heads * DIM, QUERY_BLOCK,
        DIM, PADDED_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_queries"])
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
    out_LD = _load_tile(out + head * DIM, start, num_queries, num_heads * DIM, 1, BLOCK, DIM, PADDED_DIM, True)
    grad_LD = _load_tile(
        grad_out + head * stride_oh, start, num_queries, stride_ot, stride_od, BLOCK, DIM, PADDED_DIM, True
    )
    query_L = start + tl.arange(0, BLOCK)
    delta_L = tl.sum(out_LD.to(tl.float32) * grad_LD.to(tl.float32), 1)
    tl.store(delta + head * num_queries + query_L, delta_L, mask=query_L < num_queries)


@triton.jit
def _dkv_tile(
    dk_KD, dv_KD, k_KD, v_KD, q, grad_out, lse, delta, end_K, key_K, query_start, num_queries,
    num_context, stride_qt, stride_qd, stride_ot, stride_od, scale_log2, positions, position_K, window, scale_tanh,
    QUERY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    q_LD = _load_tile(q, query_start, num_queries, stride_qt, stride_qd, QUERY_BLOCK, DIM, PADDED_DIM, MASKED)
    if MASKED:
        lse_L = tl.load(lse + query_L, mask=query_L < num_queries, other=0.0)
        delta_L = tl.load(delta + query_L, mask=query_L < num_queries, other=0.0)
    else:
        lse_L = tl.load(lse + query_L)
        delta_L = tl.load(delta + query_L)
    s_KL = tl.dot(k_KD, tl.trans(q_LD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_KL = _tanh(s_KL * scale_tanh)
    p_KL = tl.exp2(s_KL * scale_log2 - (lse_L * LOG2_E)[None, :])
    if MASKED:
        token_L = num_context + query_L
        visible_KL = _is_visible(token_L[None, :], key_K[:, None], end_K[:, None])
        if window is not None:
            position_L = tl.load(positions + token_L, mask=query_L < num_queries, other=0)
            visible_KL &= _is_within(position_L[None, :], position_K[:, None], window)
        p_KL = tl.where(visible_KL, p_KL, 0.0)
    grad_LD = _load_tile(grad_out, query_start, num_queries, stride_ot, stride_od, QUERY_BLOCK, DIM, PADDED_DIM, MASKED)
    dv_KD = tl.dot(p_KL.to(grad_LD.dtype), grad_LD, dv_KD, input_precision=PRECISION)
    if scale_tanh is not None:
        p_KL *= 1.0 - s_KL * s_KL
    dp_KL = tl.dot(v_KD, tl.trans(grad_LD), input_precision=PRECISION)
    ds_KL = p_KL * (dp_KL - delta_L[None, :])
    dk_KD = tl.dot(ds_KL.to(q_LD.dtype), q_LD, dk_KD, input_precision=PRECISION)
    return dk_KD, dv_KD


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_rows", "window"])
def dkv_kernel(
    q, k, v, grad_out, lse, delta, subtree_end, dk, dv, rows, indices,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_od, num_tokens, num_context, num_rows, num_kv_heads, num_groups, scale, scale_log2,
    positions, window, scale_tanh,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values (T, Hkv, D) of a key block and a key-value head, over its G query heads.

    Grid: R * Hkv programs; those of one head are neighbours.
    """
    program = tl.program_id(0)
    key_block, start, middle, end = _row(rows, program % num_rows)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head = program // num_rows
    key_start = key_block * KEY_BLOCK
    key_K = key_start + tl.arange(0, KEY_BLOCK)
    end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
    position_K = None if positions is None else tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
    num_queries = num_tokens - num_context
    k_KD = _load_tile(
        k + kv_head.to(tl.int64) * stride_kh, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM,
        True,
    )  # fmt: skip
    v_KD = _load_tile(
        v + kv_head.to(tl.int64) * stride_vh, key_start, num_tokens, stride_vt, stride_vd, KEY_BLOCK, DIM, PADDED_DIM,
        True,
    )  # fmt: skip
    dk_KD = tl.zeros((KEY_BLOCK, PADDED_DIM), tl.float32)
    dv_KD = tl.zeros((KEY_BLOCK, PADDED_DIM), tl.float32)
    for group in range(num_groups):
        head = (kv_head * num_groups + group).to(tl.int64)
        q_head = q + head * stride_qh
        grad_head = grad_out + head * stride_oh
        lse_head = lse + head * num_queries
        delta_head = delta + head * num_queries
        for position in range(start, middle):
            dk_KD, dv_KD = _dkv_tile(
                dk_KD, dv_KD, k_KD, v_KD, q_head, grad_head, lse_head, delta_head, end_K, key_K,
                tl.load(indices + position) * QUERY_BLOCK, num_queries, num_context, stride_qt, stride_qd, stride_ot,
                stride_od, scale_log2, positions, position_K, window, scale_tanh, QUERY_BLOCK, DIM, PADDED_DIM,
                PRECISION, False,
            )  # fmt: skip
        for position in range(middle, end):
            dk_KD, dv_KD = _dkv_tile(
                dk_KD, dv_KD, k_KD, v_KD, q_head, grad_head, lse_head, delta_head, end_K, key_K,
                tl.load(indices + position) * QUERY_BLOCK, num_queries, num_context, stride_qt, stride_qd, stride_ot,
                stride_od, scale_log2, positions, position_K, window, scale_tanh, QUERY_BLOCK, DIM, PADDED_DIM,
                PRECISION, True,
            )  # fmt: skip
    offset = kv_head.to(tl.int64) * DIM
    stride_t = num_kv_heads * DIM
    _store_tile(dk + offset, dk_KD * scale, key_start, num_tokens, stride_t, KEY_BLOCK, DIM, PADDED_DIM)
    _store_tile(dv + offset, dv_KD, key_start, num_tokens, stride_t, KEY_BLOCK, DIM, PADDED_DIM)


@triton.jit
def _dq_tile(
    dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, key_start, num_tokens,
    stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window, scale_tanh,
    KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_KD = _load_tile(k, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    v_KD = _load_tile(v, key_start, num_tokens, stride_vt, stride_vd, KEY_BLOCK, DIM, PADDED_DIM, MASKED)
    s_LK = tl.dot(q_LD, tl.trans(k_KD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_LK = _tanh(s_LK * scale_tanh)
    p_LK = tl.exp2(s_LK * scale_log2 - (lse_L * LOG2_E)[:, None])
    if MASKED:
        key_K = key_start + tl.arange(0, KEY_BLOCK)
        end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
        visible_LK = _is_visible(token_L[:, None], key_K[None, :], end_K[None, :])
        if window is not None:
            position_K = tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
            visible_LK &= _is_within(position_L[:, None], position_K[None, :], window)
        p_LK = tl.where(visible_LK, p_LK, 0.0)
    if scale_tanh is not None:
        p_LK *= 1.0 - s_LK * s_LK
    dp_LK = tl.dot(grad_LD, tl.trans(v_KD), input_precision=PRECISION)
    ds_LK = p_LK * (dp_LK - delta_L[:, None])
    return tl.dot(ds_LK.to(k_KD.dtype), k_KD, dq_LD, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_rows", "window"])
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
    query_block, start, middle, end = _row(rows, (program // num_groups) % num_rows)  # pyright: ignore[reportGeneralTypeIssues]
    kv_head = program // num_groups // num_rows
    head = (kv_head * num_groups + group).to(tl.int64)
    k += kv_head.to(tl.int64) * stride_kh
    v += kv_head.to(tl.int64) * stride_vh
    num_queries = num_tokens - num_context
    query_start = query_block * QUERY_BLOCK
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    token_L = num_context + query_L
    q_LD = _load_tile(
        q + head * stride_qh, query_start, num_queries, stride_qt, stride_qd, QUERY_BLOCK, DIM, PADDED_DIM, True
    )
    grad_LD = _load_tile(
        grad_out + head * stride_oh, query_start, num_queries, stride_ot, stride_od, QUERY_BLOCK, DIM, PADDED_DIM, True
    )
    lse_L = tl.load(lse + head * num_queries + query_L, mask=query_L < num_queries, other=0.0)
    delta_L = tl.load(delta + head * num_queries + query_L, mask=query_L < num_queries, other=0.0)
    position_L = None if positions is None else tl.load(positions + token_L, mask=query_L < num_queries, other=0)
    dq_LD = tl.zeros((QUERY_BLOCK, PADDED_DIM), tl.float32)
    for position in range(start, middle):
        dq_LD = _dq_tile(
            dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, tl.load(indices + position) * KEY_BLOCK,
            num_tokens, stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window,
            scale_tanh, KEY_BLOCK, DIM, PADDED_DIM, PRECISION, False,
        )  # fmt: skip
    for position in range(middle, end):
        dq_LD = _dq_tile(
            dq_LD, q_LD, grad_LD, lse_L, delta_L, k, v, subtree_end, token_L, tl.load(indices + position) * KEY_BLOCK,
            num_tokens, stride_kt, stride_kd, stride_vt, stride_vd, scale_log2, positions, position_L, window,
            scale_tanh, KEY_BLOCK, DIM, PADDED_DIM, PRECISION, True,
        )  # fmt: skip
    _store_tile(dq + head * DIM, dq_LD * scale, query_start, num_queries, num_heads * DIM, QUERY_BLOCK, DIM, PADDED_DIM)
