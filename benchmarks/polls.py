"""What a look for ended prompts takes while a step's rows gather in TransferQueue: seconds. JSON.

A real controller holds rows with the tags that verl's and our agent loop workers write. verl's replay buffer lists all
of them at every look; ours asks for the counts of the workers, and lists the rows when enough prompts have ended.

    PYTHONPATH=. python benchmarks/polls.py --out docs/benchmarks/data/polls.json
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import transfer_queue as tq
from harness import environment, new_parser, print_table, write_json
from scale import TAGS

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG, WrittenRow, leaf_shapes
from rollout_hooks.capture.report import ENDED
from verl_tree.trainer.rows.replay_buffer import num_ended

SIZES = (1_000, 100_000, 1_000_000)
ROWS_OF_A_PROMPT, NUM_WORKERS, CHUNK = 16, 512, 10_000


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    shape = leaf_shapes([WrittenRow.of([0] * 2000, response_mask=[1] * 1000, reward=0.0)])[0].tobytes()
    tag = {**TAGS, "prompt_len": 1000, "response_len": 1000, "seq_len": 2000, LEAF_SHAPE_TAG: shape}
    workers = [f"worker {number}" for number in range(NUM_WORKERS)]
    tq.kv_batch_put(keys=workers, partition_id=ENDED, tags=[{"num": 1}] * NUM_WORKERS)
    rows, num_put = [], 0
    for size in SIZES:
        for first in range(num_put, size, CHUNK):
            numbers = range(first, min(first + CHUNK, size))
            keys = [f"{each // ROWS_OF_A_PROMPT:09d}-00000000-0000-0000-0000-000000000000_0_{each}" for each in numbers]
            tq.kv_batch_put(keys=keys, partition_id="train", tags=[tag] * len(keys))
        num_put = size
        listed_s, asked_s = (median_s(call, options.repetitions) for call in (tq.kv_list, num_ended))
        rows.append({"rows": size, "workers": NUM_WORKERS, "list_s": listed_s, "look_s": asked_s})
    print_table(rows)
    write_json({"environment": environment(options), "rows": rows}, options.out)


def median_s(call: Callable[[], Any], repetitions: int) -> float:
    """Return the median of the seconds that a call takes."""
    seconds = []
    for _ in range(repetitions):
        started_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_s)
    return round(statistics.median(seconds), 4)


if __name__ == "__main__":
    main()
