"""Relayed trees in a pipeline: an update in sections, beside one unlimited pack and beside verl's engine.

    PYTHONPATH=.venv/megatron torchrun --nproc-per-node 2 benchmarks/pipeline.py --out pipeline.json

Two ranks of this machine's CPU are the stages of a Qwen3 in float32, each with one thread. A pack that is alone is on
one stage at a time; the sections of a tree, four times as many as stages, fill all. verl's own engine computes the same
rows. The paths take turns. A stage is idle while its process uses no processor time.

Memory is the peak that an update allocates on a stage, of which `bound_bytes` is what it should be at most: the peak of
a pack as large as a section for each of those that are on the way there at once, and the store.
"""

import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", "VERL_PLATFORM": "cpu"}

import torch
import torch.distributed as dist
from harness import environment, interleave, keep_freed_memory, markdown_table, new_parser, write_json
from por_models import small_qwen3
from por_rows import SHAPES, shape_rows
from torch import Tensor

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform and the engines)
from verl_tree.functional.memory import peak_bytes
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

NUM_STAGES = 2
NUM_SECTIONS = 4 * NUM_STAGES
VOCAB_SIZE = 512
UNLIMITED = 2**20
LOSS_TERMS = 2**14
"""Few enough that scores of rows are no part of the peak that is compared."""

Row = dict[str, Tensor]


def main() -> None:
    """Measure each tree on all paths; rank 0 writes the record and prints the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=[name for name in SHAPES if name != "chain"])
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as mine:
        folder = _of_first_rank(mine)
        if dist.get_rank() == 0:
            model = small_qwen3(256, layers=8, vocab_size=VOCAB_SIZE, tie_word_embeddings=False)
            model.save_pretrained(Path(folder))
        dist.barrier()
        workers = [_worker(folder, strategy=strategy) for strategy in ("megatron_tree", "megatron")]
        trees = {name: _measure(name, *workers, options.repetitions) for name in options.shapes}
    if dist.get_rank() == 0:
        write_json({"environment": environment(options), "trees": trees}, options.out)
        print(markdown_table([_line(name, record) for name, record in trees.items()]))
    dist.destroy_process_group()


def _of_first_rank(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _worker(folder: str, *, strategy: str) -> TreeTrainingWorker:
    """Make a worker that relays every tree that its capacity does not hold."""
    return local_worker(
        folder,
        strategy=strategy,
        max_token_len=UNLIMITED,
        engine_options={"pipeline_model_parallel_size": NUM_STAGES, "sequence_parallel": False},
        tree_options={"relay": "always", "max_loss_terms": LOSS_TERMS},
    )


def _measure(name: str, tree: TreeTrainingWorker, flat: TreeTrainingWorker, repetitions: int) -> dict[str, Any]:
    """Return seconds by the clock and by the processor, and bytes, of every path on every stage."""
    drawn = shape_rows(name, vocab_size=VOCAB_SIZE)
    sequences = [torch.from_numpy(each).long() for each in drawn.sequences]
    forest = drawn.forest()
    section = -(-forest.num_tokens // NUM_SECTIONS)
    rows = [_row(each) for each in sequences]
    paths = {
        "one pack": partial(_update, tree, rows, capacity=UNLIMITED),
        "sections": partial(_update, tree, rows, capacity=section),
        "flat": partial(_update, flat, rows, capacity=max(section, *map(len, sequences))),
    }
    times = interleave(paths, repetitions=repetitions, num_warmups=1, title=f"{name}: ")
    peaks = {path: peak_bytes(update, device=torch.device("cpu")) for path, update in paths.items()}
    counts = tree.engine.tree_counts  # of the sections, its last update
    pack = [_row(torch.randint(VOCAB_SIZE, (section,)))]
    pack_bytes = peak_bytes(partial(_update, tree, pack, capacity=section), device=torch.device("cpu"))
    mine = {
        "wall_s": {path: each.wall_s for path, each in times.items()},
        "cpu_s": {path: each.cpu_s for path, each in times.items()},
        "peak_bytes": peaks,
        "bound_bytes": (NUM_STAGES - dist.get_rank()) * pack_bytes + counts.max_store_bytes,
    }
    stages: list[Any] = [None] * NUM_STAGES
    dist.all_gather_object(stages, mine)
    return {
        "tree_tokens": forest.num_tokens,
        "flat_tokens": sum(map(len, sequences)),
        "sections": counts.metrics()["tree/sections"],
        "stages": stages,
    }


def _row(token_ids: Tensor) -> Row:
    """Return a row of which all tokens but the first are trained."""
    response = token_ids[1:]
    mask = torch.ones(len(response), dtype=torch.int64)
    return {"prompts": token_ids[:1], "responses": response, "response_mask": mask}


def _update(worker: TreeTrainingWorker, rows: list[Row], *, capacity: int) -> None:
    """Compute the gradients of an update."""
    batch = batch_of_rows(rows, max_token_len=capacity, global_batch_size=len(rows), use_remove_padding=True)
    with worker.engine.train_mode():
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(batch, _sum_of_log_probs, forward_only=False)
    dist.barrier()


def _sum_of_log_probs(*, model_output: dict[str, Tensor], data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
    """Sum the log-probs of responses."""
    del data, dp_group
    return sum((scores[:-1].sum() for scores in model_output["log_probs"].unbind()), torch.zeros(())), {}


def _line(name: str, record: dict[str, Any]) -> dict[str, str]:
    stages = record["stages"]
    seconds = {path: statistics.median(each) for path, each in stages[0]["wall_s"].items()}
    idle = {
        path: 1 - statistics.mean(statistics.median(each["cpu_s"][path]) for each in stages) / wall_s
        for path, wall_s in seconds.items()
    }
    return {
        "tree": name,
        "tree, flat tokens": f"{record['tree_tokens']:,}, {record['flat_tokens']:,}",
        "sections": f"{record['sections']:.0f}",
        "one pack, s": f"{seconds['one pack']:.2f}",
        "sections, s": f"{seconds['sections']:.2f}",
        "ratio": f"{seconds['sections'] / seconds['one pack']:.2f}",
        "flat / sections": f"{seconds['flat'] / seconds['sections']:.1f}",
        "idle: one pack, sections": f"{idle['one pack']:.2f}, {idle['sections']:.2f}",
        "peak, MB: one pack; sections of bound": "; ".join(
            f"{each['peak_bytes']['one pack'] / 1e6:.0f}; {each['peak_bytes']['sections'] / 1e6:.0f} of "
            f"{each['bound_bytes'] / 1e6:.0f}"
            for each in stages
        ),
    }


if __name__ == "__main__":
    main()
