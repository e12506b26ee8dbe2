"""What `verl_tree.check --plan` predicts beside what a CPU measures: seconds and bytes of updates of stored trees.

    python benchmarks/plan.py --out plan.json
    python benchmarks/plan.py --data plan.json --plot plan.png

A real worker with verl's PPO loss on FSDP2 computes updates of a small Qwen3 in bfloat16 with gradient checkpointing.
The cost model is fitted by the worker itself on two forests under four capacities. Then others run under four
capacities each, of which the plan knows the trees and the fit. Seconds are the least of the repetitions, bytes the peak
of one above what is there before. Neither has the optimiser's step in it. What FSDP2 gathers and exchanges whatever the
pass is the least peak of the fitted forests; no pass takes less.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import environment, keep_freed_memory, new_parser, print_table, write_json
from por_models import small_qwen3
from tensordict import TensorDict
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.attention import tree_attention
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.functional.memory import peak_bytes
from verl_tree.functional.model_size import ModelSize, Sharing
from verl_tree.functional.update_memory import Levers
from verl_tree.launch.run.layouts import COSTS
from verl_tree.launch.run.stored_work import Rows, micro_batches_of, passes_of, predicted_s, rank_bytes
from verl_tree.main_sft import ONE_RANK
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

TREES = Path("docs/benchmarks/data/trees")
FITTED = ("tree_search_reasoning", "long_documents")
"""Of short paths and of long ones: else tokens and pairs of tokens look alike."""
HELD_OUT = ("arithmetic_tools", "memory_qa", "multi_turn_thinking")
CPU = torch.device("cpu")
BF16 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "buffer_dtype": "bf16"}


def capacities(rows: Rows) -> list[int]:
    """Return a capacity at which all rows are one pack, and three that cut them, the least below the longest row."""
    whole = 1 << (rows.num_tree_tokens - 1).bit_length()
    return [rows.longest // 2, rows.longest + 7, whole // 4, whole]


def batch_of(rows: Rows, *, seed: int = 0) -> TensorDict:
    """Make verl's mini-batch of the rows, with drawn advantages."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for tokens, trained in zip(rows.tokens, rows.trained, strict=True):
        start = max(1, int(np.argmax(trained)))
        response = torch.from_numpy(tokens[start:])
        made.append(
            {
                "prompts": torch.from_numpy(tokens[:start]),
                "responses": response,
                "response_mask": torch.from_numpy(trained[start:]).long(),
                "old_log_probs": torch.full((len(response),), -9.0),
                "advantages": torch.randn(len(response), generator=generator),
            }
        )
    return batch_of_rows(made, max_token_len=1, global_batch_size=len(made))


def make_worker(folder: str, *, capacity: int) -> TreeTrainingWorker:
    """Make a worker on trees."""
    worker = local_worker(
        folder,
        strategy="fsdp_tree",
        max_token_len=capacity,
        model_options={"enable_gradient_checkpointing": True},
        tree_options={"capacity": capacity, "gate": "never"},
        engine_options={"mixed_precision": BF16, "model_dtype": "bf16"},
    )
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def kernel_bytes(micros: Sequence[TreeMicroBatch], size: ModelSize) -> int:
    """Measure the backward pass of the CPU's attention alone, per token, on the largest section."""
    section = max((each for micro in micros for each in micro.cut.sections), key=lambda each: each.num_tokens)
    num_keys = section.num_context + section.num_tokens
    sizes = ((section.num_tokens, size.num_heads), (num_keys, size.num_kv_heads), (num_keys, size.num_kv_heads))
    inputs = [torch.randn(*each, size.head_dim).bfloat16().requires_grad_() for each in sizes]
    out = tree_attention(*inputs, torch.from_numpy(section.subtree_end), num_context=section.num_context)
    gradient = torch.randn_like(out)
    return peak_bytes(lambda: torch.autograd.grad(out, inputs, gradient), device=CPU) // section.num_tokens


def update(worker: TreeTrainingWorker, batch: TensorDict) -> float:
    """Compute an update without its step, and return its seconds."""
    started_s = time.perf_counter()
    worker.engine.forward_backward_batch(batch.clone(), worker.loss_fn, forward_only=False)
    return time.perf_counter() - started_s


def fit(folder: str, *, repetitions: int) -> tuple[CostModel, int]:
    """Let workers fit the cost model; the last one has seen what all have measured. Return also the least peak."""
    before, peaks = None, []
    for name in FITTED:
        rows = Rows.of_file(TREES / f"{name}.parquet", leaves_out=True)
        batch = batch_of(rows)
        for capacity in capacities(rows):
            worker = make_worker(folder, capacity=capacity)
            if before is not None:
                worker.engine._costs = before  # a run has one engine, whose capacity stays
            with worker.engine.train_mode():
                for _ in range(1 + 2 * repetitions):
                    update(worker, batch)
                peaks.append(peak_bytes(lambda worker=worker, batch=batch: update(worker, batch), device=CPU))
            before = worker.engine._costs
    return CostModel.from_metrics(worker.engine.cost_metrics, prefix=COSTS), min(peaks)


