"""Times one update of the same rows through verl's own FSDP2 engine and through the tree engine (`--engines`).

Both are real `TrainingWorker`s with verl's PPO loss, AdamW and FSDP2, in one process, interleaved; a row is a prompt
and one branch, or a leaf of a tree of given overlap (`--overlap`), where the tree engine also runs with its gate shut
(`tree.gate=never`). verl's engine gets the micro-batch size that suits it best among those tried. What differs from
`update.py`'s plain paths is what verl adds to both sides: jagged batches, padded losses, sharding hooks.
Started by `update.py --engines`.
"""

import os
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import interleave
from por_models import Counts, model_flops
from por_rows import Rows
from transformers import PreTrainedModel
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.testing.synthetic import overlap
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree.layout import TreeLayout

Row = dict[str, torch.Tensor]

MICRO_BATCH_ROWS = (1, 4, 16)
"""Rows in the micro-batches that verl's engine is tried with."""

MAX_MICRO_BATCH_TOKENS = 16_384


def time_engines(
    model: PreTrainedModel, cases: dict[str, list[Row]], *, repetitions: int, gates: tuple[str, ...] = ("auto",)
) -> list[dict[str, Any]]:
    """Time the updates.

    Args:
        model: a small causal LM; all engines load a copy.
        cases: rows by name, see `branches` and `overlapping`.
        repetitions: updates per engine, after one to warm up.
        gates: values of `tree.gate` to run the tree engine with, the first one is compared.

    Returns:
        Per case the median seconds of each engine, the ratio, the compression, the ratio by FLOPs and all times;
        `flat_rows` is the number of rows in the micro-batch that suited verl's engine best.
    """
    # As torchrun would set them; verl's workers read them.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        records = [
            _time_case(folder, name, rows=rows, repetitions=repetitions, gates=gates)
            | {"flop_ratio": _flop_ratio(model, rows)}
            for name, rows in cases.items()
        ]
    dist.destroy_process_group()
    return records


def _time_case(folder: str, name: str, *, rows: list[Row], repetitions: int, gates: tuple[str, ...]) -> dict[str, Any]:
    row_len = max(len(row["prompts"]) + len(row["responses"]) for row in rows)
    sizes = [num for num in MICRO_BATCH_ROWS if num <= len(rows) and num * row_len <= MAX_MICRO_BATCH_TOKENS]
    capacities = {f"flat_{num}": num * row_len for num in sizes}
    capacities |= {f"tree_{gate}": len(rows) * row_len for gate in gates}
    workers = {path: _worker(folder, path=path, max_token_len=capacity) for path, capacity in capacities.items()}
    num_flat_packs = []

    def update(path: str) -> None:
        batch = batch_of_rows(rows, max_token_len=capacities[path], global_batch_size=len(rows))
        workers[path].train_batch(batch)
        if path == compared:
            num_flat_packs.append(workers[path].engine.tree_counts.num_flat_packs)

    compared = f"tree_{gates[0]}"
    updates = {path: partial(update, path) for path in workers}
    times = interleave(updates, repetitions=repetitions, num_warmups=1, title=f"{name}, ")
    best = min((path for path in times if path.startswith("flat")), key=lambda path: times[path].median_s)
    counts = workers[compared].engine.tree_counts
    return {
        "case": name,
        "flat_s": times[best].median_s,
        "tree_s": times[compared].median_s,
        "ratio": times[best].median_s / times[compared].median_s,
        "ratio_of_gates": {gate: times[best].median_s / times[f"tree_{gate}"].median_s for gate in gates},
        "cpu_ratio_of_gates": {gate: times[best].median_cpu_s / times[f"tree_{gate}"].median_cpu_s for gate in gates},
        "potential_overlap_ratio": 1 - counts.num_tree_tokens / counts.num_flat_tokens,
        "compression": counts.num_flat_tokens / counts.num_tree_tokens,
        "flat_rows": int(best.removeprefix("flat_")),
        "packs_run_flat": sum(num_flat_packs),
        "times_s": {path: each.wall_s for path, each in times.items()},
        "cpu_times_s": {path: each.cpu_s for path, each in times.items()},
    }


def _flop_ratio(model: PreTrainedModel, rows: list[Row]) -> float:
    """Return the FLOPs of flat rows over those of their tree; both project every position."""
    sequences = [torch.cat((row["prompts"], row["responses"])).numpy() for row in rows]
    both = Rows(sequences, groups=[0] * len(sequences))
    flat, tree = (
        model_flops(model, Counts.of_layout(TreeLayout.from_forest(forest)))
        for forest in (both.unshared(), both.forest())
    )
    return flat / tree


def _worker(folder: str, *, path: str, max_token_len: int) -> TreeTrainingWorker:
    kind, option = path.split("_")
    worker = local_worker(
        folder,
        strategy="fsdp_tree" if kind == "tree" else "fsdp2",
        max_token_len=max_token_len,
        tree_options={"gate": option} if kind == "tree" else None,
    )
    actor = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def branches(*, vocab_size: int, prompt_len: int, num_branches: int, branch_len: int) -> list[Row]:
    """Draw responses to one prompt; unrelated rows where it has no tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, vocab_size, (length,), generator=generator)

    prompt = tokens(prompt_len)
    return [
        _row(prompt if prompt_len else tokens(1), tokens(branch_len), vocab_size=vocab_size, generator=generator)
        for _ in range(num_branches)
    ]


def overlapping(potential_overlap_ratio: float, *, vocab_size: int, num_leaves: int, num_flat_tokens: int) -> list[Row]:
    """Return the leaves of one tree of the given overlap; every token but a row's first is trained."""
    generator = torch.Generator().manual_seed(0)
    sequences = overlap(
        potential_overlap_ratio, num_leaves=num_leaves, num_flat_tokens=num_flat_tokens, vocab_size=vocab_size
    )
    leaves = [torch.from_numpy(sequence).long() for sequence in sequences]
    return [_row(leaf[:1], leaf[1:], vocab_size=vocab_size, generator=generator) for leaf in leaves]


def _row(prompt: torch.Tensor, response: torch.Tensor, *, vocab_size: int, generator: torch.Generator) -> Row:
    return {
        "prompts": prompt,
        "responses": response,
        "response_mask": torch.ones(len(response), dtype=torch.int64),
        "old_log_probs": torch.full((len(response),), -float(torch.tensor(float(vocab_size)).log())),
        "advantages": torch.randn(len(response), generator=generator),
    }
