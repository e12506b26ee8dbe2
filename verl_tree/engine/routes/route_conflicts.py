"""Rows that know other experts for a token that they share: the first ones are taken, or the tree forks.

With `tree.route_conflicts=first` a tree token takes the first known route of its rows (`first_known`). With `fork` the
forest is built from keys, as with images: where a row routes a token otherwise than the first row of the token, it has
another number, and so another key (`verl_tree.tree.row_keys`). So each row is computed under its own routes, and shares
with others what they route alike.

A row reads the route of a token only if it trains a token behind it. What it does not read joins the others and asks
for no route. A route that a row reads and does not know is a route of its own: that of the weights.

Example: one layer, two experts of a token, the last token of each row is trained. Row 0 is [5 6 7 8] and routes its
tokens to {1 2} {3 4} {1 2} {5 6}; row 1 is [5 6 7 9] and routes them to {2 1} {3 5} {1 2} {7 8}; row 2 is [5 6] and
routes them to {1 2} {6 7}. The forest of ids shares 5 6 7. They disagree at 6: the first row that reads it is row 0,
so row 1 has another key there. Row 2 reads 5 only, and keeps the key of 6::

    5 ─┬─ 6 ── 7 ── 8        rows 0 and 2
       └─ 6'── 7 ── 9        row 1

Legend: F flat tokens of the rows that a loss reads, F_all of the mini-batch, T tree tokens of the forest of ids; N
layers of the model, k experts of a token.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.packing.counts import ForestCounts
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray


def first_known(rows_FNk: np.ndarray, *, tree_index_F: IntArray, num_tokens: int) -> tuple[np.ndarray, int]:
    """Return the routes of tree tokens (T, N, k), and of how many tokens the rows disagree.

    A token takes in each layer the first known route of its rows, zeros where none knows one. Two rows disagree where
    both know routes of other experts; their order does not count.
    """
    routes_TNk = np.zeros((num_tokens, *rows_FNk.shape[1:]), dtype=rows_FNk.dtype)
    # No route of two experts or more is all zeros. Of several writes to one place the last one stays.
    pair, layer = (each[::-1] for each in np.nonzero(rows_FNk.any(axis=-1)))
    routes_TNk[tree_index_F[pair], layer] = rows_FNk[pair, layer]
    found, kept = rows_FNk[pair, layer], routes_TNk[tree_index_F[pair], layer]
    differs = (found != kept).any(axis=-1)
    is_other = (np.sort(found[differs]) != np.sort(kept[differs])).any(axis=-1)
    return routes_TNk, len(np.unique(tree_index_F[pair[differs][is_other]]))


def route_numbers(
    rows_FNk: np.ndarray, *, tree_index_F: IntArray, num_tokens: int, is_read_F: NDArray[np.bool_]
) -> IntArray:
    """Give the routes of rows numbers, (F,) int64: 0 where a row reads none or the one of its token's first reader.

    Equal routes have equal numbers everywhere; the order of a route's experts does not count.
    """
    read = np.flatnonzero(is_read_F)
    first_T = np.zeros(num_tokens, dtype=np.int64)
    first_T[tree_index_F[read[::-1]]] = read[::-1]  # Of several writes to one place the last one stays
    kept = first_T[tree_index_F[read]]
    differs = np.zeros(len(read), dtype=bool)
    for layer in range(rows_FNk.shape[1]):
        mine, its = rows_FNk[read, layer], rows_FNk[kept, layer]
        places = np.flatnonzero((mine != its).any(axis=-1))  # Only these are sorted
        differs[places] |= (np.sort(mine[places]) != np.sort(its[places])).any(axis=-1)
    numbers: dict[bytes, int] = {}
    number_F = np.zeros(len(rows_FNk), dtype=np.int64)
    for place in read[differs].tolist():
        number_F[place] = numbers.setdefault(np.sort(rows_FNk[place], axis=-1).tobytes(), len(numbers) + 1)
    return number_F


@dataclass(frozen=True, slots=True, eq=False)
class RouteForks:
    """Numbers by which a forest forks where its rows route otherwise.

    Attributes:
        number_F_all: (F_all,) int64, the number of each token's route; see `route_numbers`.
        is_read_F_all: (F_all,) bool, whether the row trains a token behind this one.
        counts: Tree tokens of the forest before it forks, and of how many the rows disagree.
    """

    number_F_all: IntArray
    is_read_F_all: NDArray[np.bool_]
    counts: ForestCounts

    @classmethod
    def of_rows(
        cls,
        keys: IntArray,
        *,
        offsets: IntArray,
        trained: NDArray[np.bool_],
        routes_FNk: np.ndarray,
    ) -> Self:
        """Give the routes of rows their numbers.

        `keys` (F_all,) are those under which rows are compared where routes do not count, and `routes_FNk` the routes
        of all flat tokens; for the rest see `split_into_packs`.
        """
        read = ReadRows.from_batch(keys, offsets=offsets, trained=trained)
        layout = TreeLayout.from_forest(read.forest)
        place_F = read.flat_index(layout.leaves)
        tree_index_F, rows_FNk = layout.tree_index_F.numpy(), routes_FNk[place_F]
        # The number of trained tokens from the start of the mini-batch to the end of the row, less those up to here
        num_trained = np.cumsum(trained)
        is_read = num_trained < np.repeat(num_trained[offsets[1:] - 1], np.diff(offsets))
        numbers = np.zeros(len(keys), dtype=np.int64)
        numbers[place_F] = route_numbers(
            rows_FNk, tree_index_F=tree_index_F, num_tokens=layout.num_tokens, is_read_F=is_read[place_F]
        )
        _, num_conflicts = first_known(rows_FNk, tree_index_F=tree_index_F, num_tokens=layout.num_tokens)
        return cls(
            number_F_all=numbers,
            is_read_F_all=is_read,
            counts=ForestCounts(num_routed_tokens=layout.num_tokens, num_route_conflicts=num_conflicts),
        )
