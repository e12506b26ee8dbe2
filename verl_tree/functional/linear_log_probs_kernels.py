"""Triton kernels of the fused log-probs. Imported only where triton is installed and needed.

A program that makes logits owns a tile of them, (L, W), in float32 registers. They are used there and never written. No
two programs write the same number, there are no atomics, and every sum has a fixed order that does not depend on the
number of positions. So two runs give the same bits, and a position's scores do not depend on the others.

A raw logit is the product plus the head's bias. `_transformed` makes a logit of it: `scale`, `softcap`, temperature.
Bias and softcap are None where a head has none, and Triton compiles the kernel without a trace of them.

Hidden states and weights come as tensor descriptors, which a Hopper GPU copies by its tensor memory accelerator. What
lies outside of the tensor is read as zero. Offsets into tensors that grow with V * X or K are int64.

Legend: P positions, L of them in a tile; V vocabulary, W words of it in a tile; X hidden size; K (position, label)
pairs, B of them in a block; S spans of the vocabulary.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _tanh(x):
    """Return tanh, good to the rounding of 1 in float32, without overflow. Triton's interpreter has none."""
    return 2.0 / (1.0 + tl.exp2(x * (-2.0 * LOG2_E))) - 1.0


@triton.jit
def _transformed(raw, inverse_temperature, scale, softcap):
    """Return the logits of raw ones, and what of the softcap's tanh its derivative needs (raw ones without a cap)."""
    if softcap is not None:
        raw = _tanh(raw * (scale / softcap))
        logits = raw * (softcap * inverse_temperature)
    else:
        logits = raw * (scale * inverse_temperature)
    return logits, raw


@triton.jit
def _slope(tanh, inverse_temperature, scale, softcap):
    """Return the derivative of a logit by its raw one."""
    slope = scale * inverse_temperature
    if softcap is not None:
        slope = slope * (1.0 - tanh * tanh)
    return slope


