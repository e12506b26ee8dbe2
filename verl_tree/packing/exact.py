"""The optimum: the paper's multi-path programme (Tree Training, section 2.2.2, eq. 6-11) with pruning.

The state of a node is the sorted loads of the packs (the paper's traversals) that visit it. A load is the number of
tokens that the pack holds below the node. What happens above depends on nothing else. The cost so far is the sum of the
loads, because a pack computes each of its tokens once. Lifting to the parent adds the node's tokens to every load (eq.
9). At the parent, the loads of its children are merged in every way in which no pack outgrows C - L(parent) (eq. 10);
two packs of one child stay two packs. At the root the smallest sum wins (eq. 11).

Three prunings keep the number of states small, and none can lose the optimum:

- equal loads: one state for equal loads, and within a merge one choice among packs of equal load;
- dominance: a state is dropped if another has no more packs and, both sorted, nowhere a larger load;
- bounds: a state is dropped unless its loads, plus one visit of every ancestor by each of its packs, plus the least
  cost of the rest of the tree (`bound.py`), are less than the best packing known.

With a cap on loss terms a load is the pair (tokens, terms). docs/packing.md has the reasons and a worked example.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from verl_tree.packing.bound import least_visits
from verl_tree.packing.problem import Caps, Items

Load = tuple[int, int]
State = tuple[Load, ...]


class BudgetExceededError(ValueError):
    """The optimum was not found within the budget; there is no packing to return."""


@dataclass(slots=True)
class Budget:
    """What the programme may use, over all trees of a forest; `deadline_s` is a value of `time.perf_counter`."""

    max_states: int
    deadline_s: float
    num_states: int = field(default=0)

    def spend(self) -> None:
        """Count one state; raise BudgetExceededError if states or time are used up."""
        self.num_states += 1
        if self.num_states > self.max_states:
            raise BudgetExceededError
        if self.num_states % 1024 == 0:
            self.check_time()

    def check_time(self) -> None:
        """Raise BudgetExceededError if time is used up; for long loops that make no state."""
        if time.perf_counter() > self.deadline_s:
            raise BudgetExceededError


def exact(items: Items, *, caps: Caps, known: list[list[int]], budget: Budget) -> list[list[int]]:
    """Pack one tree with the fewest tokens possible; `known` is a packing, returned if none is better.

    The budget raises BudgetExceededError when it is used up.
    """
    programme = _Programme(items, caps=caps, known=known, budget=budget)
    return known if programme.best == sum(programme.least) else programme.solve()


class _Programme:
    """The programme on one tree. A table maps a state to the packs that make it, as bit masks of items."""

    def __init__(self, items: Items, *, caps: Caps, known: list[list[int]], budget: Budget) -> None:
        nodes = items.nodes
        self.nodes, self.caps, self.known, self.budget = nodes, caps, known, budget
        self.best = sum(map(items.union_tokens, known))
        self.own = (nodes.end - nodes.start).tolist()
        self.visits = least_visits(items, caps=caps).tolist()
        self.least = [own * visits for own, visits in zip(self.own, self.visits, strict=True)]
        # A cap that does not bind must not distinguish states, so terms count 0 under it.
        self.terms = items.terms.tolist() if items.num_terms > caps.num_terms else [0] * len(items)
        self.ends_here: list[list[int]] = [[] for _ in range(nodes.num_nodes)]
        for item, node in enumerate(items.end_node.tolist()):
            self.ends_here[node].append(item)

    def solve(self) -> list[list[int]]:
        """Return the items of each pack of the optimum."""
        nodes = self.nodes
        parent, subtree_end = nodes.parent.tolist(), nodes.subtree_end.tolist()
        children: list[list[int]] = [[] for _ in range(nodes.num_nodes)]
        for node in range(nodes.num_nodes - 1, 0, -1):
            children[parent[node]].insert(0, node)
        least_before = np.append(0, np.cumsum(self.least)).tolist()
        tables: list[dict[State, tuple[int, ...]]] = [{} for _ in range(nodes.num_nodes)]
        for node in range(nodes.num_nodes - 1, -1, -1):
            ancestors = [node]
            while parent[ancestors[-1]] >= 0:
                ancestors.append(parent[ancestors[-1]])
            subtree = least_before[subtree_end[node]] - least_before[node]
            outside = least_before[-1] - subtree - sum(self.least[each] for each in ancestors[1:])
            # Least cost of the child subtrees that are still to be merged here.
            waiting = subtree - self.least[node]
            table: dict[State, tuple[int, ...]] = {(): ()}
            for item in self.ends_here[node]:
                one = {((0, self.terms[item]),): (1 << item,)}
                table = self._merge(table, one, node=node, ancestors=ancestors, rest=outside + waiting)
            for child in children[node]:
                waiting -= least_before[subtree_end[child]] - least_before[child]
                lifted = {
                    tuple((load + self.own[child], terms) for load, terms in state): packs
                    for state, packs in tables[child].items()
                }
                tables[child] = {}
                table = self._merge(table, lifted, node=node, ancestors=ancestors, rest=outside + waiting)
            tables[node] = table
        best_state = min(
            tables[0],
            key=lambda state: (sum(load for load, _ in state) + self.own[0] * len(state), len(state)),
            default=None,
        )
        if best_state is None:
            return self.known
        return [_members(mask) for mask in tables[0][best_state]]

    def _merge(
        self,
        first: dict[State, tuple[int, ...]],
        second: dict[State, tuple[int, ...]],
        *,
        node: int,
        ancestors: list[int],
        rest: int,
    ) -> dict[State, tuple[int, ...]]:
        """Merge two tables at a node in every way that can still beat the best packing known."""
        room = self.caps.num_tokens - int(self.nodes.end[node])
        path = [(self.own[each], self.visits[each]) for each in ancestors]
        most = self._most_packs(path)
        merged: dict[State, tuple[int, ...]] = {}
        for left, left_packs in first.items():
            self.budget.check_time()
            left_sum = sum(load for load, _ in left)
            for right, right_packs in second.items():
                max_packs = most(self.best - rest - left_sum - sum(load for load, _ in right))
                if max(len(left), len(right)) > max_packs:
                    continue
                self._match(
                    list(zip(left, left_packs, strict=True)),
                    list(zip(right, right_packs, strict=True)),
                    room=room,
                    max_packs=max_packs,
                    into=merged,
                )
        return _undominated(merged, budget=self.budget)

    def _most_packs(self, path: list[tuple[int, int]]) -> Callable[[int], int]:
        """Return a function from a number of tokens to how many packs may visit every node of `path` for fewer."""

        def most(num_tokens: int) -> int:
            low, high = 0, self.nodes.num_nodes + len(self.terms)
            while low < high:
                middle = (low + high + 1) // 2
                if sum(own * max(visits, middle) for own, visits in path) < num_tokens:
                    low = middle
                else:
                    high = middle - 1
            return low

        return most

    def _match(
        self,
        left: list[tuple[Load, int]],
        right: list[tuple[Load, int]],
        *,
        room: int,
        max_packs: int,
        into: dict[State, tuple[int, ...]],
    ) -> None:
        """Join each pack of `right` to a pack of `left` of its own, or leave it alone, in every way."""
        used, packs = [False] * len(left), list(left)
        alone: list[tuple[Load, int]] = []

        def place(index: int) -> None:
            if len(packs) + len(alone) > max_packs:
                return
            if index == len(right):
                self.budget.spend()
                result = sorted(packs + alone, reverse=True)
                into.setdefault(tuple(load for load, _ in result), tuple(mask for _, mask in result))
                return
            (load, terms), mask = right[index]
            tried = set()
            for number, ((left_load, left_terms), left_mask) in enumerate(left):
                if used[number] or (left_load, left_terms) in tried:
                    continue
                tried.add((left_load, left_terms))
                if left_load + load > room or left_terms + terms > self.caps.num_terms:
                    continue
                used[number] = True
                packs[number] = ((left_load + load, left_terms + terms), left_mask | mask)
                place(index + 1)
                packs[number] = left[number]
                used[number] = False
            alone.append(right[index])
            place(index + 1)
            alone.pop()

        place(0)


def _undominated(table: dict[State, tuple[int, ...]], *, budget: Budget) -> dict[State, tuple[int, ...]]:
    """Drop states whose sorted loads are nowhere smaller than those of another that has no more packs."""
    if len(table) < 2:
        return table
    states = sorted(table, key=lambda state: (sum(load for load, _ in state), len(state), state))
    width = max(map(len, states))
    # A missing pack is less (-1) than a pack of load 0, which still visits every ancestor.
    padded = np.full((len(states), width, 2), -1, dtype=np.int64)
    for number, state in enumerate(states):
        padded[number, : len(state)] = state
    flat = padded.reshape(len(states), -1)
    kept: list[int] = []
    kept_rows = np.empty_like(flat)
    for number, row in enumerate(flat):
        if number % 256 == 0:
            budget.check_time()
        if not (kept_rows[: len(kept)] <= row).all(axis=1).any():
            kept_rows[len(kept)] = row
            kept.append(number)
    return {states[number]: table[states[number]] for number in kept}


def _members(mask: int) -> list[int]:
    """List the set bits, ascending."""
    members = []
    while mask:
        lowest = mask & -mask
        members.append(lowest.bit_length() - 1)
        mask ^= lowest
    return members
