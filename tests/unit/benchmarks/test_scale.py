"""The page about a stored step: its formulas by hand, a run of it on two small trees, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import scale
from scale_page import Question, best_checkpoint_minutes, bubble_share, failure_losses, update_times

from verl_tree.records import StoredLeaf, StoredTree, write_trees

# Group a: 1 2 3 ─┬─ 4 5  (reward 1)      Group b: 1 6 ─┬─ 7  (reward 1)
#                 └─ 6    (reward 0)                    └─ 8  (reward 1)
ROWS = {"a": ([1, 2, 3, 4, 5], [1, 2, 3, 6]), "b": ([1, 6, 7], [1, 6, 8])}
REWARDS = {"a": (1.0, 0.0), "b": (1.0, 1.0)}


def leaf(session: int, token_ids: list[int], reward: float, role: str | None = None) -> StoredLeaf:
    """Make a leaf whose prompt is its first token."""
    response_len = len(token_ids) - 1
    return StoredLeaf(
        session,
        0,
        np.array(token_ids),
        1,
        is_trained=np.arange(len(token_ids)) > 0,
        log_probs=np.full(len(token_ids), np.nan),
        token_rewards=np.array([*[0.0] * (response_len - 1), reward]),
        role=role,
    )


def store(path: Path, roles: tuple[str | None, str | None] = (None, None)) -> Path:
    """Store both groups; the rows of b have these roles."""
    of_group = {"a": (None, None), "b": roles}
    trees = []
    for uid, rows in ROWS.items():
        leaves = zip(rows, REWARDS[uid], of_group[uid], strict=True)
        trees.append(StoredTree(1, uid, tuple(leaf(number, *each) for number, each in enumerate(leaves))))
    write_trees(path, trees)
    return path


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    return store(tmp_path / "trees.parquet")


def page(monkeypatch: pytest.MonkeyPatch, trees: Path, *options: str) -> dict[str, Any]:
    """Run the benchmark and return what it wrote of the step."""
    out = trees.with_suffix(".json")
    arguments = ["scale.py", f"--trees={trees}", f"--out={out}", "--repetitions=1", *options]
    monkeypatch.setattr(sys, "argv", arguments)
    scale.main()
    return json.loads(out.read_text())["step"]


def test_a_bubble_by_hand() -> None:
    """Two stages run eight calls in nine turns; one stage has no bubble."""
    assert bubble_share(8, num_stages=2) == 1 / 9
    assert bubble_share(np.array([1, 3]), num_stages=4).tolist() == [3 / 4, 3 / 6]
    assert bubble_share(5, num_stages=1) == 0


def test_times_by_hand() -> None:
    """Pipelines of two stages: two calls of 1 s a stage take three turns, one call takes two."""
    times = update_times(np.array([[4.0], [2.0]]), np.array([[2], [1]]), num_stages=2, whole_s=5.0)
    # On four stages in all; evenly it were 5 / 4 s.
    assert times == pytest.approx({"seconds": 3, "bubble": 2 / 5, "busy": 3 / 6, "over_even": 3 / (5 / 4)})
    # A rank without rows waits; mini-batches come one after another.
    times = update_times(np.array([[4.0, 1.0], [0.0, 3.0]]), np.array([[1, 1], [0, 1]]), num_stages=1, whole_s=8.0)
    assert times == pytest.approx({"seconds": 7, "bubble": 0, "busy": 4 / 7, "over_even": 7 / 4})


def test_failures_by_hand() -> None:
    """100 ranks that each fail every 500 h fail every 300 min."""
    run = {"run_minutes": 300.0, "restart_minutes": 6.0, "save_seconds": 60.0}
    assert failure_losses(checkpoint_minutes=30.0, **run) == pytest.approx((1 / 30, 15 / 300, 6 / 300))
    best = best_checkpoint_minutes(run_minutes=300.0, save_seconds=60.0)
    assert best == pytest.approx(600**0.5)
    least, *others = (sum(failure_losses(checkpoint_minutes=each * best, **run)) for each in (1.0, 0.9, 1.1))
    assert least < min(others)


def test_a_page_of_two_trees(trees: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One pipeline of two stages; each mini-batch is the groups a and b, and b teaches nothing."""
    failures = ("--mtbf-hours=10", "--checkpoint-minutes=30", "--restart-minutes=6", "--save-seconds=60")
    found = page(monkeypatch, trees, "--ranks=2", "--pipeline=2", "--prompts=4", "--mini-batches=2", *failures)
    assert (found["ranks"], found["leaves"], found["longest_leaf"]) == (1, 8, 5)
    assert (found["flat_tokens"], found["tree_tokens"]) == (2 * (5 + 4 + 3 + 3), 2 * (6 + 4))
    assert (found["computed_rows"], found["computed_tokens"]) == (2 * 2, 2 * 6)
    assert (found["imbalance"], found["cut_groups"], found["idle_cells"]) == (1, 0, 0)
    assert found["calls"] == {"mean": 1, "least": 1, "most": 1}
    # One call on two stages: each is idle half of the time.
    assert found["update"]["bubble"] == found["update"]["busy"] == pytest.approx(0.5)
    assert found["update"]["over_even"] == pytest.approx(2)
    # 24 bytes for each of 8 prompt tokens, 48 for each of 22 response tokens.
    assert found["bytes"]["transfer_queue"] > 24 * 8 + 48 * 22
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert "  repeated to 4 prompts; as many different ones would have a longer longest row" in lines
    # A run that fails every 5 h loses 1 / 30, 15 / 300 and 6 / 300.
    assert "  10.3% of the time is lost: 3.3% saving, 5.0% computed again, 2.0% restarts" in lines


