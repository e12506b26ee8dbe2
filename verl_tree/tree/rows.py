"""Rows that stand one after another in a flat array: their ranges, and the tokens in them that a loss reads."""

import numpy as np
from numpy.typing import NDArray

from verl_tree.tree.nodes import IntArray


def ranges(starts: IntArray, lens: IntArray) -> IntArray:
    """Return the integers starts[i]..starts[i] + lens[i] for every i, one range after another.

    Example: starts 7 2 and lens 2 3 give 7 8 2 3 4.
    """
    return np.arange(int(lens.sum())) + np.repeat(starts - (np.cumsum(lens) - lens), lens)


def trained_tokens(mask: np.ndarray, *, mask_lens: IntArray, row_lens: IntArray) -> NDArray[np.bool_]:
    """Find the tokens that a loss reads: (sum of row_lens,) bool, one row after another.

    `mask` (sum of mask_lens,) has the loss masks of the rows, one after another. Each covers the end of its row: the
    response (RL) or the whole row (SFT). The first token of a row is never read, because no logits precede it.

    Raises:
        ValueError: A mask is longer than its row.
    """
    if (mask_lens > row_lens).any():
        row = int(np.argmax(mask_lens > row_lens))
        raise ValueError(
            f"the loss mask of row {row} has {mask_lens[row]} entries and its input_ids {row_lens[row]}: "
            "a mask covers the response or the whole row"
        )
    ends = np.cumsum(row_lens)
    trained = np.zeros(int(row_lens.sum()), dtype=bool)
    trained[ranges(ends - mask_lens, mask_lens)] = mask
    trained[ends - row_lens] = False
    return trained
