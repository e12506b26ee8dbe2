"""Ruin and recreate (Schrimpf et al., 2000): take a few packs apart, put them together anew, keep the better result.

Items of a few packs are taken out and put back one after another, each where it shares most. The result is kept unless
it is worse. This moves and swaps leaves, and merges and splits packs. The number of rounds depends on the instance
only, so one seed gives one result; the deadline is a safeguard.
"""

import random
import time
from bisect import bisect

import numpy as np

from verl_tree.packing.bound import tree_lower_bound
from verl_tree.packing.problem import Caps, Items

MAX_WINDOW_ITEMS = 384
"""Items that are improved together with one table of pairs."""

_MAX_RUINED_ITEMS = 32
_STALE_ROUNDS = 250
"""Rounds without a better packing after which a search ends; four more per item."""


def improve(
    items: Items,
    bins: list[list[int]],
    *,
    caps: Caps,
    num_rounds: int,
    seed: int,
    deadline_s: float,
    lower_bound: int,
) -> list[list[int]]:
    """Improve the packs `bins`, window by window if there are many items; the arguments are those of `heuristic`."""
    bins = sorted(bins)
    if len(items) <= MAX_WINDOW_ITEMS:
        search = _RuinAndRecreate(items, bins, caps=caps, seed=seed)
        return search.run(num_rounds, deadline_s=deadline_s, lower_bound=lower_bound)
    # A window is some packs in DFS order; the second pass shifts the windows by half a window.
    for is_shifted in (False, True):
        improved: list[list[int]] = []
        windows = _windows(bins, max_items=MAX_WINDOW_ITEMS, is_shifted=is_shifted)
        for number, window in enumerate(windows):
            if len(window) == 1:
                improved.extend(window)
                continue
            index = np.array(sorted(item for members in window for item in members))
            local = {item: position for position, item in enumerate(index.tolist())}
            part = items.subset(index)
            search = _RuinAndRecreate(
                part, [[local[item] for item in members] for members in window], caps=caps, seed=seed + number
            )
            found = search.run(
                num_rounds * len(index) // (2 * len(items)),
                deadline_s=deadline_s,
                lower_bound=tree_lower_bound(part, caps=caps),
            )
            improved.extend([index[members].tolist() for members in found])
        bins = sorted(improved)
    return bins


def _windows(bins: list[list[int]], *, max_items: int, is_shifted: bool) -> list[list[list[int]]]:
    """Part packs into windows of at most `max_items` items, half that in the first if shifted; no pack is split."""
    windows: list[list[list[int]]] = []
    room = 0
    for members in bins:
        if windows and len(members) <= room:
            windows[-1].append(members)
        else:
            room = max_items // 2 if is_shifted and not windows else max_items
            windows.append([members])
        room -= len(members)
    return windows


