"""Simulates how busy the three Triton kernels keep a GPU's processors (SMs), from real block lists. Needs no GPU.

Each processor that is free takes the next program, one at a time, as on a GPU where a program fills a processor (255
registers, 8 warps). A partial tile costs 1.5 full ones; what a program, a part and its addition cost beside their tiles
is in `verl_tree.attention.row_cuts`. Utilisation is the time that goes into whole rows, by the time of all processors
until the last program ends. Forward and dq start the heads of a group side by side, the longest rows of each key-value
head first. For dK/dV (`dkv`) there are three orders:

- `by head`: one key-value head after the other, the longest rows of each first, no row cut;
- `by row`: the longest rows of all heads first, no row cut;
- `cut`: what the backend does, with the parts that it adds and their memory.

    python benchmarks/sm_utilisation.py [--num-processors 132] [--head-dim 128] [--out FILE]
"""

import argparse
from typing import Any

import numpy as np
from attention import SHAPES
from harness import environment, new_parser, print_table, write_json

from verl_tree.attention.blocks import BlockLists
from verl_tree.attention.row_cuts import FULL_TILE, PARTIAL_TILE, ROW, KeyRows, choose_bound, makespan, simulate
from verl_tree.attention.triton_configs import HOPPER_CONFIGS, KernelConfig, padded_dim
from verl_tree.testing.synthetic import overlap, star
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

PACKS = SHAPES | {
    "16k pack: 2k prompt, 16 x 1k": lambda: star(16, prompt_len=2048, branch_len=1024),
    "32k pack: 1k prompt, 32 x 1k": lambda: star(32, prompt_len=1024, branch_len=1024),
    "POR 0.9 of 128k flat": lambda: overlap(0.9, num_leaves=64, num_flat_tokens=131072, depth=4),
}
HEADS = ((32, 8), (16, 8), (14, 2), (28, 4))
"""Query and key-value heads: Qwen3 8B; 0.6B and 1.7B; Qwen2.5 0.5B; 7B."""


def main() -> None:
    """Simulate all packs and heads, print the table and write the JSON."""
    options = _parse_options()
    records = []
    for name, make in PACKS.items():
        ends_T = TreeLayout.from_forest(TokenForest.from_sequences(make())).subtree_end_T.numpy()
        records += [
            {"pack": name, "tokens": len(ends_T), "heads": f"{num_heads}/{num_kv_heads}"}
            | _simulate(ends_T, num_heads=num_heads, num_kv_heads=num_kv_heads, options=options)
            for num_heads, num_kv_heads in HEADS
        ]
    print_table([{key: _format(value) for key, value in record.items()} for record in records])
    write_json({"environment": environment(options), "records": records}, options.out)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--num-processors", type=int, default=132, help="132: H100 and H200")
    parser.add_argument("--head-dim", type=int, default=128)
    return parser.parse_args()


def _simulate(ends_T: np.ndarray, *, num_heads: int, num_kv_heads: int, options: argparse.Namespace) -> dict[str, Any]:
    configs = HOPPER_CONFIGS[padded_dim(options.head_dim)]
    num_groups, num_processors = num_heads // num_kv_heads, options.num_processors
    lists = {config: _lists(ends_T, config) for config in (configs.forward, configs.dkv, configs.dq)}
    found: dict[str, Any] = {}
    for name, config in (("forward", configs.forward), ("dq", configs.dq)):
        cost_R = _row_costs(lists[config].by_query.rows_R4.numpy(), num_groups=1, other_len=config.key_block)
        found[name] = _utilisation(np.tile(np.repeat(cost_R, num_groups), num_kv_heads), num_processors)
    rows = lists[configs.dkv].by_key
    cost_R = _row_costs(rows.rows_R4.numpy(), num_groups=num_groups, other_len=configs.dkv.query_block)
    sizes = {"query_block": configs.dkv.query_block, "num_groups": num_groups, "num_kv_heads": num_kv_heads}
    bound = choose_bound(rows, num_processors=num_processors, **sizes)
    rows_R4 = rows.rows_R4.numpy().astype(np.int64)
    num_slots = KeyRows.from_rows(rows, bound=bound).num_slots
    return found | {
        "dkv by head": _utilisation(np.tile(cost_R, num_kv_heads), num_processors),
        "dkv by row": _utilisation(np.repeat(cost_R, num_kv_heads), num_processors),
        "dkv cut": simulate(rows_R4, bound=bound, num_processors=num_processors, **sizes),
        "parts": num_slots * num_kv_heads,
        "parts MB": num_slots * num_kv_heads * 2 * configs.dkv.key_block * options.head_dim * 4 / 1e6,
    }


def _lists(ends_T: np.ndarray, config: KernelConfig) -> BlockLists:
    return BlockLists.from_subtree_end(ends_T, query_block=config.query_block, key_block=config.key_block)


def _row_costs(rows_R4: np.ndarray, *, num_groups: int, other_len: int) -> np.ndarray:
    """Return what the program of each row costs, in halves of a full tile; `other_len` is what a tile adds to a row."""
    _, start_R, middle_R, end_R = rows_R4.T
    tiles_R = FULL_TILE * (middle_R - start_R) + PARTIAL_TILE * (end_R - middle_R)
    return num_groups * tiles_R + FULL_TILE * ROW / other_len


def _utilisation(costs: np.ndarray, num_processors: int) -> float:
    return float(costs.sum()) / num_processors / makespan(costs, num_processors=num_processors)


def _format(value: object) -> object:
    if not isinstance(value, float):
        return value
    return f"{value:.3f}" if value <= 1 else f"{value:.0f}"


if __name__ == "__main__":
    main()
