"""Relayed trees in a pipeline: an update in sections beside one unlimited pack, and beside verl's engine.

    PYTHONPATH=.venv/megatron torchrun --nproc-per-node 2 benchmarks/pipeline.py --out pipeline.json

Two ranks of this machine's CPU are two stages of a Qwen3 in float32. A pack that is alone is on one stage at a time.
The sections of a tree, four times as many as stages, fill both. verl's own engine computes the same rows. The paths
take turns. The table is that of docs/engines.md.
"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", "VERL_PLATFORM": "cpu"}

import numpy as np
import torch
import torch.distributed as dist
from harness import environment, interleave, markdown_table, new_parser, write_json
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform and the engines)
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
STAGES, SECTIONS, REPETITIONS = 2, 8, 5
UNLIMITED = 2**20

TREES: dict[str, tuple[int, ...]] = {
    "one path": (1,),
    "star, 16 leaves": (16,),
    "2 x 2 x 2 x 2": (2, 2, 2, 2),
    "4 turns of 4": (4, 1, 4, 1),
    "deep, 2 leaves a turn": (2, 1, 1, 2, 1, 1, 2, 1),
}
"""How many children each node of a level has; all nodes are as long, so that a tree has about `NUM_TOKENS` tokens."""
NUM_TOKENS = 1024


def rows_of(shape: tuple[int, ...], rng: np.random.Generator) -> list[dict[str, Tensor]]:
    """Draw the rows of a tree: each leaf with its path, of which all but the root's node is trained."""
    widths = np.cumprod([1, *shape])
    length = max(1, NUM_TOKENS // int(widths.sum()))

    def paths(level: int, prefix: list[int]) -> Iterator[list[int]]:
        path = prefix + rng.integers(1, MODEL["vocab_size"], size=length).tolist()
        if level == len(shape):
            yield path
            return
        for _ in range(shape[level]):
            yield from paths(level + 1, path)

    rows = []
    for path in paths(0, []):
        response = torch.tensor(path[length:])
        advantages = torch.from_numpy(rng.standard_normal(len(response))).float()
        mask = torch.ones(len(response), dtype=torch.int64)
        rows.append(
            {
                "prompts": torch.tensor(path[:length]),
                "responses": response,
                "response_mask": mask,
                "advantages": advantages,
            }
        )
    return rows


def weighted_log_probs(
    *, model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[Tensor, dict]:
    """Sum the log-probs of responses times their advantages."""
    del dp_group
    total = torch.zeros(())
    parts = (model_output["log_probs"].unbind(), data["responses"].unbind(), data["advantages"].unbind())
    for scores, response, advantages in zip(*parts, strict=True):
        total = total + (scores[len(scores) - len(response) - 1 : -1] * advantages).sum()
    return total, {}


def update(worker: TreeTrainingWorker, rows: list[dict[str, Tensor]], *, capacity: int) -> None:
    """Compute the gradients of an update."""
    batch = batch_of_rows(rows, max_token_len=capacity, global_batch_size=len(rows), use_remove_padding=True)
    with worker.engine.train_mode():
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(batch, weighted_log_probs, forward_only=False)
    dist.barrier()


def make_worker(folder: str, *, strategy: str) -> TreeTrainingWorker:
    """Make a worker of two stages, which relays every tree that its capacity does not hold."""
    options = {"pipeline_model_parallel_size": STAGES, "sequence_parallel": False}
    return local_worker(
        folder, strategy=strategy, max_token_len=UNLIMITED, engine_options=options, tree_options={"relay": "always"}
    )


def main() -> None:
    """Time each tree on all paths; rank 0 writes the record and prints the table."""
    options = new_parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    folder = [TemporaryDirectory().name if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", tie_word_embeddings=False, **MODEL))
        model.save_pretrained(Path(str(folder[0])))
    dist.barrier()
    tree = make_worker(str(folder[0]), strategy="megatron_tree")
    flat = make_worker(str(folder[0]), strategy="megatron")
    trees: dict[str, Any] = {}
    for name, shape in TREES.items():
        rows = rows_of(shape, np.random.default_rng(1))
        num_tokens = NUM_TOKENS // int(np.cumprod([1, *shape]).sum()) * int(np.cumprod([1, *shape]).sum())
        longest = max(len(row["prompts"]) + len(row["responses"]) for row in rows)
        paths = {
            "one pack": partial(update, tree, rows, capacity=UNLIMITED),
            "sections": partial(update, tree, rows, capacity=-(-num_tokens // SECTIONS)),
            "verl's rows": partial(update, flat, rows, capacity=max(longest, num_tokens // SECTIONS)),
        }
        times = interleave(paths, repetitions=REPETITIONS, num_warmups=1, title=f"{name}: ")
        counts = tree.engine.tree_counts.metrics()
        trees[name] = {path: each.wall_s for path, each in times.items()} | {
            "tree_tokens": num_tokens,
            "flat_tokens": sum(len(row["prompts"]) + len(row["responses"]) for row in rows),
            "sections": counts["tree/sections"],
        }
    if dist.get_rank() == 0:
        write_json({"environment": environment(options), "trees": trees}, options.out)
        print(markdown_table([_row(name, record) for name, record in trees.items()]))
    dist.destroy_process_group()


def _row(name: str, record: dict[str, Any]) -> dict[str, str]:
    pack, sections, flat = (float(np.median(record[path])) for path in ("one pack", "sections", "verl's rows"))
    return {
        "tree": name,
        "tokens": f"{record['tree_tokens']:,}",
        "flat": f"{record['flat_tokens']:,}",
        "sections": f"{record['sections']:.0f}",
        "one pack, s": f"{pack:.2f}",
        "sections, s": f"{sections:.2f}",
        "ratio": f"{sections / pack:.2f}",
        "verl's rows, s": f"{flat:.2f}",
    }


if __name__ == "__main__":
    main()