class _RuinAndRecreate:
    """The search on one window, in plain Python on a table of pairs, because the packs that it touches are small."""

    def __init__(self, items: Items, bins: list[list[int]], *, caps: Caps, seed: int) -> None:
        self.caps = caps
        self.random = random.Random(seed)
        self.lens, self.terms = items.lens.tolist(), items.terms.tolist()
        self.shared = _pairs(items)
        self.bins = [list(members) for members in bins]
        self.bin_of = [0] * len(items)
        for number, members in enumerate(self.bins):
            for item in members:
                self.bin_of[item] = number
        self.tokens = [items.union_tokens(members) for members in self.bins]
        self.bin_terms = [sum(self.terms[item] for item in members) for members in self.bins]

    def run(self, num_rounds: int, *, deadline_s: float, lower_bound: int) -> list[list[int]]:
        """Run the rounds and return the last packing, because no round makes it worse."""
        stale = 0
        for number in range(num_rounds):
            if sum(self.tokens) <= lower_bound or len(self.bins) < 2 or stale >= _STALE_ROUNDS + 4 * len(self.lens):
                break
            if number % 32 == 0 and time.perf_counter() > deadline_s:
                break
            stale = 0 if self._round() else stale + 1
        return [sorted(members) for members in self.bins]

    def _round(self) -> bool:
        """Ruin and recreate once; return whether tokens were saved."""
        chosen = self._choose()
        removed = self._remove(chosen)
        kept = [[item for item in self.bins[number] if item not in removed] for number in chosen]
        old_tokens = sum(self.tokens[number] for number in chosen)
        new = _Bins(self, kept)
        order = self._order(removed)
        blink = self.random.choice((0.0, 0.0, 0.05, 0.15))
        for item in order:
            new.insert(item, blink=blink)
            if sum(new.tokens) > old_tokens:
                return False
        new_tokens = sum(new.tokens)
        members = [each for each in new.members if each]
        if new_tokens == old_tokens and len(members) > len(chosen):
            return False
        self._replace(chosen, new)
        return new_tokens < old_tokens

    def _choose(self) -> list[int]:
        """Choose a few packs: that of a random item, then those of its neighbours in DFS order or random ones."""
        anchor = self.random.randrange(len(self.lens))
        chosen = [self.bin_of[anchor]]
        num_chosen = min(self.random.choice((2, 2, 3, 3, 4)), len(self.bins))
        near = self.random.random() < 0.6
        num_items, step = len(self.lens), 1
        while near and len(chosen) < num_chosen and step < num_items:
            for item in (anchor - step, anchor + step):
                if 0 <= item < num_items and self.bin_of[item] not in chosen and len(chosen) < num_chosen:
                    chosen.append(self.bin_of[item])
            step += 1
        if len(chosen) == num_chosen:
            return chosen
        others = [number for number in range(len(self.bins)) if number not in chosen]
        return chosen + self.random.sample(others, num_chosen - len(chosen))

    def _remove(self, chosen: list[int]) -> set[int]:
        """Choose the items that leave each pack: all, neighbours in DFS order if there are many, or a random part."""
        removed: set[int] = set()
        share = max(_MAX_RUINED_ITEMS // len(chosen), 1)
        for number in chosen:
            members = self.bins[number]
            if len(members) > share:
                start = self.random.randrange(len(members) - share + 1)
                members = members[start : start + share]
            if len(members) > 1 and self.random.random() < 0.3:
                members = self.random.sample(members, self.random.randrange(1, len(members)))
            removed.update(members)
        return removed

    def _order(self, removed: set[int]) -> list[int]:
        """Choose the order in which items are put back: by length (exact or noisy), in rotated DFS order, or random."""
        order = sorted(removed)
        kind = self.random.randrange(4)
        if kind == 0:
            order.sort(key=self.lens.__getitem__, reverse=True)
        elif kind == 1:
            self.random.shuffle(order)
        elif kind == 2:
            start = self.random.randrange(len(order))
            order = order[start:] + order[:start]
        else:
            noise = self.random.random
            order.sort(key=lambda item: self.lens[item] * (0.7 + 0.6 * noise()), reverse=True)
        return order

    def _replace(self, chosen: list[int], new: "_Bins") -> None:
        filled = [number for number, members in enumerate(new.members) if members]
        places = chosen[: len(filled)] + list(range(len(self.bins), len(self.bins) + len(filled) - len(chosen)))
        for place, number in zip(places, filled, strict=True):
            if place == len(self.bins):
                self.bins.append([])
                self.tokens.append(0)
                self.bin_terms.append(0)
            self.bins[place] = new.members[number]
            self.tokens[place], self.bin_terms[place] = new.tokens[number], new.terms[number]
            for item in new.members[number]:
                self.bin_of[item] = place
        for place in sorted(chosen[len(filled) :], reverse=True):
            # The last pack takes the place that became free.
            members, tokens, terms = self.bins.pop(), self.tokens.pop(), self.bin_terms.pop()
            if place < len(self.bins):
                self.bins[place], self.tokens[place], self.bin_terms[place] = members, tokens, terms
                for item in members:
                    self.bin_of[item] = place


class _Bins:
    """Packs under construction."""

    def __init__(self, search: _RuinAndRecreate, members: list[list[int]]) -> None:
        self.search = search
        self.members: list[list[int]] = [[] for _ in members]
        self.tokens = [0] * len(members)
        self.terms = [0] * len(members)
        for number, kept in enumerate(members):
            for item in kept:  # ascending: each shares most with the one before it
                own = search.shared[self.members[number][-1]][item] if self.members[number] else 0
                self.members[number].append(item)
                self.tokens[number] += search.lens[item] - own
                self.terms[number] += search.terms[item]

    def insert(self, item: int, *, blink: float) -> None:
        """Put an item where it shares most, on ties into the fullest; overlook a bin with probability `blink`."""
        search = self.search
        item_len, item_terms, row = search.lens[item], search.terms[item], search.shared[item]
        max_tokens, max_terms = search.caps.num_tokens, search.caps.num_terms
        best, best_shared, best_tokens, best_place = -1, -1, -1, 0
        for number, members in enumerate(self.members):
            place = bisect(members, item)
            shared = 0
            if place:
                shared = row[members[place - 1]]
            if place < len(members) and row[members[place]] > shared:
                shared = row[members[place]]
            tokens = self.tokens[number]
            if shared < best_shared or (shared == best_shared and tokens <= best_tokens):
                continue
            if tokens + item_len - shared > max_tokens or self.terms[number] + item_terms > max_terms:
                continue
            if blink and search.random.random() < blink:
                continue
            best, best_shared, best_tokens, best_place = number, shared, tokens, place
        if best < 0:
            best, best_shared, best_place = len(self.members), 0, 0
            self.members.append([])
            self.tokens.append(0)
            self.terms.append(0)
        self.members[best].insert(best_place, item)
        self.tokens[best] += item_len - best_shared
        self.terms[best] += item_terms


def _pairs(items: Items) -> list[list[int]]:
    """Count the tokens that every two items share, (m, m), as lists because they are read one number at a time."""
    is_later = np.triu(np.ones((len(items), len(items)), dtype=bool), 1)
    table = np.where(is_later, np.minimum.accumulate(np.where(is_later, items.lcp, items.lens.max()), axis=1), 0)
    return (table + table.T + np.diag(items.lens)).tolist()
