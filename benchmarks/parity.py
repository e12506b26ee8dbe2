"""One training run on trees, and its rollouts repeated through verl's own engine: what each step computed.

    python benchmarks/parity.py --out docs/benchmarks/data

trains the recipe memory_qa twice, with a KL and an entropy term, and validations that sample greedily: `tree` generates
and stores its rollouts, `flat` repeats them with tree.enabled=false.

Runs that have ended in the folder --work are not repeated, so a command that was stopped goes on. Each run is a file
OUT/parity_NAME.jsonl. `weights/moved` is the distance of the weights from the first ones, over their norm, and
`weights/apart` the distance from the weights of `flat`, over what those have moved.

AdamW's first step moves a weight by the learning rate times g / (|g| + epsilon): where a gradient g is not large
against epsilon, its rounding is not small in the step. `small_steps` in OUT/parity.json has the share of such weights,
and which share of the squared distance after the first step lies in them. The picture:

    cd docs/benchmarks/data && verl-tree plot parity_tree.jsonl --baseline parity_flat.jsonl \
        --names tree,flat --out ../../parity.png --keys KEYS

with the keys that this program prints.

Legend: W weights of the model.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import environment, new_parser, print_table, write_json
from omegaconf import OmegaConf
from recipe_runs import Metrics, read_metrics, replayed, seeds, train, write_metrics
from torch import Tensor
from transformers import AutoModelForCausalLM

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MOVED, APART = "weights/moved", "weights/apart"
COMPARED = (
    "actor/loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/kl_loss",
    "tree/session_reward/mean",
    "val-core/memory_qa/reward/mean@1",
    MOVED,
)
TIMES = ("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/ref")
TOKENS = ("tree/flat_tokens", "tree/packed_tokens")
RUNS = {
    "tree": ("tree.enabled=true",),
    "flat": ("tree.enabled=false",),
}


def main() -> None:
    """Make the runs, measure the distances, and print the largest differences."""
    parser = new_parser(__doc__, needed_out="folder for the files of metrics")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--runs", type=int, help="most runs of this call")
    parser.add_argument("--work", type=Path, default=Path("runs/parity"), help="folder of the runs")
    options = parser.parse_args()
    work = options.work.resolve()
    missing = [name for name in RUNS if options.steps not in read_metrics(work / name / "metrics.jsonl")]
    for name in missing[: options.runs]:
        train("memory_qa", *settings(options, work), *RUNS[name], folder=work / name)
    if len(missing) > (options.runs or len(RUNS)):
        sys.exit(f"{len(missing) - options.runs} runs are left: the same command goes on")
    runs = {name: read_metrics(work / name / "metrics.jsonl") for name in RUNS}
    add_distances(runs, work=work)
    for name, metrics in runs.items():
        write_metrics(metrics, options.out / f"parity_{name}.jsonl", keys=(*COMPARED, APART, *TOKENS, *TIMES))
    table = [worst_difference(runs, key=key) for key in COMPARED]
    print_table([{name: _short(value) for name, value in line.items()} for line in table])
    tree_W, flat_W = (weights_after(1, folder=work / name) for name in RUNS)
    small = small_steps(tree_W, flat_W=flat_W, first_W=first_weights(work))
    print(f"step 1: {small['weights']:.2%} small steps, {small['squared_distance']:.1%} of the squared distance")
    write_json({"environment": environment(options), "worst": table, "small_steps": small}, options.out / "parity.json")
    print(f"--keys {','.join((*COMPARED, APART))}")


def settings(options: argparse.Namespace, work: Path) -> tuple[str, ...]:
    """Return the overrides that all runs have in common."""
    return (
        *seeds(1),
        *replayed(options.steps, work / "rollouts"),
        "trainer.test_freq=4",
        f"{ROLLOUT}.val_kwargs.do_sample=false",
        f"{ROLLOUT}.val_kwargs.temperature=0",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.01",
        f"{ACTOR}.entropy_coeff=0.001",
        "trainer.save_freq=1",
        f"{ACTOR}.checkpoint.save_contents=[hf_model]",
    )


def add_distances(runs: Mapping[str, Metrics], *, work: Path) -> None:
    """Add the distances of the weights after each step to its metrics."""
    first = first_weights(work)
    for step in (step for step in runs["flat"] if step > 0):
        tree, flat = (weights_after(step, folder=work / name) for name in RUNS)
        runs["tree"][step][MOVED] = float((tree - first).norm() / first.norm())
        runs["flat"][step][MOVED] = float((flat - first).norm() / first.norm())
        runs["tree"][step][APART] = float((tree - flat).norm() / (flat - first).norm())


def small_steps(tree_W: Tensor, *, flat_W: Tensor, first_W: Tensor) -> dict[str, float]:
    """Return the shares of weights, and of the squared distance, whose step was below .9 of the largest."""
    moved_W, squares_W = (flat_W - first_W).abs(), (tree_W - flat_W).square()
    is_small_W = moved_W < 0.9 * moved_W.max()
    return {
        "weights": float(is_small_W.double().mean()),
        "squared_distance": float(squares_W[is_small_W].sum() / squares_W.sum()),
    }


def first_weights(work: Path) -> Tensor:
    """Return the weights that the runs started with, (W,) float64."""
    recipe = OmegaConf.load(work / "flat" / "hydra" / ".hydra" / "config.yaml").recipe
    return weights_in(Path(recipe.folder) / "model")


def weights_after(step: int, *, folder: Path) -> Tensor:
    """Return the weights of the checkpoint of a step, (W,) float64."""
    return weights_in(folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")


def weights_in(folder: Path) -> Tensor:
    """Return all weights of a model, tied ones once, (W,) float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return torch.cat([weight.detach().double().flatten() for weight in model.parameters()])


def worst_difference(runs: Mapping[str, Metrics], *, key: str) -> dict[str, Any]:
    """Return the largest difference of a step, relative to the largest size of the metric."""
    flat = {step: data[key] for step, data in runs["flat"].items() if key in data}
    size = max(map(abs, flat.values()))
    worst = max(abs(runs["tree"][step][key] - value) for step, value in flat.items())
    return {"metric": key, "steps": len(flat), "largest size": size, "relative difference": worst / size}


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
