"""Times one update of the same rows through verl's own FSDP2 engine and through the tree engine (`--engines`).

Both are real `TrainingWorker`s with verl's PPO loss, AdamW and FSDP2, in one process, interleaved; a row is a prompt
and one branch. verl's engine gets the micro-batch size that suits it best among those tried. What differs from
`bench_update.py`'s plain paths is what verl adds to both sides: jagged batches, padded losses, sharding hooks.
Started by `bench_update.py --engines`.
"""

import os
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.plugin  # noqa: F401  (the CPU platform)
from verl_tree.local_worker import batch_of_rows, local_worker
from verl_tree.worker import TreeTrainingWorker

MICRO_BATCH_ROWS = (1, 4)
"""Rows in the micro-batches that verl's engine is tried with."""


def time_engines(
    model: PreTrainedModel, *, prompt_lens: dict[str, int], branches: int, branch_len: int, repetitions: int
) -> list[dict[str, Any]]:
    """Times the updates.

    Args:
        model: a small causal LM; both engines load a copy.
        prompt_lens: per case the tokens of the shared prompt; 0 gives unrelated rows.
        branches: rows.
        branch_len: tokens of each response.
        repetitions: updates per engine, after one to warm up.

    Returns:
        Per case the median seconds of each engine, the ratio, the compression and all times; `flat_rows` is the number
        of rows in the micro-batch that suited verl's engine best.
    """
    # As torchrun would set them; verl's workers read them.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        cases = [
            _time_case(
                folder,
                name,
                rows=_rows(model.config.vocab_size, prompt_len=prompt_len, branches=branches, branch_len=branch_len),
                repetitions=repetitions,
            )
            for name, prompt_len in prompt_lens.items()
        ]
    dist.destroy_process_group()
    return cases


def _time_case(folder: str, name: str, *, rows: list[dict[str, torch.Tensor]], repetitions: int) -> dict[str, Any]:
    row_len = max(len(row["prompts"]) + len(row["responses"]) for row in rows)
    capacities = {f"flat_{num}": num * row_len for num in MICRO_BATCH_ROWS if num <= len(rows)}
    capacities["tree"] = len(rows) * row_len
    workers = {
        path: _worker(folder, strategy="fsdp_tree" if path == "tree" else "fsdp2", max_token_len=capacity)
        for path, capacity in capacities.items()
    }
    times: dict[str, list[float]] = {path: [] for path in workers}
    for _ in range(repetitions + 1):
        for path, worker in workers.items():
            batch = batch_of_rows(rows, max_token_len=capacities[path], global_batch_size=len(rows))
            started = time.perf_counter()
            worker.train_batch(batch)
            times[path].append(time.perf_counter() - started)
    medians = {path: statistics.median(values[1:]) for path, values in times.items()}
    best = min((path for path in medians if path != "tree"), key=medians.__getitem__)
    counts = workers["tree"].engine.tree_counts
    return {
        "case": name,
        "flat_s": medians[best],
        "tree_s": medians["tree"],
        "ratio": medians[best] / medians["tree"],
        "compression": counts.num_flat_tokens / counts.num_packed_tokens,
        "flat_rows": int(best.removeprefix("flat_")),
        "times_s": times,
    }


def _worker(folder: str, *, strategy: str, max_token_len: int) -> TreeTrainingWorker:
    worker = local_worker(folder, strategy=strategy, max_token_len=max_token_len)
    actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def _rows(vocab_size: int, *, prompt_len: int, branches: int, branch_len: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, vocab_size, (length,), generator=generator)

    prompt = tokens(prompt_len)
    return [
        {
            "prompts": prompt if prompt_len else tokens(1),
            "responses": tokens(branch_len),
            "response_mask": torch.ones(branch_len, dtype=torch.int64),
            "old_log_probs": torch.full((branch_len,), -float(torch.tensor(float(vocab_size)).log())),
            "advantages": torch.randn(branch_len, generator=generator),
        }
        for _ in range(branches)
    ]
