"""The shape of a group's forest: a few numbers per row, however long the rows are.

Sorted by their tokens, rows that share a prefix are neighbours. So the place of every row in that order and the number
of tokens that it shares with the row before it hold the whole forest of a group. The trainer balances ranks and finds
the nodes of advantages from these numbers; it reads no tokens.

The worker that runs the sessions of a prompt has all its rows. It writes the shapes when the last session has ended,
before verl says that the prompt has. A shape is one tag of its row, 40 bytes: tags come to the trainer in one message
anyway, and what clears, stores or restores a row does it to its tags, too.

Example: the rows 0 = [1 2 3 4], 1 = [1 2 5] and 2 = [1 2 6 7 8], the first two tokens of each being the prompt, and all
others trained::

    row  rank  num_shared  num_tokens  response_len  num_trained  num_new_trained
    0    0     0           4           2             2            2
    1    1     2           3           1             1            1
    2    2     2           5           3             3            3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

LEAF_SHAPE_TAG = "leaf_shape"
"""Tag of a row in TransferQueue: the bytes of one `LEAF_SHAPE`."""

LEAF_SHAPE = np.dtype(
    [
        ("rank", "<i4"),  # place in the group's order by tokens: strict prefixes first, duplicates by session and leaf
        ("num_shared", "<i4"),  # tokens shared with the row before in that order; 0 for the first
        ("num_tokens", "<i4"),  # prompt and response
        ("response_len", "<i4"),
        ("num_trained", "<i4"),  # tokens that a loss reads; never the first, because nothing can score it
        # Those among them that the last row with trained tokens before it in that order does not share.
        ("num_new_trained", "<i4"),
        ("reward", "<f8"),  # the sum of the row's `rm_scores`; NaN if it is scored later
        ("num_image_tokens", "<i4"),
        ("num_new_image_tokens", "<i4"),  # those that the same row as for `num_new_trained` does not share
    ]
)

MAX_REWARD = float(np.finfo(np.float32).max)
"""The largest reward of a row: verl stores them as float32."""

FIRST_IMAGE_KEY = 2**31
"""Keys from this one on stand for image tokens (`rollout_hooks.capture.image_runs`)."""

TOKEN_TYPE = np.dtype(">u4")  # big-endian bytes compare like the numbers that they encode


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row of a group until its shape is known: five bytes a token."""

    token_bytes: bytes
    is_trained: np.ndarray  # (response length,) bool
    reward: float

    @classmethod
    def of(cls, token_ids: ArrayLike, *, response_mask: ArrayLike, reward: float | None) -> Self:
        """Keep a row of prompt and response; the mask covers the response, the end of the row."""
        return cls(
            token_bytes=np.asarray(token_ids).astype(TOKEN_TYPE).tobytes(),
            is_trained=np.asarray(response_mask).astype(bool),
            reward=np.nan if reward is None else reward,
        )


def leaf_shapes(rows: Sequence[WrittenRow]) -> np.ndarray:
    """Return the shape of each row of one group: (rows,) `LEAF_SHAPE`. Give the rows by session and leaf."""
    shapes = np.zeros(len(rows), dtype=LEAF_SHAPE)
    before = before_read = b""
    for rank, index in enumerate(sorted(range(len(rows)), key=lambda index: rows[index].token_bytes)):
        row = rows[index]
        num_shared = num_shared_read = num_shared_tokens(before, row.token_bytes)
        if before_read is not before:
            num_shared_read = num_shared_tokens(before_read, row.token_bytes)
        num_tokens, response_len = len(row.token_bytes) // TOKEN_TYPE.itemsize, len(row.is_trained)
        prompt_len = num_tokens - response_len
        num_trained, num_new_trained = (
            np.count_nonzero(row.is_trained[max(first - prompt_len, 0) :]) for first in (1, max(num_shared_read, 1))
        )
        is_image = np.frombuffer(row.token_bytes, TOKEN_TYPE) >= FIRST_IMAGE_KEY
        num_images, num_new_images = np.count_nonzero(is_image), np.count_nonzero(is_image[num_shared_read:])
        of_tokens = (rank, num_shared, num_tokens, response_len, num_trained, num_new_trained)
        shapes[index] = (*of_tokens, row.reward, num_images, num_new_images)
        before = row.token_bytes
        before_read = before if num_trained else before_read
    return shapes


def num_shared_tokens(first: bytes, second: bytes) -> int:
    """Return the number of tokens that two rows begin with alike, given as `TOKEN_TYPE`."""
    num_bytes = min(len(first), len(second))
    is_different = np.frombuffer(first[:num_bytes], TOKEN_TYPE) != np.frombuffer(second[:num_bytes], TOKEN_TYPE)
    # The first place at which they differ, or the end of the shorter one.
    return int(np.append(is_different, True).argmax())
