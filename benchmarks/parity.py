"""One training run on trees, and its rollouts repeated through verl's own engine: what each step computed.

    python benchmarks/parity.py --out docs/benchmarks/data

trains the recipe memory_qa three times, with a KL and an entropy term, and validations that sample greedily:

- `tree` generates, and stores its rollouts
- `flat` repeats them with tree.enabled=false
- `flat_cut` is `flat` with smaller micro-batches, which changes nothing but the order of sums: what rounding does

Each writes OUT/parity_NAME.jsonl. `weights/moved` is the distance of the weights from the first ones over their norm,
and `weights/apart` the distance from the weights of `flat` over what those have moved. The picture:

    cd docs/benchmarks/data && python ../../../scripts/plot_run.py parity_tree.jsonl --baseline parity_flat.jsonl \
        --names tree,flat --out ../../parity.png --keys KEYS

with the keys that this program prints.
"""

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from harness import environment, new_parser, print_table, write_json
from omegaconf import OmegaConf
from recipe_runs import Metrics, seeds, train, write_metrics
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
    "flat_cut": ("tree.enabled=false", f"{ACTOR}.ppo_max_token_len_per_gpu=1024"),
}

Weights = Mapping[str, torch.Tensor]


def main() -> None:
    """Make the runs, measure the distances, and print the largest differences."""
    parser = new_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/parity"), help="folder of the runs")
    options = parser.parse_args()
    if options.out is None:
        parser.error("--out is needed: the folder for the files of metrics")
    work = options.work.resolve()
    shutil.rmtree(work, ignore_errors=True)  # else the first run would repeat rollouts of an earlier call
    runs = {name: train("memory_qa", *settings(options, work), *RUNS[name], folder=work / name) for name in RUNS}
    add_distances(runs, work=work)
    for name, metrics in runs.items():
        write_metrics(metrics, options.out / f"parity_{name}.jsonl", keys=(*COMPARED, APART, *TOKENS, *TIMES))
    table = [worst_difference(runs, key=key) for key in COMPARED]
    print_table([{name: _short(value) for name, value in line.items()} for line in table])
    write_json({"environment": environment(options), "worst": table}, options.out / "parity.json")
    print(f"--keys {','.join((*COMPARED, APART))}")


def settings(options: argparse.Namespace, work: Path) -> tuple[str, ...]:
    """Return the overrides that all runs have in common."""
    steps = ",".join(map(str, range(1, options.steps + 1)))
    return (
        *seeds(1),
        f"trainer.total_training_steps={options.steps}",
        "trainer.test_freq=4",
        f"{ROLLOUT}.val_kwargs.do_sample=false",
        f"{ROLLOUT}.val_kwargs.temperature=0",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.01",
        f"{ACTOR}.entropy_coeff=0.001",
        "skip.rollout_tq.enable=true",
        "skip.rollout_tq.action=cache",
        f"skip.rollout_tq.steps=[{steps}]",
        f"skip.rollout_tq.dump_dir={work}/rollouts",
        "trainer.save_freq=1",
        f"{ACTOR}.checkpoint.save_contents=[hf_model]",
    )


def add_distances(runs: Mapping[str, Metrics], *, work: Path) -> None:
    """Add the distances of the weights after each step to its metrics."""
    recipe = OmegaConf.load(work / "flat" / "hydra" / ".hydra" / "config.yaml").recipe
    first = weights_in(Path(recipe.folder) / "model")
    norm = distance(first, {name: torch.zeros_like(each) for name, each in first.items()})
    for step in (step for step in runs["flat"] if step > 0):
        flat = weights_after(step, folder=work / "flat")
        for name, metrics in runs.items():
            weights = weights_after(step, folder=work / name)
            metrics[step][MOVED] = distance(weights, first) / norm
            metrics[step][APART] = distance(weights, flat) / distance(flat, first)


def weights_after(step: int, *, folder: Path) -> Weights:
    """Return the weights of the checkpoint of a step."""
    return weights_in(folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")


def weights_in(folder: Path) -> Weights:
    """Return the weights of a model; tied ones once."""
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def distance(weights: Weights, others: Weights) -> float:
    """Return the Euclidean distance of all weights together, computed in float64."""
    assert weights.keys() == others.keys()
    with torch.no_grad():
        squares = [(weights[name].double() - others[name].double()).square().sum() for name in weights]
    return float(torch.stack(squares).sum().sqrt())


def worst_difference(runs: Mapping[str, Metrics], *, key: str) -> dict[str, Any]:
    """Return the largest difference of a step from `flat`, relative to the largest size of the metric there."""
    flat = {step: data[key] for step, data in runs["flat"].items() if key in data}
    size = max(map(abs, flat.values()))
    others = {name: metrics for name, metrics in runs.items() if name != "flat"}
    return {"metric": key, "steps": len(flat), "largest": size} | {
        name: max(abs(metrics[step][key] - value) for step, value in flat.items()) / size
        for name, metrics in others.items()
    }


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
