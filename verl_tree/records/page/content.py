"""The content of a tree's page as JSON values: per node its text by producer, its measures and its place.

Display order: a fork's branches follow it, each one level deeper, in the order of their sessions and calls. A branch
with more than half of the fork's leaves comes last and stays at the fork's level. So a long conversation with side
branches reads straight down, and there are at most log2(leaves) levels.
"""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from verl_tree.records import StoredLeaf, StoredTree, end_nodes
from verl_tree.tree import TokenForest

_PROMPT, _ENVIRONMENT, _UNKNOWN_CALL = -3, -2, -1
"""Producers of a token besides the recorded calls 0, 1, ..."""
_ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""How far from 0, of the largest measure of a tree, an advantage may be by rounding."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the page uses."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of token ids."""
        ...


def page_content(tree: StoredTree, *, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the JSON values that the page's script needs; without a tokenizer, texts are token ids.

    Nodes are in display order, and a node's parent is an index into that order. `is_training` is whether the tree has
    advantages; those of a validation have none, and nothing of them is trained.
    """
    counted, tree = tree.forest(), tree.shown()
    forest = tree.forest()
    placed = _place(forest)
    position = {each.node: index for index, each in enumerate(placed)}
    ends = end_nodes(forest).tolist()
    rewards = [reward for leaf in tree.leaves if (reward := _finite(leaf.reward)) is not None]
    nodes = [_node(tree, forest, each, tokenizer=tokenizer) for each in placed]
    images = _count_images(nodes)
    for row, node in enumerate(ends):
        nodes[position[node]]["ends"].append(row)
    for each, content in zip(placed, nodes, strict=True):
        parent = int(forest.node_parent[each.node])
        content["parent"] = position[parent] if parent >= 0 else -1
    leaves = [_leaf(leaf, node=position[node]) for leaf, node in zip(tree.leaves, ends, strict=True)]
    _clear_rounding([*nodes, *leaves])
    advantages = [abs(node["advantage"]) for node in nodes if node["advantage"] is not None]
    return {
        "uid": tree.uid,
        "step": tree.step,
        "num_flat_tokens": counted.num_flat_tokens,
        "num_tree_tokens": counted.num_tokens,
        "num_sessions": len({leaf.session for leaf in tree.leaves}),
        "por": counted.potential_overlap_ratio,
        "is_training": any(leaf.token_advantages is not None for leaf in tree.leaves),
        "reward_range": [min(rewards), max(rewards)] if rewards else None,
        "advantage_range": [0.0 - max(advantages), max(advantages)] if advantages else None,
        "overlap": overlap_histogram(counted),
        "roles": sorted({leaf.role for leaf in tree.leaves if leaf.role is not None}),
        "leaves": leaves,
        "images": [_data_url(tree.thumbnails.get(number)) for number in images],
        "nodes": nodes,
    }


def _clear_rounding(contents: Sequence[dict[str, Any]]) -> None:
    """Set advantages to 0 that are so but for rounding: they are differences of rewards, computed in float32."""
    measures = [each[name] for each in contents for name in ("reward", "advantage") if each[name] is not None]
    threshold = _ROUNDING * max(map(abs, measures), default=0.0)
    for each in contents:
        if each["advantage"] is not None and abs(each["advantage"]) <= threshold:
            each["advantage"] = 0.0


def _count_images(nodes: Sequence[dict[str, Any]]) -> list[int]:
    """Count the distinct images in display order, put each one's place for its number, and return the numbers."""
    places: dict[int, int] = {}
    for passage in (each for node in nodes for each in node["passages"] if each["image"] is not None):
        passage["image"] = place = places.setdefault(passage["image"], len(places))
        passage["text"] = f"image {place + 1}, {passage['text']}"
    return list(places)


def _data_url(thumbnail: bytes | None) -> str | None:
    return None if thumbnail is None else f"data:image/jpeg;base64,{base64.b64encode(thumbnail).decode()}"


def overlap_histogram(forest: TokenForest) -> list[tuple[int, int]]:
    """Return (leaves, tokens): how many tree tokens are shared by how many leaves (Tree Training, figure 7).

    Entries ascend, and none is empty. The tokens sum to the tree tokens.
    """
    num_leaves = forest.node_last_leaf - forest.node_first_leaf
    counts = np.bincount(num_leaves, weights=forest.node_end - forest.node_start).astype(int)
    return [(num, count) for num, count in enumerate(counts.tolist()) if count]


def _finite(value: float | None) -> float | None:
    # JSON has no NaN and no infinity: show them as missing.
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class _Placed:
    """A node's place on the page: its level, its number among its siblings and their count, both 0 for roots."""

    node: int
    level: int
    branch: int
    num_branches: int


def _place(forest: TokenForest) -> list[_Placed]:
    children: dict[int, list[int]] = {node: [] for node in range(-1, forest.num_nodes)}
    for node, parent in enumerate(forest.node_parent.tolist()):
        children[parent].append(node)
    num_leaves = (forest.node_last_leaf - forest.node_first_leaf).tolist()
    bounds = list(zip(forest.node_first_leaf.tolist(), forest.node_last_leaf.tolist(), strict=True))
    first_row = [min(forest.order[first:last].tolist()) for first, last in bounds]

    placed = []
    # A stack, since a long conversation is deeper than Python's recursion limit.
    stack = [_Placed(node, 0, 0, 0) for node in sorted(children[-1], key=first_row.__getitem__, reverse=True)]
    while stack:
        here = stack.pop()
        placed.append(here)
        branches = sorted(children[here.node], key=first_row.__getitem__)
        trunk = [node for node in branches if 2 * num_leaves[node] > num_leaves[here.node]]
        shown = [node for node in branches if node not in trunk] + trunk
        below = [
            _Placed(node, here.level + (node not in trunk), number, len(shown))
            for number, node in enumerate(shown, start=1)
        ]
        stack += reversed(below)
    return placed


