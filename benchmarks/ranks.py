"""How evenly two ranks work on unbalanced groups: our assignment beside verl's balancing of rows, one run.

Groups are trees of very different sizes (`synthetic.unbalanced` and one large star). Three assignments of the same rows
are trained for some updates each, interleaved, by real `TrainingWorker`s on two ranks of one thread:

- `tree`: whole groups by predicted cost, cut where that evens the ranks out (`assign_rows`), with
  the cost model that the workers have fitted so far, as the trainer does;
- `tree, verl's rows`: the tree engine on rows dealt by verl's `get_seqlen_balanced_partitions` (equal row counts, equal
  flat tokens): what happens to a tree when rows are balanced as if they were flat;
- `flat, verl's rows`: verl's own engine on those rows.

The imbalance is the processor time of the busiest rank over the mean of the ranks, summed over the updates. Waiting in
collectives costs no processor time, so it is the work that is compared.

    torchrun --nproc-per-node=2 benchmarks/ranks.py [--out cpu_ranks.json] [--updates 6]
"""

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import environment, new_parser, write_json
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.packing.counts import RankTimes
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.testing.synthetic import star, unbalanced
from verl_tree.trainer.rows.batching import assign_rows
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree import TokenForest

VOCABULARY = 4096
CAPACITY = 4096


def main() -> None:
    """Run the three assignments and write the JSON on rank 0."""
    options = _parse_options()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = _groups(options.seed)
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if dist.get_rank() == 0:
        _save_model(folder)
    dist.barrier()
    paths = {"tree": "fsdp_tree", "tree, verl's rows": "fsdp_tree", "flat, verl's rows": "fsdp2"}
    workers = {path: _worker(folder, strategy=strategy) for path, strategy in paths.items()}
    updates: dict[str, list[dict[str, Any]]] = {path: [] for path in paths}
    model = CostModel.prior()
    for number in range(options.updates + 1):
        for path, worker in workers.items():
            shares, predicted = _assign(path, groups, model=model)
            record = _update(worker, groups, shares=shares)
            if predicted is not None:
                record["predicted"] = predicted
            if paths[path] == "fsdp_tree":
                record["packed_tokens"] = worker.engine.tree_counts.num_packed_tokens
            else:
                record["packed_tokens"] = sum(len(row) for leaves in groups for row in leaves)
            if number:  # the first update warms up and is not counted
                updates[path].append(record)
            if path == "tree" and workers[path].engine.cost_metrics:
                model = CostModel.from_metrics(workers[path].engine.cost_metrics, prefix="tree/cost_model")
    results = {path: _summary(records) for path, records in updates.items()}
    if dist.get_rank() == 0:
        _report(options, groups, results=results, updates=updates)
    dist.destroy_process_group()


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _groups(seed: int) -> list[list[np.ndarray]]:
    """Five groups: an unbalanced agent tree that is more than half of all, stars of 2 to 8 samples, a single row."""
    large = star(num_branches=24, prompt_len=512, branch_len=(64, 768), vocab_size=VOCABULARY, seed=seed)
    small = [
        star(num_branches=num, prompt_len=length, branch_len=(32, 256), vocab_size=VOCABULARY, seed=seed + num)
        for num, length in ((2, 96), (4, 256), (8, 128), (1, 400))
    ]
    deep = unbalanced(24, prompt_len=128, turn_len=32, leaf_len=64, max_len=512, vocab_size=VOCABULARY, seed=seed)
    return [large, *small, [row[:CAPACITY] for row in deep]]


