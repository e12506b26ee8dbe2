"""What is made of the metrics of training runs: files, differences, summaries, and pictures of chosen keys."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from paired_runs import summary
from parity import small_steps, worst_difference
from recipe_runs import read_metrics, write_metrics
from steps import time_of

VALIDATION, SESSION_REWARD = "val-core/memory_qa/reward/mean@1", "tree/session_reward/mean"
UPDATE_S = "timing_s/update_actor"


def plot(*arguments: object) -> None:
    """Run `verl-tree plot` in this process."""
    pytest.importorskip("matplotlib")
    from verl_tree.commands import plot

    plot.main([str(argument) for argument in arguments])


def run_file(path: Path, values: dict[int, float], *, key: str = "actor/loss") -> Path:
    """Write a run that logged one metric."""
    write_metrics({step: {key: value} for step, value in values.items()}, path, keys=(key,))
    return path


def test_written_metrics_have_the_chosen_keys_and_are_read_as_verls(tmp_path: Path) -> None:
    metrics: dict[int, dict[str, Any]] = {2: {"a": 1.5, "b": 2.0}, 0: {"c": 3.0}}
    write_metrics(metrics, tmp_path / "data" / "run.jsonl", keys=("a", "c"))
    lines = (tmp_path / "data" / "run.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 0, "data": {"c": 3.0}}, {"step": 2, "data": {"a": 1.5}}]
    assert read_metrics(tmp_path / "data" / "run.jsonl") == {0: {"c": 3.0}, 2: {"a": 1.5}}


def test_differences_are_relative_to_the_largest_size_of_a_metric() -> None:
    runs = {
        "tree": {1: {"loss": -4.0}, 2: {"loss": 1.5}, 3: {}},
        "flat": {1: {"loss": -4.0}, 2: {"loss": 1.0}, 3: {}},
    }
    found = worst_difference(runs, key="loss")
    assert found == {"metric": "loss", "steps": 2, "largest size": 4.0, "relative difference": 0.125}


def test_small_steps_are_found_in_what_flat_moved() -> None:
    first = torch.zeros(4)
    flat = torch.tensor([-1.0, 0.95, 0.5, -0.125])
    tree = flat + torch.tensor([0.0, 1.0, -1.0, 2.0])  # squares 0, 1, 1, 4: the last two steps are small
    assert small_steps(tree, flat_W=flat, first_W=first) == {"weights": 0.5, "squared_distance": pytest.approx(5 / 6)}


def test_a_repeated_step_has_the_generation_of_the_run_that_generated() -> None:
    def step(gen: float, log_probs: float, update: float) -> dict[str, float]:
        times = {"gen": gen, "old_log_prob": log_probs, "update_actor": update, "step": gen + log_probs + update + 1}
        mfu = {"perf/mfu/actor": 0.25, "perf/mfu/actor_flat_equivalent": 1.0}
        tokens = {"tree/packed_tokens": 100, "tree/flat_tokens": 500, "actor/perf/max_memory_allocated_gb": 2.0}
        return {**{f"timing_s/{part}": value for part, value in times.items()}, **mfu, **tokens}

    generated = {1: step(10, 1, 4), 2: step(20, 3, 8)}
    line = time_of({1: step(0.5, 9, 30), 2: step(0.5, 11, 40)}, name="flat", generated=generated)
    assert line == {
        "run": "flat",
        "generation (s)": 15.0,
        "log-probs (s)": 10.0,
        "update (s)": 35.0,
        "step (s)": 61.0,
        "peak of the update (GB)": 2.0,
        "flat tokens": 500,
        "packed tokens": 100,
        "bound": 4.0,
    }


def test_the_summary_counts_what_was_trained_until_each_validation() -> None:
    def step(tokens: float, update_s: float, **others: float) -> dict[str, float]:
        sampled = {"tree/sampled_tokens": tokens / 4}
        return {"tree/flat_tokens": tokens, **sampled, UPDATE_S: update_s, SESSION_REWARD: update_s / 8, **others}

    runs = [
        {0: {VALIDATION: 0.25}, 1: step(100, 1.0), 2: step(200, 2.0, **{VALIDATION: 0.5})},
        {0: {VALIDATION: 0.75}, 1: step(300, 3.0), 2: step(600, 6.0, **{VALIDATION: 1.0})},
    ]
    first, last = summary(runs, "rows", "all")
    assert (first["step"], first["validation reward"], first["tokens trained in a run"]) == ("0", "0.500", "0")
    assert (last["step"], last["validation reward"], last["least to greatest"]) == ("2", "0.750", "0.500 to 1.000")
    assert (last["tokens trained in a run"], last["median update (s)"]) == ("600", "2.50")
    assert (first["tokens generated in a run"], last["tokens generated in a run"]) == ("0", "150")
    assert (first["training reward"], last["training reward"]) == ("", "0.375")  # (1 + 2 + 3 + 6) / 4 / 8


def test_runs_of_one_name_are_drawn_as_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_file(tmp_path / f"{number}.jsonl", {1: 0.5, 2: 1.0 + number}) for number in range(3)]
    out = tmp_path / "picture.png"
    plot(runs[0], "--baseline", *runs[1:], "--names", "a,a,b", "--keys", "actor/loss", "--out", out)
    assert out.stat().st_size > 0
    assert "plot:" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="3 runs: give one to each"):
        plot(runs[0], "--baseline", *runs[1:], "--names", "a,b", "--keys", "actor/loss", "--out", out)
    with pytest.raises(SystemExit, match="runs of one name"):
        plot(runs[0], "--baseline", runs[1], "--out", out)
    with pytest.raises(SystemExit, match="--workspace draws one run"):
        plot(runs[0], "--baseline", runs[1], "--workspace", "--out", out)
    with pytest.raises(ValueError, match="no run logged 'actor/lose'"):
        plot(runs[0], "--keys", "actor/lose", "--out", out)


def test_values_stand_over_what_was_spent_until_then(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from verl_tree.commands.plot import series_of_runs

    runs = [
        {0: {"val": 0.25}, 1: {"tokens": 10.0}, 2: {"tokens": 20.0, "val": 0.5}},
        {0: {"val": 0.75}, 1: {"tokens": 30.0}, 2: {"tokens": 40.0, "val": 1.0}},
    ]
    assert series_of_runs(runs, key="val", over="tokens") == ([0.0, 50.0], [[0.25, 0.75], [0.5, 1.0]])
    file, out = run_file(tmp_path / "run.jsonl", {1: 0.5, 2: 1.0}), tmp_path / "picture.png"
    plot(file, "--keys", "actor/loss", "--over", "actor/loss", "--out", out)
    assert out.stat().st_size > 0
    with pytest.raises(ValueError, match=r"--over time: the run .* did not log it"):
        plot(file, "--keys", "actor/loss", "--over", "time", "--out", out)
    with pytest.raises(SystemExit, match="--over tokens: choose --keys"):
        plot(file, "--over", "tokens")


def test_a_line_has_the_steps_that_all_its_runs_logged() -> None:
    pytest.importorskip("matplotlib")
    from verl_tree.commands.plot import series_of_runs

    runs = [{1: {"a": 1.0}, 2: {"a": 2.0}, 3: {"b": 0.0}}, {2: {"a": 4.0}, 3: {"a": 5.0}}]
    assert series_of_runs(runs, key="a") == ([2], [[2.0, 4.0]])
