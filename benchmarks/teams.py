"""Two trajectories on two ranks: each rank computes one, beside a team that computes both (docs/ulysses.md).

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/teams.py --out docs/benchmarks/data/teams.json

The ranks are processes of this machine's CPU with one thread each; a Qwen3 in float32 is sharded by FSDP2. The ways
take turns. `alone`: each rank has a trajectory, as `verl_tree.cost.balance` deals them. `team`:
`ulysses_sequence_parallel_size=2`. The gradients of both are compared first. One trajectory is eight times as long as
the other, or both are alike, which shows what a team costs.
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
from harness import environment, interleave, keep_freed_memory, new_parser, print_table, write_json
from por_models import small_qwen3
from torch import Tensor
from verl.utils import tensordict_utils as tu

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

VOCAB_SIZE = 512
CASES = ((2048, 256), (1152, 1152))
"""Tokens of both trajectories."""
MAX_LEN = 4096
TOLERANCE = 1e-5
"""Of gradients in float32, relative to their norm."""


def main() -> None:
    """Compare the gradients, time both ways; rank 0 writes the record and prints the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            small_qwen3(256, layers=8, vocab_size=VOCAB_SIZE).save_pretrained(Path(mine))
        dist.barrier()
        workers = {
            name: local_worker(folders[0], strategy="fsdp_tree", max_token_len=MAX_LEN, sequence_parallel_size=size)
            for name, size in (("alone", 1), ("team", 2))
        }
        records = [_measure(lens, workers, repetitions=options.repetitions) for lens in CASES]
    if dist.get_rank() == 0:
        print_table([_line(record) for record in records])
        write_json({"environment": environment(options), "cases": records}, options.out)
    dist.barrier()
    dist.destroy_process_group()


def _measure(lens: tuple[int, int], workers: dict[str, TreeTrainingWorker], *, repetitions: int) -> dict[str, Any]:
    """Compare the gradients and time both ways."""
    generator = torch.Generator().manual_seed(0)
    rows = [_row(torch.randint(VOCAB_SIZE, (length,), generator=generator)) for length in lens]
    of_rank = {"alone": [rows[dist.get_rank()]], "team": rows}
    ways = {name: partial(_update, worker, of_rank[name]) for name, worker in workers.items()}
    alone, team = (way() for way in ways.values())
    difference = float((team - alone).norm() / alone.norm())
    assert difference < TOLERANCE, f"gradients differ by {difference}"
    times = interleave(ways, repetitions=repetitions)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, {name: {"wall_s": each.wall_s, "cpu_s": each.cpu_s} for name, each in times.items()})
    return {"lens": lens, "gradient_difference": difference, "ranks": ranks}


def _line(record: dict[str, Any]) -> dict[str, str]:
    """Return the medians of the clock, and of the processor seconds of the busier rank, which other work slows less."""
    line = {"tokens": " + ".join(map(str, record["lens"]))}
    for kind in ("wall_s", "cpu_s"):
        alone, team = (
            max(statistics.median(rank[name][kind]) for rank in record["ranks"]) for name in ("alone", "team")
        )
        line |= {f"alone, {kind}": f"{alone:.2f}", f"team, {kind}": f"{team:.2f}", kind: f"{alone / team:.2f}"}
    return line | {"gradients": f"{record['gradient_difference']:.1e}"}


def _row(token_ids: Tensor) -> dict[str, Tensor]:
    """Return a row of which all tokens but the first are trained."""
    mask = torch.ones(len(token_ids) - 1, dtype=torch.int64)
    return {"prompts": token_ids[:1], "responses": token_ids[1:], "response_mask": mask}


def _update(worker: TreeTrainingWorker, rows: list[dict[str, Tensor]]) -> Tensor:
    """Compute the gradients of an update and return this rank's part of them."""
    batch = batch_of_rows(rows, max_token_len=MAX_LEN, global_batch_size=2)
    with worker.engine.train_mode():
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(batch, _loss, forward_only=False)
        parts = [each.grad.to_local().flatten() for each in worker.engine.module.parameters()]
    dist.barrier()
    return torch.cat(parts)


def _loss(*, model_output: dict[str, Tensor], data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Sum the log-probs of responses; as in verl's losses, for the mean that FSDP takes over the ranks."""
    del dp_group
    scores = (each[:-1].sum() for each in model_output["log_probs"].unbind())
    return tu.get(data, "dp_size") * sum(scores, torch.zeros(())), {}


if __name__ == "__main__":
    main()