@triton.jit
def _raw_tile(
    hidden, weight, bias, position_start, word_start, num_words, hidden_size,
    POSITION_BLOCK: tl.constexpr, WORD_BLOCK: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the raw logits of a tile, (L, W)."""
    raw_LW = tl.zeros((POSITION_BLOCK, WORD_BLOCK), tl.float32)
    for start in range(0, hidden_size, HIDDEN_BLOCK):
        hidden_LX = hidden.load([position_start, start])
        weight_WX = weight.load([word_start, start])
        raw_LW = tl.dot(hidden_LX, tl.trans(weight_WX), raw_LW, input_precision=PRECISION)
    if bias is not None:
        word_W = word_start + tl.arange(0, WORD_BLOCK)
        raw_LW += tl.load(bias + word_W, mask=word_W < num_words, other=0.0).to(tl.float32)[None, :]
    return raw_LW


@triton.jit
def _position_block(program, num_blocks, num_others, GROUP: tl.constexpr):
    """Return the position block and the other index of a program.

    Groups of `GROUP` position blocks go through all others together, so that what runs at a time shares its hidden
    states and its weights in L2.
    """
    first = program // (GROUP * num_others) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    place = program % (GROUP * num_others)
    return first + place % size, place // size


@triton.jit(do_not_specialize=["num_positions", "num_words", "hidden_size", "span", "scale", "softcap"])
def normalizer_kernel(
    hidden, weight, bias, inverse_temperature, max_out, sum_out, moment_out, num_positions, num_words, hidden_size,
    span, scale, softcap,
    POSITION_BLOCK: tl.constexpr, WORD_BLOCK: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk over a span of the vocabulary for a block of positions; the outputs are float32 (S, P).

    They are the largest logit `m` in base 2, `sum(2**(z - m))` and, unless `moment_out` is None,
    `sum(2**(z - m) * (z - m))`. Grid: position blocks * S programs.
    """
    num_blocks = tl.cdiv(num_positions, POSITION_BLOCK)
    block, span_index = _position_block(tl.program_id(0), num_blocks, tl.cdiv(num_words, span), GROUP)
    position_start = block * POSITION_BLOCK
    position_L = position_start + tl.arange(0, POSITION_BLOCK)
    is_position_L = position_L < num_positions
    inverse_L = tl.load(inverse_temperature + position_L, mask=is_position_L, other=0.0) * LOG2_E
    max_L = tl.full((POSITION_BLOCK,), float("-inf"), tl.float32)
    sum_L = tl.zeros((POSITION_BLOCK,), tl.float32)
    moment_L = tl.zeros((POSITION_BLOCK,), tl.float32)
    for word_start in range(span_index * span, tl.minimum((span_index + 1) * span, num_words), WORD_BLOCK):
        raw_LW = _raw_tile(
            hidden, weight, bias, position_start, word_start, num_words, hidden_size, POSITION_BLOCK, WORD_BLOCK,
            HIDDEN_BLOCK, PRECISION,
        )  # fmt: skip
        logit_LW, _ = _transformed(raw_LW, inverse_L[:, None], scale, softcap)
        is_word_W = word_start + tl.arange(0, WORD_BLOCK) < num_words
        logit_LW = tl.where(is_word_W[None, :], logit_LW, float("-inf"))
        new_max_L = tl.maximum(max_L, tl.max(logit_LW, 1))
        # The first maximum is -inf, and the sums that it belongs to are zero.
        step_L = tl.where(max_L == float("-inf"), 0.0, max_L - new_max_L)
        rescale_L = tl.exp2(step_L)
        below_LW = logit_LW - new_max_L[:, None]
        p_LW = tl.exp2(below_LW)
        if moment_out is not None:
            product_LW = tl.where(is_word_W[None, :], p_LW * below_LW, 0.0)
            moment_L = rescale_L * (moment_L + sum_L * step_L) + tl.sum(product_LW, 1)
        sum_L = rescale_L * sum_L + tl.sum(p_LW, 1)
        max_L = new_max_L
    place_L = span_index.to(tl.int64) * num_positions + position_L
    tl.store(max_out + place_L, max_L, mask=is_position_L)
    tl.store(sum_out + place_L, sum_L, mask=is_position_L)
    if moment_out is not None:
        tl.store(moment_out + place_L, moment_L, mask=is_position_L)


@triton.jit(do_not_specialize=["num_pairs", "hidden_size", "stride_p", "stride_v", "scale", "softcap"])
def label_kernel(
    hidden, weight, bias, position, label, inverse_temperature, lse, log_prob, num_pairs, hidden_size, stride_p,
    stride_v, scale, softcap, BLOCK: tl.constexpr, HIDDEN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the log-probs of a block of pairs, float32 (K,), from the log-sum-exps of their positions.

    Hidden states and weights are pointers here. Grid: pair blocks.
    """
    pair_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair_B = pair_B < num_pairs
    position_B = tl.load(position + pair_B, mask=is_pair_B, other=0)
    label_B = tl.load(label + pair_B, mask=is_pair_B, other=0)
    raw_B = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, hidden_size, HIDDEN_BLOCK):
        column = start + tl.arange(0, HIDDEN_BLOCK)
        mask = is_pair_B[:, None] & (column < hidden_size)[None, :]
        hidden_BX = tl.load(hidden + position_B[:, None] * stride_p + column[None, :], mask=mask, other=0.0)
        weight_BX = tl.load(weight + label_B[:, None] * stride_v + column[None, :], mask=mask, other=0.0)
        raw_B += tl.sum(hidden_BX.to(tl.float32) * weight_BX.to(tl.float32), 1)
    if bias is not None:
        raw_B += tl.load(bias + label_B, mask=is_pair_B, other=0.0).to(tl.float32)
    inverse_B = tl.load(inverse_temperature + position_B, mask=is_pair_B, other=0.0)
    logit_B, _ = _transformed(raw_B, inverse_B, scale, softcap)
    # Another order of sums made the log-sum-exp, so that the difference may exceed zero by a rounding.
    log_prob_B = tl.minimum(logit_B - tl.load(lse + position_B, mask=is_pair_B, other=0.0), 0.0)
    tl.store(log_prob + pair_B, log_prob_B, mask=is_pair_B)


@triton.jit(do_not_specialize=["num_pairs", "scale", "softcap"])
def pair_gradient_kernel(
    position, label, pair_start, log_prob, grad_log_prob, grad_entropy, lse, entropy, inverse_temperature, label_value,
    grad_sum, grad_entropy_sum, num_pairs, scale, softcap, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute gradients of the labels' raw logits, float32 (K,), and sums over the pairs of a position, (P,).

    The pairs of position `p` are those from `pair_start[p]` to `pair_start[p + 1]`. Every pair of a position adds them
    up in the same order and writes the same sums. Several may have the same label, which all write the same gradient.
    `grad_entropy` is None if the entropy has no gradient. Grid: pair blocks.
    """
    pair_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair_B = pair_B < num_pairs
    position_B = tl.load(position + pair_B, mask=is_pair_B, other=0)
    label_B = tl.load(label + pair_B, mask=is_pair_B, other=0)
    start_B = tl.load(pair_start + position_B, mask=is_pair_B, other=0)
    end_B = tl.load(pair_start + position_B + 1, mask=is_pair_B, other=0)
    sum_B = tl.zeros((BLOCK,), tl.float32)
    same_label_B = tl.zeros((BLOCK,), tl.float32)
    entropy_sum_B = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tl.max(end_B - start_B, 0)):
        other_B = start_B + step
        is_other_B = other_B < end_B
        grad_B = tl.load(grad_log_prob + other_B, mask=is_other_B, other=0.0)
        is_same_B = tl.load(label + other_B, mask=is_other_B, other=-1) == label_B
        sum_B += grad_B
        same_label_B += tl.where(is_same_B, grad_B, 0.0)
        if grad_entropy is not None:
            entropy_sum_B += tl.load(grad_entropy + other_B, mask=is_other_B, other=0.0)
    log_prob_B = tl.load(log_prob + pair_B, mask=is_pair_B, other=0.0)
    inverse_B = tl.load(inverse_temperature + position_B, mask=is_pair_B, other=1.0)
    factor_B = sum_B
    if grad_entropy is not None:
        entropy_B = tl.load(entropy + position_B, mask=is_pair_B, other=0.0)
        factor_B += entropy_sum_B * (log_prob_B + entropy_B)
        tl.store(grad_entropy_sum + position_B, entropy_sum_B, mask=is_pair_B)
    tanh_B = log_prob_B
    if softcap is not None:
        logit_B = log_prob_B + tl.load(lse + position_B, mask=is_pair_B, other=0.0)
        tanh_B = logit_B / (softcap * inverse_B)
    value_B = (same_label_B - tl.exp2(log_prob_B * LOG2_E) * factor_B) * _slope(tanh_B, inverse_B, scale, softcap)
    tl.store(label_value + pair_B, value_B, mask=is_pair_B)
    tl.store(grad_sum + position_B, sum_B, mask=is_pair_B)


@triton.jit(
    do_not_specialize=["num_positions", "num_words", "hidden_size", "word_start", "num_columns", "scale", "softcap"]
)
def grad_logits_kernel(
    hidden, weight, bias, inverse_temperature, lse, entropy, grad_sum, grad_entropy_sum, grad_logits, num_positions,
    num_words, hidden_size, word_start, num_columns, scale, softcap,
    POSITION_BLOCK: tl.constexpr, WORD_BLOCK: tl.constexpr, HIDDEN_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the gradient of the raw logits, (P, `num_columns`) from word `word_start` on, without labels.

    All vectors are those of the P positions. `grad_entropy_sum` is None if the entropy has no gradient.
    Grid: position blocks * word blocks programs.
    """
    num_blocks = tl.cdiv(num_positions, POSITION_BLOCK)
    block, column_block = _position_block(tl.program_id(0), num_blocks, tl.cdiv(num_columns, WORD_BLOCK), GROUP)
    position_start = block * POSITION_BLOCK
    position_L = position_start + tl.arange(0, POSITION_BLOCK)
    is_position_L = position_L < num_positions
    raw_LW = _raw_tile(
        hidden, weight, bias, position_start, word_start + column_block * WORD_BLOCK, num_words, hidden_size,
        POSITION_BLOCK, WORD_BLOCK, HIDDEN_BLOCK, PRECISION,
    )  # fmt: skip
    inverse_L = tl.load(inverse_temperature + position_L, mask=is_position_L, other=0.0)
    lse_L = tl.load(lse + position_L, mask=is_position_L, other=float("inf"))
    logit_LW, tanh_LW = _transformed(raw_LW, inverse_L[:, None], scale, softcap)
    log_prob_LW = logit_LW - lse_L[:, None]
    factor_L = tl.load(grad_sum + position_L, mask=is_position_L, other=0.0)
    if grad_entropy_sum is not None:
        grad_entropy_L = tl.load(grad_entropy_sum + position_L, mask=is_position_L, other=0.0)
        factor_L += grad_entropy_L * tl.load(entropy + position_L, mask=is_position_L, other=0.0)
        factor_LW = factor_L[:, None] + grad_entropy_L[:, None] * log_prob_LW
    else:
        factor_LW = factor_L[:, None]
    slope_LW = _slope(tanh_LW, inverse_L[:, None], scale, softcap)
    value_LW = -tl.exp2(log_prob_LW * LOG2_E) * factor_LW * slope_LW
    column_W = column_block * WORD_BLOCK + tl.arange(0, WORD_BLOCK)
    mask = is_position_L[:, None] & (column_W < num_columns)[None, :]
    place_LW = position_L.to(tl.int64)[:, None] * num_columns + column_W[None, :]
    tl.store(grad_logits + place_LW, value_LW.to(grad_logits.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "position_start", "num_positions", "word_start", "num_columns"])
def label_gradient_kernel(
    position, label, label_value, grad_logits, num_pairs, position_start, num_positions, word_start, num_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the labels' own gradients over those of `grad_logits_kernel`, where a part of the logits has them.

    Grid: pair blocks.
    """
    pair_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_pair_B = pair_B < num_pairs
    row_B = tl.load(position + pair_B, mask=is_pair_B, other=-1) - position_start
    column_B = tl.load(label + pair_B, mask=is_pair_B, other=-1) - word_start
    is_inside_B = (row_B >= 0) & (row_B < num_positions) & (column_B >= 0) & (column_B < num_columns)
    value_B = tl.load(label_value + pair_B, mask=is_pair_B, other=0.0)
    place_B = row_B.to(tl.int64) * num_columns + column_B
    tl.store(grad_logits + place_B, value_B.to(grad_logits.dtype.element_ty), mask=is_pair_B & is_inside_B)
