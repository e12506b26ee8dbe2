"""What the canary sees, and when: faults that are injected, false alarms, and what it costs (docs/exactness.md).

    python benchmarks/canary.py faults --out canary_faults.json
    python benchmarks/canary.py alarms --out canary_alarms.json
    python benchmarks/canary.py costs --out canary_costs.json

A real worker with verl's PPO loss on FSDP2 trains a small Qwen3 on stored trees (docs/benchmarks/data/trees), one group
a step, with the optimiser's step.

Every tenth update compares a gradient, too.

`faults`: each kind of `verl_tree.testing.mutants` with several seeds and forests, packed and relayed. In which step
   does the canary end the run? Where it does not, all rows of all groups are compared once, which says whether
   the fault changes a log-prob by more than the limit at all. Routes of a mixture are imposed (R2). With
   `--backend triton` and TRITON_INTERPRET=1 it is the Triton kernel, in Triton's interpreter.
`alarms`: the largest value of `tree/canary` in so many steps of every forest, in float32 and in bfloat16.
`costs`: seconds of an update without a canary, with one, and with the comparison of a gradient, one after the other.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import environment, new_parser, print_table, write_json
from plan import BF16
from por_models import small_mixture, small_qwen3
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.engine.canary import METRIC
from verl_tree.engine.routes.router_replay import ROUTES
from verl_tree.functional.rounding import LIMIT
from verl_tree.main_sft import ONE_RANK
from verl_tree.records import StoredTree, read_trees
from verl_tree.testing.local_worker import FP32, batch_of_rows, local_worker
from verl_tree.testing.mutants import KINDS, mutated
from verl_tree.trainer.worker import TreeTrainingWorker

TREES = Path("docs/benchmarks/data/trees")
FORESTS = ("arithmetic_tools", "blackbox_openai_agent", "memory_qa", "multi_turn_thinking", "tree_search_reasoning")
SEEDS = {"float32": 4, "bfloat16": 2}
DTYPES = {"float32": ("fp32", FP32), "bfloat16": ("bf16", BF16)}
VOCAB_SIZE = 512
MIXTURE = "mixture"
"""Folder of a model with experts."""
RELAYED = 96
"""A capacity below that of every tree."""


def batch_of(tree: StoredTree, *, seed: int) -> TensorDict:
    """Make verl's mini-batch of a group, with drawn advantages."""
    generator = torch.Generator().manual_seed(seed)
    rows = [{name: torch.from_numpy(value) for name, value in leaf.row().items()} for leaf in tree.leaves]
    made = [
        {
            **{name: row[name] for name in ("prompts", "responses", "response_mask")},
            "old_log_probs": torch.full((len(row["responses"]),), -6.0),
            "advantages": torch.randn(len(row["responses"]), generator=generator),
        }
        for row in rows
        if row["response_mask"].any()
    ]
    return batch_of_rows(made, max_token_len=1, global_batch_size=len(made))


def make_worker(
    folder: str, *, capacity: int, dtype: str, canary: int = 1, gradient_every: int = 10, backend: str = "auto"
) -> TreeTrainingWorker:
    """Make a worker on trees; the routes of a mixture are recorded and imposed."""
    model_dtype, precision = DTYPES[dtype]
    worker = local_worker(
        folder,
        strategy="fsdp_tree",
        max_token_len=capacity,
        tree_options={
            "capacity": capacity,
            "canary": canary,
            "canary_gradient_every": gradient_every,
            "backend": backend,
        },
        router_replay="R2" if Path(folder).name == MIXTURE else "disabled",
        engine_options={"mixed_precision": precision, "model_dtype": model_dtype},
    )
    config = FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1)
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def trees_of(name: str) -> list[StoredTree]:
    """Read the groups of a forest."""
    return list(read_trees(TREES / f"{name}.parquet"))


def steps(worker: TreeTrainingWorker, trees: list[StoredTree], *, num_steps: int) -> Iterator[float]:
    """Take optimiser steps, a group each, and yield the canary's value."""
    with worker.engine.train_mode():
        for step in range(num_steps):
            batch = batch_of(trees[step % len(trees)], seed=step)
            if worker.engine.replay is not None:
                data = batch.clone()
                tu.assign_non_tensor(data, compute_loss=False)
                batch[ROUTES] = worker.infer_batch(data)[ROUTES]
            tu.assign_non_tensor(batch, disable_auto_offload=True)
            worker.train_batch(batch)
            yield worker.engine.canary.metrics[METRIC]


def first_alarm(worker: TreeTrainingWorker, trees: list[StoredTree], *, num_steps: int) -> int | None:
    """Return the step, from 1, in which the canary ends the run."""
    step = 0
    try:
        for _ in steps(worker, trees, num_steps=num_steps):
            step += 1
    except ValueError as error:
        if "tree.canary" not in str(error):
            raise
        return step + 1
    return None


