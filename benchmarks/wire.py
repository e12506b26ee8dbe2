"""What rows weigh in TransferQueue as trees and flat, and what writing and reading them takes. JSON.

Real queue, real storage units. The rows are those of drawn groups, with the fields that verl's agent loop worker
writes, in four sessions a group. Both sides take turns. A read is of all columns, of what an update reads (`UPDATE`),
and of that for a quarter of the rows, as a rank of four reads them.

    PYTHONPATH=. python benchmarks/wire.py --out docs/benchmarks/data/wire.json
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from harness import Times, environment, new_parser, print_table, write_json
from omegaconf import OmegaConf
from scale import row_fields, value_bytes
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.leaf_shapes import WrittenRow, leaf_shapes
from rollout_hooks.capture.wire_columns import PromptColumns
from rollout_hooks.capture.wire_storage import TreeStorageManager, writing
from verl_tree.testing.synthetic import caterpillar, star, tool_fan_out, tree_search

SHAPES = {"star": star, "tool_fan_out": tool_fan_out, "tree_search": tree_search, "caterpillar": caterpillar}
EIGHTH = {
    "star": partial(star, prompt_len=1024, branch_len=(32, 256)),
    "tool_fan_out": partial(tool_fan_out, prompt_len=256, plan_len=(4, 64), call_len=(4, 32), result_len=(8, 128)),
}
NUM_GROUPS, NUM_SESSIONS = 4, 4
UPDATE = ["input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs"]
CHAT = [{"role": "user", "content": "x" * 2048}]
EXPERTS = (16, 8)  # layers, experts of a token


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    settings = {"SimpleStorage": {"num_data_storage_units": 2, "trees": True}}
    tq.init(OmegaConf.create({"backend": settings}))
    cases = [*((name, draw, False) for name, draw in SHAPES.items())]
    cases += [*((f"{name}, an eighth", draw, False) for name, draw in EIGHTH.items()), ("star, experts", star, True)]
    records = []
    for name, draw, has_experts in cases:
        groups = [list(_rows(draw(seed=options.seed + number), has_experts)) for number in range(NUM_GROUPS)]
        records.append({"rows of": name, **measure(groups, options.repetitions)})
    print_table(records)
    write_json({"environment": environment(options), "cases": records}, options.out)


def _rows(sequences: Sequence[np.ndarray], has_experts: bool) -> Iterator[dict[str, Any]]:
    """Yield the fields of a group's rows, whose prompt is what all share."""
    shapes = _shapes(sequences)
    prompt_len = int(shapes["num_shared"][shapes["rank"] > 0].min())
    for token_ids in sequences:
        # Tokens that rows share have the same values in all columns.
        drawn = np.random.default_rng(0).random(len(token_ids)) * -1 - token_ids % 7
        fields = row_fields(token_ids.tolist(), log_probs=drawn.tolist(), prompt_len=prompt_len)
        if has_experts:
            layers_and_experts = torch.arange(math.prod(EXPERTS)).view(EXPERTS)
            numbers = fields["input_ids"][:, None, None] + layers_and_experts
            fields["routed_experts"] = (numbers % 128).to(torch.int16)
        yield fields | {"raw_prompt": CHAT}


def _shapes(paths: Sequence[Any]) -> np.ndarray:
    return leaf_shapes([WrittenRow.of(path, response_mask=[], reward=None) for path in paths])


def measure(groups: list[list[dict[str, Any]]], repetitions: int) -> dict[str, Any]:
    """Write and read the groups in turns, and return bytes and times."""
    times = {side: {name: Times() for name in ("put", "get all", "get update", "get quarter")} for side in SIDES}
    stored = {}
    for _ in range(repetitions):
        for side in SIDES:
            with times[side]["put"].measure():
                keys = _put(groups, side)
            read = partial(tq.kv_batch_get, partition_id="train")
            with times[side]["get all"].measure():
                read(keys=keys)
            with times[side]["get update"].measure():
                read(keys=keys, select_fields=UPDATE)
            with times[side]["get quarter"].measure():
                read(keys=keys[: len(keys) // 4], select_fields=UPDATE)
            stored[side] = _stored_bytes(keys)
            tq.kv_clear(keys=keys, partition_id="train")
    shapes = np.concatenate([_shapes([row["input_ids"] for row in group]) for group in groups])
    num_flat = int(shapes["num_tokens"].sum())
    num_tree = num_flat - int(shapes["num_shared"].sum())
    record = {"rows": sum(map(len, groups)), "flat / tree tokens": round(num_flat / num_tree, 2)}
    record |= {f"{side}, bytes a tree token": round(stored[side] / num_tree, 1) for side in SIDES}
    for name in times["flat"]:
        flat_s, tree_s = (float(np.median(times[side][name].wall_s)) for side in SIDES)
        record |= {f"{name}, flat ms": round(1e3 * flat_s, 1), f"{name}, trees / flat": round(tree_s / flat_s, 2)}
    return record


SIDES = ("flat", "trees")


def _put(groups: list[list[dict[str, Any]]], side: str) -> list[str]:
    """Write rows as their agent loop worker does, a session at a time; return their keys."""
    keys = []
    for number, group in enumerate(groups):
        prompt = PromptColumns()
        for session, rows in enumerate(np.array_split(np.arange(len(group)), NUM_SESSIONS)):
            own = [f"{number}_{session}_{row}" for row in rows]
            around: AbstractContextManager[None] = writing(prompt) if side == "trees" else nullcontext()
            with around:
                fields: TensorDict = list_of_dict_to_tensordict([group[row] for row in rows])
                tq.kv_batch_put(keys=own, partition_id="train", fields=fields, tags=[{}] * len(own))
            keys += own
    return keys


def _stored_bytes(keys: list[str]) -> int:
    """Return the bytes of the rows' values, as the storage units have them."""
    client = tq.get_client()
    meta = client.kv_retrieve_meta(keys=keys, partition_id="train")
    manager = client.storage_manager
    assert isinstance(manager, TreeStorageManager)
    values = client._run_coroutine(manager.stored(meta.global_indexes, meta.field_names))
    return sum(map(value_bytes, values.values()))


if __name__ == "__main__":
    main()