def _leaf(leaf: StoredLeaf, *, node: int) -> dict[str, Any]:
    return {
        "name": f"{leaf.session}_{leaf.leaf}",
        "num_tokens": len(leaf.token_ids),
        "num_trained": int(leaf.is_trained.sum()),
        "reward": _finite(leaf.reward),
        "advantage": _finite(leaf.advantage),
        "role": leaf.role,
        "info": {name: str(value) for name, value in (leaf.reward_extra_info or {}).items()},
        "node": node,
    }


def _node(tree: StoredTree, forest: TokenForest, placed: _Placed, *, tokenizer: Tokenizer | None) -> dict[str, Any]:
    node = placed.node
    span = slice(int(forest.node_start[node]), int(forest.node_end[node]))
    rows = forest.order[forest.node_first_leaf[node] : forest.node_last_leaf[node]].tolist()
    leaves = [tree.leaves[row] for row in sorted(rows)]
    rewards = [reward for leaf in leaves if (reward := _finite(leaf.reward)) is not None]
    return {
        "level": placed.level,
        "branch": placed.branch,
        "num_branches": placed.num_branches,
        "start": span.start,
        "num_tokens": span.stop - span.start,
        "rows": sorted(rows),
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "advantage": _mean_advantage(leaves, span),
        "fork": _fork_kind(leaves[0], span.start) if placed.num_branches > 1 else None,
        "passages": _passages(leaves, span, tokenizer=tokenizer),
        "ends": [],
    }


def _mean_advantage(leaves: Sequence[StoredLeaf], span: slice) -> float | None:
    """Return the mean advantage of a node's tokens over the leaves that train them, or None if none does."""
    values = []
    for leaf in leaves:
        if leaf.token_advantages is not None:
            start = min(max(span.start, leaf.prompt_len), span.stop)
            is_trained = leaf.is_trained[start : span.stop]
            values.append(leaf.token_advantages[start - leaf.prompt_len : span.stop - leaf.prompt_len][is_trained])
    trained = np.concatenate(values) if values else np.zeros(0)
    return _finite(float(trained.mean(dtype=np.float64))) if trained.size else None


def _producers(leaf: StoredLeaf, span: slice) -> np.ndarray:
    """Return the producer of each token of a part of a leaf: a call's index or one of the constants above."""
    producers = np.full(len(leaf.token_ids), _ENVIRONMENT)
    producers[: leaf.prompt_len] = _PROMPT
    producers[leaf.is_trained] = _UNKNOWN_CALL
    for run in leaf.calls:
        producers[run.start : run.end] = run.call
    return producers[span]


def _turn_rewards(leaf: StoredLeaf, span: slice) -> np.ndarray:
    """Return what each token of a part of a leaf earned, float64; the leaf's last token has the leaf's own reward."""
    rewards = np.zeros(len(leaf.token_ids))
    if leaf.token_rewards is not None:
        rewards[leaf.prompt_len : -1] = leaf.token_rewards[:-1]
    return rewards[span]


def _fork_kind(leaf: StoredLeaf, start: int) -> str:
    """Return why a branch of this leaf begins at `start`.

    `sampled`: its first token was sampled, so two calls went on differently from the same tokens. Otherwise the branch
    begins with text that was read: the kind of the first call after it (`fork`, `drift`, ...), or `read` without one.
    """
    behind = [run for run in leaf.calls if run.end > start]
    if behind and behind[0].start > start:
        return behind[0].kind
    return "sampled" if behind or leaf.is_trained[start] else "read"


def _passages(leaves: Sequence[StoredLeaf], span: slice, *, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Cut a node's tokens where the producer or the number of leaves that train them changes, and around images.

    A passage that only an image cuts off from the one before it `continues` that one. `turn_reward` is the mean over
    the `num_rewarded` leaves on which tokens of the passage earned something besides what the leaf earned at its end.
    """
    owner = leaves[0]
    producers = _producers(owner, span)
    num_training = np.sum([leaf.is_trained[span] for leaf in leaves], axis=0)
    is_cut = (np.diff(producers) != 0) | (np.diff(num_training) != 0)
    bounds = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(producers)]
    kinds = {run.call: run.kind for run in owner.calls}
    names = {_PROMPT: "prompt", _ENVIRONMENT: "environment"}
    rewards = np.stack([_turn_rewards(leaf, span) for leaf in leaves])
    shown = {run.start - span.start: run for run in owner.images if span.start <= run.start < span.stop}
    passages = []
    for start, end in pairwise(bounds):
        producer = int(producers[start])
        earned = [each for each in rewards[:, start:end].sum(axis=1).tolist() if _finite(each)]
        inside = [(at, run.end - span.start) for at, run in shown.items() if start <= at < end]
        edges = {min(edge, end) for edges in inside for edge in edges}
        for first, last in pairwise(sorted({start, end} | edges)):
            image = shown[first].number if first in shown else None
            token_ids = owner.token_ids[span.start + first : span.start + last].tolist()
            passages.append(
                {
                    "who": names.get(producer, "model"),
                    "call": producer if producer >= 0 else None,
                    "session": owner.session,
                    "kind": kinds.get(producer),
                    "num_training": int(num_training[start]),
                    "turn_reward": sum(earned) / len(earned) if earned else None,
                    "num_rewarded": len(earned),
                    "num_tokens": end - start,
                    "continues": first > start,
                    "image": image,
                    "text": f"{last - first} tokens" if image is not None else _text(token_ids, tokenizer=tokenizer),
                }
            )
    return passages


def _text(token_ids: list[int], *, tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, token_ids)) if tokenizer is None else tokenizer.decode(token_ids)
