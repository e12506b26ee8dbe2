"""Two values of an option, training runs of a recipe with the same seeds: all rows of a session or its longest alone.

    python benchmarks/paired_runs.py --out docs/benchmarks/data
    python benchmarks/paired_runs.py --recipe arithmetic_tools --option tree.compute --values live all --steps 10 \
        --test-freq 5 --out docs/benchmarks/data/compute/arithmetic_tools

The first trains memory_qa with `tree.rows=all` and `longest`. It writes a file of metrics for each run, as it ends:
OUT/rows_all_1.jsonl and so on. Runs whose file is there are not repeated, so a command that was stopped goes on. Runs
of one seed get the same prompts at each step, as many sessions of each, and start from the same model. The picture of
all runs:

    cd docs/benchmarks/data && verl-tree plot rows_all_1.jsonl --out ../../rows.png \
        --baseline rows_all_[23].jsonl rows_longest_[123].jsonl --names all,all,all,longest,longest,longest \
        --keys val-core/memory_qa/reward/mean@1,tree/session_reward/mean,tree/flat_tokens
"""

from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

from harness import environment, new_parser, print_table, write_json
from recipe_runs import Metrics, read_metrics, seeds, train, write_metrics

SESSION_REWARD = "tree/session_reward/mean"
UPDATE_S = "timing_s/update_actor"
SAMPLED = "tree/sampled_tokens"
KEYS = (
    SESSION_REWARD,
    "tree/leaves_per_session",
    "tree/flat_tokens",
    "tree/tokens",
    "tree/live_tokens",
    "tree/equal_reward_groups",
    SAMPLED,
    "tree/sampled_tokens_per_live_leaf",
    "actor/entropy",
    "actor/grad_norm",
    "timing_s/step",
    "timing_s/gen",
    "timing_s/old_log_prob",
    UPDATE_S,
)


def main() -> None:
    """Run what is not there yet, then print the means over the seeds."""
    parser = new_parser(__doc__, needed_out="folder for the files of metrics")
    parser.add_argument("--recipe", default="memory_qa")
    parser.add_argument("--option", default="tree.rows")
    parser.add_argument("--values", nargs="+", default=["all", "longest"])
    parser.add_argument("--seeds", type=int, default=3, help="runs with either value")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    parser.add_argument("--test-freq", type=int, default=2, help="steps from one validation to the next")
    parser.add_argument("--runs", type=int, help="most runs of this call")
    parser.add_argument("--work", type=Path, default=Path("runs/paired"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of all runs")
    options = parser.parse_args()
    name = options.option.rpartition(".")[2]
    files = {
        (value, seed): options.out / f"{name}_{value}_{seed}.jsonl"
        for seed in range(1, options.seeds + 1)
        for value in options.values
    }
    missing = [place for place, file in files.items() if not file.exists()]
    for value, seed in missing[: options.runs]:
        settings = (f"trainer.total_training_steps={options.steps}", f"trainer.test_freq={options.test_freq}")
        folder = options.work.resolve() / f"{name}_{value}_{seed}"
        metrics = train(
            options.recipe, f"{options.option}={value}", *seeds(seed), *settings, *options.overrides, folder=folder
        )
        write_metrics(metrics, files[value, seed], keys=(*validations_of(metrics), *KEYS))
    runs = {place: read_metrics(file) for place, file in files.items() if file.exists()}
    tables = [
        summary([metrics for (each, _), metrics in runs.items() if each == value], name, value)
        for value in options.values
    ]
    print_table([line for table in tables for line in table])
    write_json({"environment": environment(options), "summary": tables}, options.out / f"{name}.json")


def validations_of(metrics: Metrics) -> list[str]:
    """Return verl's keys of the validation rewards of a recipe, one a data source."""
    return sorted({name for data in metrics.values() for name in data if name.startswith("val-core/")})


def summary(runs: list[Metrics], name: str, value: str) -> list[dict[str, str]]:
    """Return a line for each validation: rewards of the runs, and what training had taken until then.

    A run's is the mean over the data sources. The training reward is that of all sessions since the validation before.
    """
    steps = sorted(set.intersection(*(set(metrics) for metrics in runs))) if runs else []
    validations = validations_of(runs[0]) if runs else []
    lines = []
    before = 0
    for step in (step for step in steps if runs[0][step].keys() & set(validations)):
        rewards = [fmean(metrics[step][name] for name in validations) for metrics in runs]
        updates = [metrics[each] for metrics in runs for each in steps if 0 < each <= step]
        sessions = [metrics[each][SESSION_REWARD] for metrics in runs for each in steps if before < each <= step]
        before = step
        lines.append(
            {
                name: value,
                "runs": str(len(runs)),
                "step": str(step),
                "validation reward": f"{fmean(rewards):.3f}",
                "least to greatest": f"{min(rewards):.3f} to {max(rewards):.3f}",
                "training reward": f"{fmean(sessions):.3f}" if sessions else "",
                "tokens generated in a run": f"{tokens(updates, SAMPLED) / len(runs):.0f}",
                "tokens trained in a run": f"{tokens(updates, 'tree/flat_tokens') / len(runs):.0f}",
                "median update (s)": f"{median(each[UPDATE_S] for each in updates):.2f}" if updates else "",
            }
        )
    return lines


def tokens(updates: list[dict[str, Any]], key: str) -> float:
    """Return the sum of a metric; NaN if a run is older than it."""
    return sum(each.get(key, nan) for each in updates)


if __name__ == "__main__":
    main()
