"""The clock of a training step, part by part, on trees and flat: a recipe trained several times on the same rollouts.

    python benchmarks/steps.py --recipe calculator --out calculator_steps.json data.train_batch_size=2

The first run generates and stores its rollouts, the others repeat its steps on them; Hydra overrides of all of them
follow the options. The runs are, one after the other: `tree`, `flat` (tree.enabled=false), `prompt`
(tree.sharing=prompt), `all` (tree.compute=all), `unwatched` (tree.canary=0) and `tree` again, so that a machine that
slowed down shows. A step of a repeated run lasts as long as its own parts and the generation of the first run.

The bound is flat over tree FLOPs of an update, as `perf/mfu/actor_flat_equivalent` has it. Losses are compared with
those of `flat`, or of `all` where there is none. Runs that have ended in the folder --work are not repeated, so a
command that was stopped goes on.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import environment, new_parser, print_table, write_json
from parity import RUNS as ENGINES
from parity import worst_difference
from recipe_runs import Metrics, read_metrics, replayed, seeds, train

RUNS = {
    **ENGINES,
    "prompt": ("tree.sharing=prompt",),
    "all": ("tree.compute=all",),
    "unwatched": ("tree.canary=0",),
    "again": ENGINES["tree"],
}
"""The overrides of each run."""
WITHOUT_VALIDATION = ("trainer.val_before_train=false", "trainer.test_freq=-1")
PARTS = {
    "log-probs (s)": "timing_s/old_log_prob",
    "update (s)": "timing_s/update_actor",
    "step (s)": "timing_s/step",
    "peak of the update (GB)": "actor/perf/max_memory_allocated_gb",
}
COMPARED = ("actor/loss", "actor/grad_norm", "actor/entropy")
GENERATION = "timing_s/gen"
MFU = "perf/mfu/actor"


def main() -> None:
    """Run what is not there yet, then print the times and the differences."""
    parser = new_parser(__doc__)
    parser.add_argument("--recipe", default="calculator")
    parser.add_argument("--steps", type=int, default=2, help="steps of a run")
    parser.add_argument("--runs", default=",".join(RUNS), help="these, divided by commas; `tree` first")
    parser.add_argument("--work", type=Path, help="folder of the runs, runs/steps_RECIPE by default")
    options, overrides = parser.parse_known_args()
    work = (options.work or Path(f"runs/steps_{options.recipe}")).resolve()
    names = options.runs.split(",")
    if names[0] != "tree" or not set(names) <= set(RUNS):
        parser.error(f"--runs {options.runs}: give tree, which generates, and then some of {', '.join(RUNS)}")
    common = (*seeds(1), *replayed(options.steps, work / "rollouts"), *WITHOUT_VALIDATION, *overrides)
    for name in names:
        if options.steps not in read_metrics(work / name / "metrics.jsonl"):
            train(options.recipe, *common, *RUNS[name], folder=work / name, timeout_s=7200.0)
    runs = {name: read_metrics(work / name / "metrics.jsonl") for name in names}
    times = [time_of(metrics, name=name, generated=runs["tree"]) for name, metrics in runs.items()]
    print_table(times)
    other = next((name for name in ("flat", "all") if name in runs), None)
    differences = [
        {"run": name, **worst_difference({"tree": runs[name], "flat": runs[other]}, key=key)}
        for name in runs
        if other not in (None, name)
        for key in COMPARED
    ]
    print_table(differences)
    tokens = ("tree/tokens", "tree/flat_tokens", "tree/packed_tokens", "tree/live_tokens")
    keys = (*tokens, GENERATION, *PARTS.values(), MFU, f"{MFU}_flat_equivalent", *COMPARED)
    steps = {
        name: {step: {key: data.get(key) for key in keys} for step, data in metrics.items()}
        for name, metrics in runs.items()
    }
    record = {"environment": environment(options), "overrides": overrides, "times": times, "differences": differences}
    write_json({**record, "steps": steps}, options.out)


def time_of(metrics: Metrics, *, name: str, generated: Metrics) -> dict[str, Any]:
    """Return a line of the table: means over the steps, with the generation of the run that generated."""
    generation = _mean(generated, GENERATION)
    parts = {part: _mean(metrics, key) for part, key in PARTS.items()}
    parts["step (s)"] += generation - _mean(metrics, GENERATION)
    tokens, flat_tokens = _mean(metrics, "tree/packed_tokens"), _mean(metrics, "tree/flat_tokens")
    bound = _mean(generated, f"{MFU}_flat_equivalent") / _mean(generated, MFU)
    return {
        "run": name,
        "generation (s)": round(generation, 2),
        **{part: round(value, 2) for part, value in parts.items()},
        "flat tokens": round(flat_tokens),
        "packed tokens": round(tokens),
        "bound": round(bound, 2),
    }


def _mean(metrics: Mapping[int, Mapping[str, Any]], key: str) -> float:
    return fmean(data[key] for data in metrics.values())


if __name__ == "__main__":
    main()