def test_ranks_cut_their_rows_as_they_do_in_a_run(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies share nothing: two of a are 12 tokens."""
    for capacity, num_calls in ((12, 1), (11, 2)):
        found = page(monkeypatch, trees, "--ranks=1", "--prompts=4", f"--capacity={capacity}")
        assert (found["computed_tokens"], found["calls"]["most"]) == (12, num_calls)
    # Groups begin with the same token, which is computed once: 6 + 4 - 1.
    for capacity, num_calls in ((9, 1), (8, 2)):
        found = page(monkeypatch, trees, "--ranks=1", "--all-rows", f"--capacity={capacity}")
        assert (found["computed_rows"], found["calls"]["most"]) == (4, num_calls)


def test_a_team_is_one_rank_to_the_plan(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two rows of a, 5 and 4 tokens that share 3, are a rank's each, or a team's: 6 tokens on two ranks."""
    alone, team = (page(monkeypatch, trees, "--ranks=2", f"--team={size}") for size in (1, 2))
    assert (alone["ranks"], team["ranks"]) == (2, 1)
    assert (alone["imbalance"], team["imbalance"]) == (pytest.approx(5 / 4.5, rel=1e-3), 1)
    assert (alone["lost_tokens"], team["lost_tokens"]) == (3, 0)
    assert team["update"]["over_even"] == pytest.approx(1)
    assert team["update"]["seconds"] == pytest.approx(3, rel=1e-3)


def test_rows_of_other_roles_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of b is alone in its role, so its reward teaches."""
    found = page(monkeypatch, store(tmp_path / "roles.parquet", ("planner", "solver")), "--ranks=1")
    assert (found["leaves"], found["computed_rows"]) == (4, 4)


def test_a_run_that_fails_too_often_is_told(
    trees: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = ("--mtbf-hours=0.1", "--checkpoint-minutes=30", "--restart-minutes=6", "--save-seconds=60")
    page(monkeypatch, trees, "--ranks=1", *failures)
    # 1 / 30 + 15 / 6 + 6 / 6
    assert "nothing is left: the loss is 353%; take fewer ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "--ranks 0: give 1 or more"),
        ({"capacity": 1}, "--capacity 1: give 2 or more"),
        ({"ranks": 6, "pipeline": 4}, "--ranks 6 --pipeline 4: .* give a multiple"),
        ({"ranks": 6, "team": 4}, "--ranks 6 --team 4: .* give a multiple"),
        ({"team": 2, "pipeline": 2}, "--team 2 --pipeline 2: .* give one of them"),
        ({"gpu": "H200"}, "--gpu H200 --model None: .* give the other"),
        ({"mtbf_hours": 5.0}, "--checkpoint-minutes, --restart-minutes, --save-seconds: missing"),
        ({"mtbf_hours": 0.0}, "--mtbf-hours 0.0: give a finite number above 0"),
        ({"save_seconds": float("nan")}, "--save-seconds nan: give a finite number above 0"),
        ({"trees": ("none.parquet",)}, "--trees none.parquet: there is no such file"),
    ],
)
def test_what_cannot_be_is_refused(trees: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Question(**{"trees": (str(trees),), "ranks": 8, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mini-batches=3",), "--mini-batches 3 of 2 prompts: give at most so many"),
        (("--gpu=H200", "--model=none"), "--model none: give a decoder of equal layers"),
    ],
)
def test_a_step_that_cannot_be_planned_is_refused(
    trees: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        page(monkeypatch, trees, "--ranks=1", *options)


def test_a_page_needs_trees_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scale.py", "--ranks=8"])
    with pytest.raises(SystemExit, match="--ranks: a page needs --trees FILE and --ranks N"):
        scale.main()
