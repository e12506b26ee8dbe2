"""An update of a tree engine beside verl's own of that kind: log-probs, gradient norm and seconds.

    python benchmarks/check_engines.py --engine megatron --device cpu --small --out check_engines.jsonl

It needs verl and the engine's packages, of `.venv/megatron` or `.venv/veomni` or of the environment; without them it
says so and passes. VeOmni takes two ranks, and so two GPUs. On a CPU both sides are in float32 and must agree to 1e-5,
on a GPU in what verl takes there, bfloat16, whose rounding differs from kernel to kernel.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import add_device_options, append_record, new_parser

NUM_RANKS = {"megatron": 1, "veomni": 2}
TOLERANCE = {"cpu": 1e-5, "cuda": 0.05}
"""Of log-probs, in nats, and of the gradient norm, relative."""
NUM_UPDATES = 3
ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the ranks, or be one."""
    parser = new_parser(__doc__)
    parser.add_argument("--engine", choices=NUM_RANKS, required=True)
    add_device_options(parser, seconds=200)
    options = parser.parse_args()
    if reason := _missing(options):
        _tell(options, passed=True, skipped=reason)
    elif "RANK" in os.environ:
        _compare(options)
    else:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS[options.engine]}"]
        os.execv(sys.executable, [sys.executable, "-m", *launcher, *sys.argv])


def _tell(options: argparse.Namespace, **found: Any) -> None:
    append_record({"check": "engines", "engine": options.engine, **found}, options.out)
    print(f"{options.engine}: {found}", flush=True)


def _missing(options: argparse.Namespace) -> str | None:
    """Return what the machine lacks, or None."""
    from importlib.util import find_spec

    import torch

    sys.path.append(str(ROOT / ".venv" / options.engine))
    packages = ("verl", "megatron.core" if options.engine == "megatron" else "veomni")
    for package in packages:
        if find_spec(package.partition(".")[0]) is None:
            return f"no {package} here (docs/engines.md)"
    if options.device == "cuda" and torch.cuda.device_count() < NUM_RANKS[options.engine]:
        return f"{NUM_RANKS[options.engine]} ranks on {torch.cuda.device_count()} GPU"
    return None


def _compare(options: argparse.Namespace) -> None:
    """Take the same updates on both engines, on all ranks; the first one writes what came of it."""
    if options.device == "cpu":
        os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", "VERL_PLATFORM": "cpu"}
    from importlib import import_module

    import torch
    import torch.distributed as dist
    from por_models import small_qwen3

    from verl_tree.testing.local_worker import local_worker

    if options.device == "cpu":
        import_module("verl_tree.cpu.platform")
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    import_module(f"verl_tree.engine.{options.engine}")
    dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    with tempfile.TemporaryDirectory() as mine:
        folders = [mine]
        dist.broadcast_object_list(folders)
        if dist.get_rank() == 0:
            width, num_layers = (64, 2) if options.small else (1024, 8)
            model = small_qwen3(width, layers=num_layers, vocab_size=512, tie_word_embeddings=False)
            model.save_pretrained(folders[0])
        dist.barrier()
        sides = {}
        for side, strategy in (("tree", f"{options.engine}_tree"), ("flat", options.engine)):
            worker = local_worker(folders[0], strategy=strategy, max_token_len=1 << 20)
            sides[side] = _updates(worker, scale=1 if options.small else 64)
    tree, flat = sides["tree"], sides["flat"]
    errors = {
        "log_probs": max((here - there).abs().max().item() for here, there in zip(tree[0], flat[0], strict=True)),
        "grad_norm": max(abs(here / there - 1) for here, there in zip(tree[1], flat[1], strict=True)),
    }
    if dist.get_rank() == 0:
        seconds = {side: round(min(each[2]), 4) for side, each in sides.items()}
        passed = max(errors.values()) <= TOLERANCE[options.device]
        _tell(options, passed=passed, ranks=dist.get_world_size(), errors=errors, seconds=seconds)
    dist.destroy_process_group()


def _updates(worker: Any, *, scale: int) -> tuple[list[Any], list[float], list[float]]:
    """Return log-probs of the rows, and gradient norms and seconds of some updates."""
    import torch
    from verl.utils import tensordict_utils as tu

    from verl_tree.testing.local_worker import batch_of_rows

    def batch() -> Any:
        rows = list(_rows(scale))
        return batch_of_rows(rows, max_token_len=1 << 20, global_batch_size=len(rows), use_remove_padding=True)

    scored = batch()
    tu.assign_non_tensor(scored, compute_loss=False, calculate_entropy=False, distillation_use_topk=False)
    scores = [each.float().cpu() for each in _of_responses(worker.infer_batch(scored), data=scored)]
    norms, seconds = [], []
    for _ in range(NUM_UPDATES):
        data, started = batch(), time.perf_counter()
        with worker.engine.train_mode():
            worker.engine.optimizer_zero_grad()
            worker.engine.forward_backward_batch(data, _sum_of_log_probs, forward_only=False)
            norms.append(float(worker.engine.optimizer_step()))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return scores, norms, seconds


def _rows(scale: int) -> Iterator[dict[str, Any]]:
    """Yield eight rows of one prompt, which fork twice; all tokens behind the prompt are trained."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def tokens(number: int) -> Any:
        return torch.randint(512, (number * scale,), generator=generator)

    prompt = tokens(16)
    for _ in range(2):
        first = tokens(8)
        for _ in range(4):
            response = torch.cat([first, tokens(4)])
            mask = torch.ones(len(response), dtype=torch.int64)
            yield {"prompts": prompt, "responses": response, "response_mask": mask}


def _of_responses(outputs: Any, *, data: Any) -> list[Any]:
    """Return the log-probs of each response; a score stands one position before its token."""
    rows = zip(outputs["log_probs"].unbind(), data["responses"].unbind(), strict=True)
    return [scores[-len(response) - 1 : -1] for scores, response in rows]


def _sum_of_log_probs(*, model_output: dict[str, Any], data: Any, dp_group: object) -> tuple[Any, dict[str, Any]]:
    """Sum the log-probs of responses, as verl's losses are called."""
    del dp_group
    return sum(scores.sum() for scores in _of_responses(model_output, data=data)) / 1000.0, {}


if __name__ == "__main__":
    main()
