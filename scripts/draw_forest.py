"""Draws docs/forest.svg: one session as a forest, its pack, and the pack's attention mask, from the real code.

python scripts/draw_forest.py --out docs/forest.svg
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

SESSION = [
    "sys ask call_a call_b | 42 ok",
    "sys ask call_a call_b | 7 fine",
    "sys ask call_a call_b | 42 7 sum 49",
    "sys ask no idea",
]
"""Trajectories as words: two tool branches, the main branch with both results, and another sample of the prompt."""

COLOURS = ["#4c72b0", "#55a868", "#c44e52", "#8172b3", "#ccb974", "#64b5cd", "#dd8452", "#937860"]


def draw_flat(axes: Axes, words: list[list[str]], node_of: list[list[int]]) -> None:
    """Draw the trajectories as rows: what a flat trainer computes."""
    for row, (line, nodes) in enumerate(zip(words, node_of, strict=True)):
        for column, (word, node) in enumerate(zip(line, nodes, strict=True)):
            axes.add_patch(plt.Rectangle((column, -row), 0.94, 0.8, color=COLOURS[node], alpha=0.75))
            axes.text(column + 0.47, -row + 0.4, word, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, max(map(len, words)))
    axes.set_ylim(-len(words) + 0.9, 1)
    axes.set_title(f"4 trajectories, {sum(map(len, words))} flat tokens", fontsize=9)
    axes.axis("off")


def draw_tree(axes: Axes, forest: TokenForest, layout: TreeLayout, vocabulary: list[str], node_T: list[int]) -> None:
    """Draw the forest: every token once, at its original position."""
    row_of_node: dict[int, int] = {}
    for node, (parent, start) in enumerate(zip(forest.node_parent.tolist(), forest.node_start.tolist(), strict=True)):
        is_first_child = parent >= 0 and parent == node - 1  # nodes are in preorder
        row_of_node[node] = row_of_node[parent] if is_first_child else len(set(row_of_node.values()))
        if parent >= 0 and not is_first_child:
            rows = [-row_of_node[parent] + 0.4, -row_of_node[node] + 0.4]
            axes.plot([start - 0.03] * 2, rows, color="grey", linewidth=1, zorder=0)
    for token, (token_id, position) in enumerate(
        zip(layout.token_ids_T.tolist(), layout.position_T.tolist(), strict=True)
    ):
        row = -row_of_node[node_T[token]]
        axes.add_patch(plt.Rectangle((position, row), 0.94, 0.8, color=COLOURS[node_T[token]], alpha=0.75))
        axes.text(position + 0.47, row + 0.4, vocabulary[token_id], ha="center", va="center", fontsize=7)
    axes.set_xlim(0, int(layout.position_T.max()) + 1)
    axes.set_ylim(-max(row_of_node.values()) - 0.1, 1)
    axes.set_title(f"their forest: {layout.num_tokens} tree tokens", fontsize=9)
    axes.axis("off")


def draw_mask(axes: Axes, layout: TreeLayout, vocabulary: list[str], node_T: list[int]) -> None:
    """Draw the pack in DFS preorder and who sees whom: kv <= q < subtree_end[kv]."""
    visible = layout.materialize()
    for query, key in visible.nonzero().tolist():
        axes.add_patch(plt.Rectangle((key, -query), 0.94, 0.94, color=COLOURS[node_T[key]], alpha=0.75))
    words = [vocabulary[token_id] for token_id in layout.token_ids_T.tolist()]
    axes.set_xlim(0, layout.num_tokens)
    axes.set_ylim(-layout.num_tokens + 1, 1)
    axes.set_aspect("equal")
    ticks = [index + 0.47 for index in range(layout.num_tokens)]
    labels = [f"{word} {position}" for word, position in zip(words, layout.position_T.tolist(), strict=True)]
    axes.set_xticks(ticks, labels, rotation=90, fontsize=6)
    axes.xaxis.tick_top()
    axes.set_yticks([-index + 0.47 for index in range(layout.num_tokens)], words, fontsize=6)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("its pack: keys with their positions, and the queries that see them", fontsize=9)


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/forest.svg"))
    arguments = parser.parse_args()
    words = [line.split() for line in SESSION]
    vocabulary = sorted({word for line in words for word in line})
    forest = TokenForest.from_sequences([[vocabulary.index(word) for word in line] for line in words])
    layout = TreeLayout.from_forest(forest)
    node_T = np.repeat(np.arange(forest.num_nodes), forest.node_end - forest.node_start).tolist()
    lines, node_of = [], []
    for leaf, (start, end) in enumerate(zip(layout.leaf_offsets[:-1], layout.leaf_offsets[1:], strict=True)):
        lines.append(words[layout.leaves[leaf]])
        node_of.append([node_T[token] for token in layout.tree_index_F[start:end].tolist()])

    plt.rcParams["svg.hashsalt"] = "verl_tree"
    figure = plt.figure(figsize=(9.5, 4.6))
    grid = figure.add_gridspec(2, 2, width_ratios=[1.1, 1])
    draw_flat(figure.add_subplot(grid[0, 0]), lines, node_of)
    draw_tree(figure.add_subplot(grid[1, 0]), forest, layout, vocabulary, node_T)
    draw_mask(figure.add_subplot(grid[:, 1]), layout, vocabulary, node_T)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(arguments.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
