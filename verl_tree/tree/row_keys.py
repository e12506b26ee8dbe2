"""Keys of tokens: rows share a token exactly if they share its key and all keys before it.

What a forward pass makes of a token may depend on more than its id: on the image that an image token stands for, on the
temperature of its row, on the experts that it is routed to. Each such thing is a *number* beside the token, 0 where it
changes nothing. A forest is built from ids and numbers together, the keys; the ids stay what they are, beside them.

`prompt_numbers` keep apart what could be shared: with `tree.sharing=prompt` rows share their prompts only, as an
ablation. A trainer without trees can share that much. The gradients are those of full sharing, computed from more
tokens.

Example: the rows [1 2 3 4 5] and [1 2 3 4 6], of which the first two tokens are the prompt::

    tree.sharing=full    1 2 3 4 ─┬─ 5        tree.sharing=prompt    1 2 ─┬─ 3 4 5
                                  └─ 6                                    └─ 3'4 6

Legend: B rows, F their flat tokens.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from verl_tree.tree.nodes import IntArray

_MAX_KEY = np.iinfo(np.int64).max


def row_keys(token_ids_F: IntArray, *numbers_F: IntArray) -> IntArray:
    """Return keys (F,) int64, equal exactly where the ids and all numbers are; no id and no number is negative."""
    keys_F = token_ids_F.astype(np.int64)
    for number_F in numbers_F:
        num_keys = int(keys_F.max(initial=0)) + 1
        if num_keys * (int(number_F.max(initial=0)) + 1) > _MAX_KEY:
            # Renumbered, there are no more keys than tokens.
            keys_F = np.unique(keys_F, return_inverse=True)[1]
            num_keys = int(keys_F.max(initial=0)) + 1
        keys_F = keys_F + number_F * num_keys
    return keys_F


def prompt_numbers(offsets: IntArray, *, response_lens: IntArray) -> IntArray:
    """Return numbers (F,) by which a row shares nothing from the start of its response on.

    `offsets` (B + 1,) bound the rows, and `response_lens` (B,) count their last tokens; 0 for a row without a response.
    """
    (rows,) = np.nonzero(response_lens)
    number_F = np.zeros(offsets[-1], dtype=np.int64)
    number_F[offsets[rows + 1] - response_lens[rows]] = rows + 1
    return number_F


def value_numbers(offsets: IntArray, *, values: Sequence[Hashable]) -> IntArray:
    """Return numbers (F,) by which rows of different values share nothing; `values` has one per row."""
    number_of = {value: number for number, value in enumerate(dict.fromkeys(values))}
    number_F = np.zeros(offsets[-1], dtype=np.int64)
    number_F[offsets[:-1]] = [number_of[value] for value in values]
    return number_F
