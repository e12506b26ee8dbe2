"""An update of a tree engine beside verl's own of that kind: log-probs and the norm of the gradient.

    python benchmarks/check_engines.py --engine megatron --device cpu --small --out check_engines.jsonl

It needs verl and the engine's packages, of `.venv/megatron` or `.venv/veomni` or of the environment; without them it
says so and passes. VeOmni takes two ranks, and so two GPUs. A control, the tree without its mask, says how far off
wrong log-probs are; right ones may be off by a share of that, larger where both sides are in bfloat16. Times are not
told: the flat side of VeOmni runs PyTorch's attention here, not verl's.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import add_device_options, append_record, new_parser

NUM_RANKS = {"megatron": 1, "veomni": 2}
OF_CONTROL = {"cpu": 1e-3, "cuda": 0.2}
"""How large differences of log-probs may be, in those of the control."""
OF_NORM = {"cpu": 1e-5, "cuda": 0.02}
"""How far the norms of the gradient may be apart, relative."""
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
    append_record({"kind": "engine", "engine": options.engine, **found}, options.out)
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
    from verl_tree.testing.mutants import mutated

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
        scale = 1 if options.small else 64
        tree, flat = (
            local_worker(folders[0], strategy=strategy, max_token_len=1 << 20)
            for strategy in (f"{options.engine}_tree", options.engine)
        )
        scores, flat_scores = (_scores(each, scale=scale) for each in (tree, flat))
        with mutated(tree.engine, "sees_all"):
            control = _scores(tree, scale=scale)
        norm, flat_norm = (_gradient_norm(each, scale=scale) for each in (tree, flat))
    found = {
        "log_probs": _difference(scores, flat_scores),
        "control": _difference(control, flat_scores),
        "grad_norm": abs(norm / flat_norm - 1),
    }
    right = found["log_probs"] <= OF_CONTROL[options.device] * found["control"]
    passed = right and found["grad_norm"] <= OF_NORM[options.device]
    if dist.get_rank() == 0:
        _tell(options, passed=passed, ranks=dist.get_world_size(), differences=found)
    dist.destroy_process_group()
    sys.exit(not passed)


def _batch(scale: int) -> Any:
    from verl_tree.testing.local_worker import batch_of_rows

    rows = list(_rows(scale))
    return batch_of_rows(rows, max_token_len=1 << 20, global_batch_size=len(rows), use_remove_padding=True)


def _scores(worker: Any, *, scale: int) -> list[Any]:
    """Return the log-probs of each response."""
    from verl.utils import tensordict_utils as tu

    data = _batch(scale)
    tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=False, distillation_use_topk=False)
    return [each.float().cpu() for each in _of_responses(worker.infer_batch(data), data=data)]


def _gradient_norm(worker: Any, *, scale: int) -> float:
    """Return that of an update, and take its step."""
    with worker.engine.train_mode():
        worker.engine.optimizer_zero_grad()
        worker.engine.forward_backward_batch(_batch(scale), _sum_of_log_probs, forward_only=False)
        return float(worker.engine.optimizer_step())


def _difference(here: list[Any], there: list[Any]) -> float:
    return max((one - other).abs().max().item() for one, other in zip(here, there, strict=True))


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