def faults(
    folder: str, *, num_steps: int, dtype: str, kinds: list[str], seeds: int | None, backend: str
) -> Iterator[dict[str, Any]]:
    """Yield a line for each fault: in which step the canary saw it."""
    cases = [(kind, seed) for kind in kinds for seed in range(seeds or SEEDS[dtype])]
    for kind, seed in cases:
        model = f"{folder}/{MIXTURE}" if KINDS[kind][0] == "routes" else folder
        name = FORESTS[(seed + len(kind)) % len(FORESTS)]
        is_relayed = kind == "stale_store" or seed % 2 == 1
        trees = trees_of(name)
        options = {"capacity": RELAYED if is_relayed else 1 << 14, "dtype": dtype, "backend": backend}
        worker = make_worker(model, **options)
        with mutated(worker.engine, kind, seed=seed):
            seen = first_alarm(worker, trees, num_steps=num_steps)
        line = {
            "fault": kind,
            "seed": seed,
            "forest": name,
            "relayed": is_relayed,
            "dtype": dtype,
            "seen in step": seen,
        }
        if seen is None:
            worker = make_worker(model, **options, canary=1000)
            with mutated(worker.engine, kind, seed=seed):
                line["is in all rows"] = first_alarm(worker, trees, num_steps=len(trees)) is not None
        print(line, flush=True)
        yield line


def false_alarms(folder: str, *, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each forest and dtype: the largest value of so many steps without a fault."""
    for name in FORESTS:
        for dtype in DTYPES:
            worker = make_worker(folder, capacity=RELAYED if len(name) % 2 else 1 << 14, dtype=dtype)
            values = list(steps(worker, trees_of(name), num_steps=num_steps))
            line = {"forest": name, "dtype": dtype, "steps": len(values), "median": median(values)}
            line |= {"largest": max(values), "alarms": sum(value > LIMIT for value in values)}
            print(line, flush=True)
            yield line


def costs(folder: str, *, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each forest: seconds of an update of all its groups: without, with a canary, with a gradient."""
    for name in FORESTS:
        leaves = tuple(leaf for tree in trees_of(name) for leaf in tree.leaves)
        batch = batch_of(StoredTree(0, name, leaves), seed=0)
        sides = {
            kind: make_worker(folder, capacity=1 << 14, dtype="float32", canary=canary, gradient_every=every)
            for kind, canary, every in (("without", 0, 0), ("with", 1, 0), ("gradient", 1, 1))
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in sides}
        for _ in range(repetitions + 1):
            for kind, worker in sides.items():
                with worker.engine.train_mode():
                    started_s = time.perf_counter()
                    worker.engine.forward_backward_batch(batch.clone(), worker.loss_fn, forward_only=False)
                    seconds[kind].append(time.perf_counter() - started_s)
        without, with_it, gradient = (min(each[1:]) for each in seconds.values())
        counts = sides["with"].engine.tree_counts
        yield {
            "forest": name,
            "tree tokens": counts.num_tree_tokens,
            "tokens of a row": round(counts.num_flat_tokens / counts.num_leaves),
            "without (s)": round(without, 4),
            "with (s)": round(with_it, 4),
            "share": round(with_it / without - 1, 3),
            "gradient (s)": round(gradient - with_it, 4),
            "its share, every 100": round((gradient - with_it) / without / 100, 3),
        }


def main() -> None:
    """Measure and print."""
    parser = new_parser(__doc__)
    parser.add_argument("part", choices=["faults", "alarms", "costs"])
    parser.add_argument("--steps", type=int, help="steps of a run: 100 with a fault, 300 without")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="faults")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="of the faults")
    parser.add_argument("--seeds", type=int, help="faults of a kind: 4 in float32, 2 in bfloat16")
    parser.add_argument("--backend", default="auto", help="attention backend of the faults")
    options = parser.parse_args()
    os.environ.update(ONE_RANK)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # where reports go
        small_qwen3(256, layers=2, vocab_size=VOCAB_SIZE).save_pretrained(folder)
        small_mixture(layers=2, vocab_size=VOCAB_SIZE).save_pretrained(f"{folder}/{MIXTURE}")
        if options.part == "faults":
            given = {
                "num_steps": options.steps or 100,
                "kinds": options.kinds,
                "seeds": options.seeds,
                "backend": options.backend,
            }
            lines = [line for dtype in options.dtypes for line in faults(folder, dtype=dtype, **given)]
        elif options.part == "alarms":
            lines = list(false_alarms(folder, num_steps=options.steps or 300))
        else:
            lines = list(costs(folder, repetitions=options.repetitions))
    dist.destroy_process_group()
    print_table(lines)
    found: dict[str, Any] = {"environment": environment(options)}
    for dtype in options.dtypes if options.part == "faults" else ():
        seen = [line["seen in step"] for line in lines if line["dtype"] == dtype]
        found[dtype] = {
            f"seen in {steps} steps": round(float(np.mean([each is not None and each <= steps for each in seen])), 3)
            for steps in (1, 20, 100)
        }
        print(dtype, found[dtype])
    write_json({**found, "lines": lines}, options.out)


if __name__ == "__main__":
    main()
