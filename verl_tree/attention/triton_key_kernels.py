"""Triton kernels of the gradients of keys and values, in the manner of `triton_kernels.py`.

A program owns one row of `verl_tree.attention.row_cuts`: a block of keys, or a part of its list of query blocks where
that list is too long for one program. Such a part is summed in float32 into a slot of its own. A second kernel adds the
slots of a block, in their order. So there are no atomics, and two runs give the same bits.

Legend: that of `triton_kernels.py`; C cut blocks, S slots.
"""

import triton
import triton.language as tl

from verl_tree.attention.triton_tiles import LOG2_E, is_visible, is_within, load_row, load_tile, store_tile, tanh


@triton.jit
def _dkv_tile(
    dk_KD, dv_KD, k_KD, v_KD, q, grad_out, lse, delta, end_K, key_K, query_start, num_queries,
    num_context, stride_qt, stride_qd, stride_ot, stride_od, scale_log2, positions, position_K, window, scale_tanh,
    QUERY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    query_L = query_start + tl.arange(0, QUERY_BLOCK)
    q_LD = load_tile(q, query_start, num_queries, stride_qt, stride_qd, QUERY_BLOCK, DIM, PADDED_DIM, MASKED)
    if MASKED:
        lse_L = tl.load(lse + query_L, mask=query_L < num_queries, other=0.0)
        delta_L = tl.load(delta + query_L, mask=query_L < num_queries, other=0.0)
    else:
        lse_L = tl.load(lse + query_L)
        delta_L = tl.load(delta + query_L)
    s_KL = tl.dot(k_KD, tl.trans(q_LD), input_precision=PRECISION)
    if scale_tanh is not None:
        s_KL = tanh(s_KL * scale_tanh)
    p_KL = tl.exp2(s_KL * scale_log2 - (lse_L * LOG2_E)[None, :])
    if MASKED:
        token_L = num_context + query_L
        visible_KL = is_visible(token_L[None, :], key_K[:, None], end_K[:, None])
        if window is not None:
            position_L = tl.load(positions + token_L, mask=query_L < num_queries, other=0)
            visible_KL &= is_within(position_L[None, :], position_K[:, None], window)
        p_KL = tl.where(visible_KL, p_KL, 0.0)
    grad_LD = load_tile(grad_out, query_start, num_queries, stride_ot, stride_od, QUERY_BLOCK, DIM, PADDED_DIM, MASKED)
    dv_KD = tl.dot(p_KL.to(grad_LD.dtype), grad_LD, dv_KD, input_precision=PRECISION)
    if scale_tanh is not None:
        p_KL *= 1.0 - s_KL * s_KL
    dp_KL = tl.dot(v_KD, tl.trans(grad_LD), input_precision=PRECISION)
    ds_KL = p_KL * (dp_KL - delta_L[None, :])
    dk_KD = tl.dot(ds_KL.to(q_LD.dtype), q_LD, dk_KD, input_precision=PRECISION)
    return dk_KD, dv_KD


@triton.jit(do_not_specialize=["num_tokens", "num_context", "num_kv_heads", "window"])
def dkv_kernel(
    q, k, v, grad_out, lse, delta, subtree_end, dk, dv, parts, rows, indices,
    stride_qt, stride_qh, stride_qd, stride_kt, stride_kh, stride_kd, stride_vt, stride_vh, stride_vd,
    stride_ot, stride_oh, stride_od, num_tokens, num_context, num_kv_heads, num_groups, scale, scale_log2,
    positions, window, scale_tanh,
    QUERY_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values (T, Hkv, D) of a row and a key-value head, over its G query heads.

    A row with a slot writes float32 to `parts` (S, Hkv, 2, KEY_BLOCK, D) instead, the keys' gradient not yet scaled.

    Grid: R * Hkv programs, the heads of one row side by side: the longest rows of all heads come first.
    """
    program = tl.program_id(0)
    row = program // num_kv_heads
    kv_head = program % num_kv_heads
    key_block, start, middle, end = load_row(rows, row, 5)  # pyright: ignore[reportGeneralTypeIssues]
    slot = tl.load(rows + 5 * row + 4)
    key_start = key_block * KEY_BLOCK
    key_K = key_start + tl.arange(0, KEY_BLOCK)
    end_K = tl.load(subtree_end + key_K, mask=key_K < num_tokens, other=0)
    position_K = None if positions is None else tl.load(positions + key_K, mask=key_K < num_tokens, other=0)
    num_queries = num_tokens - num_context
    k_KD = load_tile(
        k + kv_head.to(tl.int64) * stride_kh, key_start, num_tokens, stride_kt, stride_kd, KEY_BLOCK, DIM, PADDED_DIM,
        True,
    )  # fmt: skip
    v_KD = load_tile(
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
        block = tl.load(indices + start)  # the list of the last row is never empty, so the address is inside
        for position in range(start, middle):
            dk_KD, dv_KD = _dkv_tile(
                dk_KD, dv_KD, k_KD, v_KD, q_head, grad_head, lse_head, delta_head, end_K, key_K,
                block * QUERY_BLOCK, num_queries, num_context, stride_qt, stride_qd, stride_ot,
                stride_od, scale_log2, positions, position_K, window, scale_tanh, QUERY_BLOCK, DIM, PADDED_DIM,
                PRECISION, False,
            )  # fmt: skip
            block = tl.load(indices + tl.minimum(position + 1, end - 1))
        for position in range(middle, end):
            dk_KD, dv_KD = _dkv_tile(
                dk_KD, dv_KD, k_KD, v_KD, q_head, grad_head, lse_head, delta_head, end_K, key_K,
                block * QUERY_BLOCK, num_queries, num_context, stride_qt, stride_qd, stride_ot,
                stride_od, scale_log2, positions, position_K, window, scale_tanh, QUERY_BLOCK, DIM, PADDED_DIM,
                PRECISION, True,
            )  # fmt: skip
            block = tl.load(indices + tl.minimum(position + 1, end - 1))
    if slot < 0:
        offset = kv_head.to(tl.int64) * DIM
        stride_t = num_kv_heads * DIM
        store_tile(dk + offset, dk_KD * scale, key_start, num_tokens, stride_t, KEY_BLOCK, DIM, PADDED_DIM)
        store_tile(dv + offset, dv_KD, key_start, num_tokens, stride_t, KEY_BLOCK, DIM, PADDED_DIM)
    else:
        row = (slot * num_kv_heads + kv_head) * (2 * KEY_BLOCK)
        store_tile(parts, dk_KD, row, row + KEY_BLOCK, DIM, KEY_BLOCK, DIM, PADDED_DIM)
        row += KEY_BLOCK
        store_tile(parts, dv_KD, row, row + KEY_BLOCK, DIM, KEY_BLOCK, DIM, PADDED_DIM)


@triton.jit(do_not_specialize=["num_tokens", "num_kv_heads"])
def add_parts_kernel(
    parts, cuts, dk, dv, num_tokens, num_kv_heads, scale,
    KEY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Add the parts of the cut key blocks of `cuts` (C, 3), slot after slot, to the gradients of keys and values.

    Grid: C * Hkv * (KEY_BLOCK / BLOCK) programs; each adds BLOCK keys.
    """
    program = tl.program_id(0)
    piece = program % (KEY_BLOCK // BLOCK)
    kv_head = program // (KEY_BLOCK // BLOCK) % num_kv_heads
    cut = cuts + program // (KEY_BLOCK // BLOCK) // num_kv_heads * 3
    key_block, first, last = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
    dk_KD = tl.zeros((BLOCK, PADDED_DIM), tl.float32)
    dv_KD = tl.zeros((BLOCK, PADDED_DIM), tl.float32)
    row = (first * num_kv_heads + kv_head) * (2 * KEY_BLOCK) + piece * BLOCK
    for _ in range(first, last):
        dk_KD += load_tile(parts, row, 0, DIM, 1, BLOCK, DIM, PADDED_DIM, False)
        dv_KD += load_tile(parts, row + KEY_BLOCK, 0, DIM, 1, BLOCK, DIM, PADDED_DIM, False)
        row += num_kv_heads * (2 * KEY_BLOCK)
    offset = kv_head.to(tl.int64) * DIM
    stride_t = num_kv_heads * DIM
    key_start = key_block * KEY_BLOCK + piece * BLOCK
    store_tile(dk + offset, dk_KD * scale, key_start, num_tokens, stride_t, BLOCK, DIM, PADDED_DIM)
    store_tile(dv + offset, dv_KD, key_start, num_tokens, stride_t, BLOCK, DIM, PADDED_DIM)