def compare(
    folder: str, name: str, costs: CostModel, size: ModelSize, *, least_bytes: int, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Yield a line for each capacity of a forest."""
    rows = Rows.of_file(TREES / f"{name}.parquet", leaves_out=True)
    batch = batch_of(rows)
    for capacity in capacities(rows):
        tree = TreeConfig(capacity=capacity, gate="never")
        planned = micro_batches_of(rows, tree, costs=costs, num_ranks=1, groups_per_mini_batch=len(rows.groups))
        micros = planned[0][0]
        predicted = predicted_s([[[micro.work for micro in micros]]], costs)
        kernel = kernel_bytes(micros, size)
        num_bytes = max(
            least_bytes,
            rank_bytes(
                size, passes_of(micros), levers=Levers(), sharing=Sharing(), reduce_bytes=2, kernel_bytes=kernel
            ),
        )
        worker = make_worker(folder, capacity=capacity)
        with worker.engine.train_mode():
            update(worker, batch)
            seconds = min(update(worker, batch) for _ in range(repetitions))
            peak = peak_bytes(lambda worker=worker: update(worker, batch), device=CPU)
        yield {
            "forest": name,
            "capacity": capacity,
            "calls": sum(micro.work.num_packs for micro in micros),
            "predicted (s)": round(predicted, 4),
            "measured (s)": round(seconds, 4),
            "seconds": round(predicted / seconds, 3),
            "predicted (MB)": round(num_bytes / 1e6, 1),
            "measured (MB)": round(peak / 1e6, 1),
            "bytes": round(num_bytes / peak, 3),
        }


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what was predicted over what was measured, each axis with the range within which a prediction is right."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    ticks = ([0.3, 0.5, 1, 2, 5], [25, 30, 40, 50, 60, 70])
    for axis, unit, share, marks in zip(axes, ("s", "MB"), (0.15, 0.1), ticks, strict=True):
        for name in HELD_OUT:
            points = [line for line in lines if line["forest"] == name]
            axis.plot(
                [line[f"measured ({unit})"] for line in points],
                [line[f"predicted ({unit})"] for line in points],
                "o",
                label=name,
            )
        ends = np.array(
            [min(line[f"measured ({unit})"] for line in lines), max(line[f"measured ({unit})"] for line in lines)]
        )
        axis.plot(ends, ends, color="grey")
        axis.fill_between(ends, ends * (1 - share), ends * (1 + share), color="grey", alpha=0.2)
        axis.set(xscale="log", yscale="log")
        for each in (axis.xaxis, axis.yaxis):
            each.set_major_locator(FixedLocator(marks))
            each.set_minor_locator(NullLocator())
            each.set_major_formatter("{x:g}")
        axis.set(xlabel=f"measured ({unit})", ylabel=f"predicted ({unit})")
    axes[0].set_title("an update; grey: within 15 %")
    axes[1].set_title("its memory; grey: within 10 %")
    axes[0].legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Fit, compare and print."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--data", type=Path, help="what was measured before, to be drawn")
    parser.add_argument("--plot", type=Path, help="draw the predictions into this file")
    options = parser.parse_args()
    if options.data is not None:
        draw(json.loads(options.data.read_text())["lines"], options.plot)
        return
    keep_freed_memory()
    os.environ.update(ONE_RANK)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = small_qwen3(256, layers=4, vocab_size=8192)
    size = ModelSize.of_model(model.config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        costs, least = fit(folder, repetitions=options.repetitions)
        lines = [
            line
            for name in HELD_OUT
            for line in compare(folder, name, costs, size, least_bytes=least, repetitions=options.repetitions)
        ]
    dist.destroy_process_group()
    print_table(lines)
    off = [abs(line["seconds"] - 1) for line in lines]
    chosen = []
    for name in HELD_OUT:
        of_forest = [line for line in lines if line["forest"] == name]
        fastest = min(of_forest, key=lambda line: line["predicted (s)"])
        chosen.append(fastest["measured (s)"] / min(line["measured (s)"] for line in of_forest))
    summary = {
        "median error of seconds": round(float(np.median(off)), 3),
        "largest error of bytes": round(max(abs(line["bytes"] - 1) for line in lines), 3),
        "chosen over best": [round(each, 3) for each in chosen],
    }
    print(summary)
    record = {"environment": environment(options), "costs": costs.as_metrics(), "least bytes": least}
    write_json({**record, **summary, "lines": lines}, options.out)


if __name__ == "__main__":
    main()
