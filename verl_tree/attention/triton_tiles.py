"""What the Triton kernels of tree attention share: the masks, and tiles that come from and go to memory."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def is_visible(query, key, end):
    """Return the tree mask, broadcast: false for keys past T, whose `end` is at most 0, and for queries past T."""
    return (key <= query) & (query < end)


@triton.jit
def is_within(query_position, key_position, window):
    """Return the window mask, broadcast, from positions on one path: a query sees itself and `window - 1` before."""
    return query_position - key_position < window


@triton.jit
def tanh(x):
    """Return tanh, good to the rounding of 1 in float32, without overflow. Triton's interpreter has none."""
    return 2.0 / (1.0 + tl.exp2(x * (-2.0 * LOG2_E))) - 1.0


@triton.jit
def load_tile(
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
def store_tile(
    ptr, tile, start, stop, stride_t, BLOCK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):  # fmt: skip
    """Write the rows of a (BLOCK, D) tile that come before `stop`. The columns of the output are contiguous."""
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED_DIM)
    mask = ((start + row) < stop)[:, None] & (column < DIM)[None, :]
    ptrs = ptr + start.to(tl.int64) * stride_t + (row[:, None] * stride_t + column[None, :])
    tl.store(ptrs, tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_row(rows, number, NUM_FIELDS: tl.constexpr):
    """Load block, start, middle and end of one row of a table, its first fields."""
    row = rows + NUM_FIELDS * number
    return tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
