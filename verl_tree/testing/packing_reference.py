"""Optimal packings as references for tests and benchmarks: by all partitions, and by an integer programme.

`brute_force` shares no code with `verl_tree.packing`. `integer_programme` takes that package's items and nodes, and
its bound `least_visits` as cuts; `brute_force` checks that bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, diags_array, eye_array, hstack, kron

from verl_tree.packing.bound import least_visits
from verl_tree.packing.problem import Caps, Items
from verl_tree.tree.nodes import IntArray


def brute_force(
    sequences: Sequence[ArrayLike],
    *,
    capacity: int,
    max_loss_terms: int | None = None,
    loss_terms: Sequence[int] | None = None,
) -> int:
    """Find the fewest packed tokens over all partitions of the trajectories.

    It takes 3^S steps for S trajectories, so S is about ten at most. Caps and loss terms are as in `pack`.

    Raises:
        ValueError: A trajectory alone exceeds a cap.
    """
    # A pack is a set of trie tokens, one bit each, and its cost the number of bits.
    token_of: dict[tuple[int, int], int] = {}
    paths, terms = [], []
    for sequence in sequences:
        above, path, tokens = -1, 0, np.asarray(sequence).tolist()
        for token in tokens:
            above = token_of.setdefault((above, token), len(token_of))
            path |= 1 << above
        paths.append(path)
        terms.append(len(tokens) - 1)
    terms = terms if loss_terms is None else list(loss_terms)
    num_sets = 1 << len(paths)
    union, sum_terms = [0] * num_sets, [0] * num_sets
    for members in range(1, num_sets):
        first = (members & -members).bit_length() - 1
        rest = members & (members - 1)
        union[members], sum_terms[members] = union[rest] | paths[first], sum_terms[rest] + terms[first]
    never = sum(path.bit_count() for path in paths) + 1
    cost = [
        never
        if path.bit_count() > capacity or (max_loss_terms is not None and number > max_loss_terms)
        else path.bit_count()
        for path, number in zip(union, sum_terms, strict=True)
    ]
    best = [0] * num_sets
    # The pack of the first trajectory of a set is any of its subsets; the rest is the same problem.
    for members in range(1, num_sets):
        rest = members & (members - 1)
        first, others, least = members ^ rest, rest, never
        while True:
            least = min(least, cost[first | others] + best[rest ^ others])
            if not others:
                break
            others = (others - 1) & rest
        best[members] = least
    if best[-1] >= never:
        raise ValueError(
            f"a trajectory exceeds capacity={capacity} or max_loss_terms={max_loss_terms}: raise it, or leave it out"
        )
    return best[-1]


@dataclass(frozen=True, slots=True)
class IntegerResult:
    """The packed tokens of the best packing known, their lower bound, and the packs that the programme had."""

    num_tokens: int
    lower_bound: int
    num_packs: int

    @property
    def is_optimal(self) -> bool:
        """Whether `num_tokens` is proven to be the optimum."""
        return self.num_tokens == self.lower_bound


def integer_programme(items: Items, *, caps: Caps, known_tokens: int, time_limit_s: float) -> IntegerResult:
    """Look for the optimum of one tree with HiGHS (scipy.optimize.milp).

    Binary x(l, p): item l is in pack p; y(v, p): pack p visits node v, of w(v) tokens that end at depth L(v). Binary z:
    the solver gives up and pays one token more than the known packing::

        minimise    sum of w(v) y(v, p) + (known + 1) z
        such that   sum over p of x(l, p) + z = 1                           every item is in one pack
                    x(l, p) <= y(end of l, p), y(v, p) <= y(parent of v, p) a pack visits the paths of its items
                    sum below v of w(u) y(u, p) <= (C - L(v)) y(v, p)       at every node, or it would be cheap to
                                                                            visit v by a fraction of a pack
                    sum of terms(l) x(l, p) <= C' y(root, p)
                    sum over p of y(v, p) >= least visits of v, or z = 1
                    x(l, p) <= sum over j < l of x(j, p - 1)                packs are ordered by their first items

    There are as many packs as an optimum can have (`max_packs`), so nothing is assumed about it. With z the solver has
    a solution from the start, hence a bound to report. It proves an optimum only by finding it anew.

    `caps` must limit the tokens. After `time_limit_s` the bound is the best so far, the solver's or `least_visits`.
    """
    visits = least_visits(items, caps=caps)
    own = items.nodes.end - items.nodes.start
    num_packs = max_packs(items, own=own, visits=visits, caps=caps, known_tokens=known_tokens)
    can_hold = np.arange(num_packs) <= np.arange(len(items))[:, None]  # item l is in one of the packs 0..l
    result = milp(
        np.concatenate([np.zeros(can_hold.size), np.repeat(own, num_packs), [known_tokens + 1]]),
        integrality=1,
        bounds=Bounds(0, cast(Any, np.concatenate([can_hold.ravel(), np.ones(len(own) * num_packs + 1)]))),
        constraints=_constraints(items, visits=visits, caps=caps, num_packs=num_packs),
        options={"time_limit": time_limit_s, "mip_rel_gap": 0},
    )
    assert result.status in (0, 1), result.message
    found = known_tokens + 1 if result.fun is None else round(result.fun)
    bound = found if result.status == 0 else int(np.ceil((result.mip_dual_bound or 0) - 1e-4))
    assert bound <= known_tokens, "the known packing is a solution, and the solver denies it"
    least = int((own * visits).sum())
    return IntegerResult(num_tokens=min(found, known_tokens), lower_bound=max(bound, least), num_packs=num_packs)


def max_packs(items: Items, *, own: IntArray, visits: IntArray, caps: Caps, known_tokens: int) -> int:
    """Return the most packs that an optimum can have."""
    # Each visits the root, and the other nodes cost their least visits.
    below_root = int(own[1:] @ visits[1:])
    most = min(len(items), (known_tokens - below_root) // int(own[0]))
    # No two of k packs fit together, else the root would be visited once less. So two have more than C + w(root) tokens
    # and all pairs (k - 1) cost > k (k - 1) / 2 (C + w(root)). A limit of loss terms may keep packs apart that fit.
    if items.num_terms <= caps.num_terms:
        most = min(most, 2 * known_tokens // (caps.num_tokens + int(own[0])))
    return max(most, 1)


def _constraints(items: Items, *, visits: IntArray, caps: Caps, num_packs: int) -> list[LinearConstraint]:
    """Make the rows of `integer_programme`; columns: x(l, p) by item, y(v, p) by node, z."""
    nodes, num_items, num_nodes = items.nodes, len(items), items.nodes.num_nodes
    own, room = nodes.end - nodes.start, (caps.num_tokens - nodes.end).astype(float)
    index = np.arange(num_nodes)
    is_below = (index[:, None] < index) & (index < nodes.subtree_end[:, None])
    end_of = csr_array((np.ones(num_items), (np.arange(num_items), items.end_node)), (num_items, num_nodes))
    parent_of = csr_array((np.ones(num_nodes - 1), (index[1:] - 1, nodes.parent[1:])), (num_nodes - 1, num_nodes))
    earlier = csr_array(np.tri(num_items, k=-1))
    each_item, each_node = eye_array(num_items).tocsr(), eye_array(num_nodes).tocsr()
    each_pack, all_packs = eye_array(num_packs).tocsr(), np.ones((1, num_packs))

    # scipy's annotations are too narrow: a bound is a float, a product of sparse arrays any of their kinds.
    def rows(x: Any, y: Any, z: ArrayLike = 0.0) -> Any:
        height = (y if x is None else x).shape[0]
        x = csr_array((height, num_items * num_packs)) if x is None else x
        y = csr_array((height, num_nodes * num_packs)) if y is None else y
        return hstack([x, y, csr_array(np.broadcast_to(np.reshape(z, (-1, 1)), (height, 1)))])

    at_most_zero = [
        rows(kron(each_item, each_pack), kron(-end_of, each_pack)),
        rows(None, kron(each_node[1:] - parent_of, each_pack)),
        rows(None, kron(csr_array(is_below * own) - diags_array(room), each_pack)),
        rows(kron(each_item, each_pack[1:]) - kron(earlier, each_pack[:-1]), None),
    ]
    if items.num_terms > caps.num_terms:
        is_root = csr_array((index == 0)[None].astype(float))
        terms = csr_array(items.terms[None].astype(float))
        at_most_zero.append(rows(kron(terms, each_pack), kron(-caps.num_terms * is_root, each_pack)))
    return [
        *(LinearConstraint(matrix, -np.inf, 0) for matrix in at_most_zero),
        LinearConstraint(rows(kron(each_item, all_packs), None, 1.0), 1, 1),
        LinearConstraint(rows(None, kron(each_node, all_packs), visits.astype(float)), cast(Any, visits), np.inf),
    ]