def _assign(
    path: str, groups: list[list[np.ndarray]], *, model: CostModel
) -> tuple[list[list[tuple[int, int]]], float | None]:
    """Per rank its (group, leaf) rows, and the predicted imbalance where there is one."""
    rows = [(group, leaf) for group, leaves in enumerate(groups) for leaf in range(len(leaves))]
    num_ranks = dist.get_world_size()
    if path != "tree":
        lens = [len(groups[group][leaf]) for group, leaf in rows]
        # verl pads the rows to a multiple of the ranks first; partitions of equal size need it.
        lens += [2] * (-len(lens) % num_ranks)
        parts = get_seqlen_balanced_partitions(lens, k_partitions=num_ranks, equal_size=True)
        return [[rows[index] for index in part if index < len(rows)] for part in parts], None
    numbers = {row: number for number, row in enumerate(rows)}
    assignment = assign_rows(
        [[numbers[group, leaf] for leaf in range(len(leaves))] for group, leaves in enumerate(groups)],
        profiles=[WorkProfile.from_forest(TokenForest.from_sequences(leaves)) for leaves in groups],
        model=model,
        num_ranks=num_ranks,
        groups_per_mini_batch=len(groups),
    )
    size = len(assignment.row_order) // num_ranks
    shares = [assignment.row_order[rank * size : (rank + 1) * size] for rank in range(num_ranks)]
    return [[rows[number] for number in share if number < len(rows)] for share in shares], assignment.imbalance


def _update(
    worker: TreeTrainingWorker, groups: list[list[np.ndarray]], *, shares: list[list[tuple[int, int]]]
) -> dict[str, Any]:
    """One optimiser step; seconds of the update and processor seconds of every rank."""
    batch = batch_of_rows(
        [_row(groups[group][leaf], seed=1000 * group + leaf) for group, leaf in shares[dist.get_rank()]],
        max_token_len=CAPACITY,
        global_batch_size=sum(map(len, shares)),
    )
    dist.barrier()
    started, busy = time.perf_counter(), time.process_time()
    worker.train_batch(batch)
    mine = (time.process_time() - busy, time.perf_counter() - started)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {"busy_s": [cpu for cpu, _ in gathered], "wall_s": max(wall for _, wall in gathered)}


def _row(tokens: np.ndarray, *, seed: int) -> dict[str, torch.Tensor]:
    """All tokens but the first are trained."""
    response = torch.from_numpy(tokens[1:].astype(np.int64))
    generator = torch.Generator().manual_seed(seed)
    return {
        "prompts": torch.from_numpy(tokens[:1].astype(np.int64)),
        "responses": response,
        "response_mask": torch.ones(len(response), dtype=torch.int64),
        "old_log_probs": torch.full((len(response),), -float(np.log(VOCABULARY))),
        "advantages": torch.randn(len(response), generator=generator),
    }


def _save_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2 * CAPACITY,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def _worker(folder: Path, *, strategy: str) -> TreeTrainingWorker:
    worker = local_worker(str(folder), strategy=strategy, max_token_len=CAPACITY)
    actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def _summary(records: list[dict[str, Any]]) -> dict[str, float]:
    times = sum(
        (RankTimes.of_ranks(predicted_s=[0.0], measured_s=record["busy_s"], packing_s=[0.0]) for record in records),
        RankTimes(),
    )
    summary = {
        "measured_imbalance": times.metrics()["tree/rank_imbalance/measured"],
        "median_wall_s": float(np.median([record["wall_s"] for record in records])),
        "packed_tokens": records[-1]["packed_tokens"],
    }
    if "predicted" in records[-1]:
        summary["predicted_imbalance"] = records[-1]["predicted"]
    return summary


def _report(
    options: argparse.Namespace,
    groups: list[list[np.ndarray]],
    *,
    results: dict[str, dict[str, float]],
    updates: dict[str, list[dict[str, Any]]],
) -> None:
    forests = [TokenForest.from_sequences(leaves) for leaves in groups]
    print(f"tree tokens of the groups: {[forest.num_tokens for forest in forests]}")
    for path, result in results.items():
        predicted = f", predicted {result['predicted_imbalance']:.3f}" if "predicted_imbalance" in result else ""
        print(
            f"{path:>18}: imbalance (max / mean) {result['measured_imbalance']:.3f}{predicted}; "
            f"{result['packed_tokens']:,} tokens computed, update {result['median_wall_s']:.2f} s"
        )
    record = {
        "environment": environment(options),
        "groups": [
            {"leaves": forest.num_leaves, "flat_tokens": forest.num_flat_tokens, "tree_tokens": forest.num_tokens}
            for forest in forests
        ],
        "results": results,
        "updates": updates,
    }
    write_json(record, options.out)


if __name__ == "__main__":
    main()
