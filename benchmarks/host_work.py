"""Times what the host plans for one pack before a model runs: the layout, the attention plan and the tables of tiles.

- `layout and plan`: a forest's layout and its attention plan;
- `fa4`: tables of tiles of 128 x 128 for the forward and the backward pass;
- `triton`: the lists of the forward kernel and of both gradient kernels, each with tiles of its own, at head dim 128 on
  Hopper.

    python benchmarks/host_work.py [--out host_work.json] [--repetitions 5]
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from harness import environment, interleave, new_parser, print_table, write_json

from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.triton_configs import HOPPER_CONFIGS
from verl_tree.testing.synthetic import overlap, star, tree_search
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

SHAPES: dict[str, Callable[[], list[np.ndarray]]] = {
    "POR .92 of 131k flat": lambda: overlap(0.92, num_leaves=64, num_flat_tokens=131_072, depth=4),
    "128k star": lambda: star(32, prompt_len=8192, branch_len=3840),
    "search of 305k": lambda: tree_search(
        num_trees=32, num_expansions=8, num_rounds=6, num_steps=8, prompt_len=1024, step_len=(30, 100)
    ),
    "1M star": lambda: star(256, prompt_len=8192, branch_len=3840),
}


def main() -> None:
    """Time all shapes, print the table and write the JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    records = [_time_shape(name, repetitions=options.repetitions) for name in SHAPES]
    print_table(records)
    write_json({"environment": environment(options), "records": records}, options.out)


def _time_shape(name: str, *, repetitions: int) -> dict[str, Any]:
    forest = TokenForest.from_sequences(SHAPES[name]())
    subtree_end_T = TreeLayout.from_forest(forest).subtree_end_T
    parts = {
        "layout and plan": lambda: AttentionPlan.from_layout(TreeLayout.from_forest(forest)),
        "fa4": lambda: _fa4_tables(AttentionPlan.from_subtree_end(subtree_end_T)),
        "triton": lambda: _triton_lists(AttentionPlan.from_subtree_end(subtree_end_T)),
    }
    times = interleave(parts, repetitions=repetitions, num_warmups=1, title=f"{name}, ")
    return {"shape": name, "tokens": forest.num_tokens, "nodes": forest.num_nodes} | {
        f"{part}, ms": round(1000 * each.median_cpu_s, 1) for part, each in times.items()
    }


def _fa4_tables(plan: AttentionPlan) -> None:
    lists = BlockLists.of_plan(plan, query_block=128, key_block=128)
    for rows in (lists.by_query, lists.by_key):
        rows.tables()


def _triton_lists(plan: AttentionPlan) -> None:
    """Find what `triton_attention` hands to its kernels."""
    configs = HOPPER_CONFIGS[128]
    for config in (configs.forward, configs.dkv, configs.dq):
        lists = BlockLists.of_plan(plan, query_block=config.query_block, key_block=config.key_block)
        _ = lists.by_key if config is configs.dkv else lists.by_query


if __name__ == "__main__":
    main()
