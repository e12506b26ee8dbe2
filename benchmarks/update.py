"""Times one update of the same rows through verl's own FSDP2 engine and through the tree engine.

Both are real `TrainingWorker`s with verl's PPO loss, AdamW and FSDP2, in one process, interleaved, repetition by
repetition. A row is a prompt and one branch (`shared`), a branch alone (`unrelated`: nothing is shared, and the tree
must not lose), or a leaf of a tree of given overlap (`--overlap`), where the tree engine also runs with its gate shut
(`tree.gate=never`). verl's engine gets the micro-batch size that suits it best among those tried.

    python benchmarks/update.py [--out update.json] [--repetitions 5] [--branches 16] [--overlap 0.2 0.8] ...

The compression (flat / tree tokens) bounds the speed-up of everything that is linear in tokens. Attention shares less:
branches still read the whole prompt. `flop_ratio` is the bound with attention and projection counted; it rises towards
the compression with the width of the model. `por.py` compares gradients alone, without verl.

Freed memory is kept by the process instead of being returned to the system (`mallopt`, all paths alike): on a CPU every
large buffer would else be faulted in anew page by page, which costs up to half the speed of a matrix product and hits
larger buffers harder. A training run on a CPU wants the same: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592.
"""

import argparse
import os
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import environment, interleave, keep_freed_memory, new_parser, print_table, write_json
from por_models import Counts, model_flops, small_qwen3
from por_rows import Rows
from transformers import PreTrainedModel
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.main_sft import ONE_RANK
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.testing.synthetic import overlap
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree.layout import TreeLayout

Row = dict[str, torch.Tensor]

MICRO_BATCH_ROWS = (1, 4, 16)
"""Rows in the micro-batches that verl's engine is tried with."""

MAX_MICRO_BATCH_TOKENS = 16_384


def main() -> None:
    """Run the cases, print a table and write the JSON."""
    options = _parse_options()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    os.environ.update(ONE_RANK)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = small_qwen3(options.hidden_size, layers=options.layers, vocab_size=options.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        cases = [
            _time_case(folder, name, rows=rows, options=options) | {"flop_ratio": _flop_ratio(model, rows)}
            for name, rows in _cases(options).items()
        ]
    dist.destroy_process_group()
    print_table([{key: _short(value) for key, value in case.items() if "times" not in key} for case in cases])
    write_json({"environment": environment(options), "cases": cases}, options.out)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5, help="updates per engine, after one to warm up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt-len", type=int, default=2048)
    parser.add_argument("--branches", type=int, default=16)
    parser.add_argument("--branch-len", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--cases", nargs="+", choices=["shared", "unrelated"], default=["shared", "unrelated"])
    parser.add_argument("--overlap", type=float, nargs="+", metavar="POR", help="trees of these overlap ratios instead")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> dict[str, list[Row]]:
    if options.overlap:
        return {f"POR {ratio:g}": _overlapping(ratio, options) for ratio in options.overlap}
    return {name: _branches(options.prompt_len if name == "shared" else 0, options) for name in options.cases}


def _branches(prompt_len: int, options: argparse.Namespace) -> list[Row]:
    """Draw responses to one prompt; unrelated rows where it has no tokens."""
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(0, options.vocab_size, (length,), generator=generator)

    prompt = tokens(prompt_len)
    return [
        _row(prompt if prompt_len else tokens(1), tokens(options.branch_len), options=options, generator=generator)
        for _ in range(options.branches)
    ]


def _overlapping(potential_overlap_ratio: float, options: argparse.Namespace) -> list[Row]:
    """Return the leaves of one tree of the given overlap; every token but a row's first is trained."""
    generator = torch.Generator().manual_seed(0)
    sequences = overlap(
        potential_overlap_ratio,
        num_leaves=options.branches,
        num_flat_tokens=options.branches * options.branch_len,
        vocab_size=options.vocab_size,
    )
    leaves = [torch.from_numpy(sequence).long() for sequence in sequences]
    return [_row(leaf[:1], leaf[1:], options=options, generator=generator) for leaf in leaves]


def _row(
    prompt: torch.Tensor, response: torch.Tensor, *, options: argparse.Namespace, generator: torch.Generator
) -> Row:
    return {
        "prompts": prompt,
        "responses": response,
        "response_mask": torch.ones(len(response), dtype=torch.int64),
        "old_log_probs": torch.full((len(response),), -float(torch.tensor(float(options.vocab_size)).log())),
        "advantages": torch.randn(len(response), generator=generator),
    }


def _time_case(folder: str, name: str, *, rows: list[Row], options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds and ratios of a case; `flat_rows` are those of the micro-batch that suited verl's engine best."""
    gates = ("auto", "never") if options.overlap else ("auto",)
    row_len = max(len(row["prompts"]) + len(row["responses"]) for row in rows)
    sizes = [num for num in MICRO_BATCH_ROWS if num <= len(rows) and num * row_len <= MAX_MICRO_BATCH_TOKENS]
    capacities = {f"flat_{num}": num * row_len for num in sizes}
    capacities |= {f"tree_{gate}": len(rows) * row_len for gate in gates}
    workers = {path: _worker(folder, path=path, max_token_len=capacity) for path, capacity in capacities.items()}
    num_flat_packs = []

    def update(path: str) -> None:
        batch = batch_of_rows(rows, max_token_len=capacities[path], global_batch_size=len(rows))
        workers[path].train_batch(batch)
        if path == "tree_auto":
            num_flat_packs.append(workers[path].engine.tree_counts.num_flat_packs)

    updates = {path: partial(update, path) for path in workers}
    times = interleave(updates, repetitions=options.repetitions, num_warmups=1, title=f"{name}, ")
    best = min((path for path in times if path.startswith("flat")), key=lambda path: times[path].median_s)
    counts = workers["tree_auto"].engine.tree_counts
    return {
        "case": name,
        "flat_s": times[best].median_s,
        "tree_s": times["tree_auto"].median_s,
        "ratio": times[best].median_s / times["tree_auto"].median_s,
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


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
