"""Step times of the three trainer modes on sessions with a long tail: whole runs on one machine, one after the other.

    PYTHONPATH=tests/support python benchmarks/trainer_modes.py --out docs/benchmarks/data/trainer_modes.json

Every run trains the tiny model of the end-to-end tests on `tests/support/long_tail_loop.py`, where one session in eight
has a turn 24 times as long as the others. The modes take turns, `--rounds` times. A mode that leaves the long sessions
for later is fast for the wrong reason, so each step also says whether it trained one. The load is the machine's average
of the last minute, before and after the run.
"""

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from async_run import LONG_TAIL
from harness import environment, new_parser, print_table, write_json
from tiny_run import make_inputs, run

MODES = {
    "sync": (),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": (
        "trainer.v1.trainer_mode=separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.hybrid_engine=false",
    ),
}
TIMES = ("step", "gen", "old_log_prob", "update_actor", "update_weights")
LONG_RESPONSE_LEN = 100
NUM_UNTIMED = 2
"""First steps of a run, in which the engines warm up."""


def main() -> None:
    """Run every mode, print the medians and write the steps."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="runs of each mode")
    parser.add_argument("--steps", type=int, default=12, help="steps of a run")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for number in range(options.rounds):
            for mode in MODES:
                runs.append(time_mode(folder, mode, number=number, num_steps=options.steps))
                write_json({"environment": environment(options), "runs": runs}, options.out)
    print_table([summarise(each) for each in runs])


def time_mode(folder: Path, mode: str, *, number: int, num_steps: int) -> dict[str, Any]:
    """Run one mode and return its steps."""
    load = os.getloadavg()[0]
    steps = f"trainer.total_training_steps={num_steps}"
    metrics = run(folder, f"{mode}_{number}", *LONG_TAIL, *MODES[mode], steps, timeout_s=3600)
    return {
        "mode": mode,
        "load": [load, os.getloadavg()[0]],
        "steps": [
            {name: values[f"timing_s/{name}"] for name in TIMES}
            | {
                "trains_long_session": values["response_length/max"] > LONG_RESPONSE_LEN,
                "staleness": values["training/off_policy/trajectory_staleness/max"],
            }
            for _, values in sorted(metrics.items())
        ],
    }


def summarise(timed: dict[str, Any]) -> dict[str, Any]:
    """Return the medians over a run's timed steps."""
    steps = timed["steps"][NUM_UNTIMED:]
    return {
        "mode": timed["mode"],
        "load": " to ".join(f"{load:.0f}" for load in timed["load"]),
        **{f"{name} (s)": f"{median(step[name] for step in steps):.2f}" for name in TIMES},
        "long": f"{sum(step['trains_long_session'] for step in steps)} of {len(steps)}",
        "staleness": max(step["staleness"] for step in steps),
    }


if __name__ == "__main__":
    main()
