"""The benchmark over the overlap ratio: what it counts and compares is right, and it goes on where it was killed."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import por
import por_rows
import por_speeds
import pytest
import report_por
import report_por_figure
import torch
from por_log import Clock
from por_models import SIZES, Counts, model_flops, new_model
from por_paths import Case, NotApplicableError
from por_rows import drawn_rows
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM, Qwen3Config
from tree_cases import relative_error

from verl_tree.records import StoredLeaf, StoredTree, write_trees
from verl_tree.testing.synthetic import star
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

CPU = torch.device("cpu")
FLAT = ("flat/same", "flat/varlen", "flat/sdpa")


def tiny_case(potential_overlap_ratio: float, *, micro_batch_tokens: int = 100) -> Case:
    model = tiny_model("qwen3").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = drawn_rows(potential_overlap_ratio, num_leaves=8, num_flat_tokens=320, vocab_size=model.config.vocab_size)
    return Case(model, rows, micro_batch_tokens=micro_batch_tokens)


@pytest.mark.parametrize(("name", "not_embedded"), [("0.6B", 0.44e9), ("1.7B", 1.4e9), ("4B", 3.6e9), ("8B", 6.95e9)])
def test_models_have_the_published_numbers_of_weights(name: str, not_embedded: float) -> None:
    """The model cards give two numbers: the name's, and that without embeddings."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES[name]))
    in_all = sum(weight.numel() for weight in model.parameters())
    assert in_all == pytest.approx(float(name[:-1]) * 1e9, rel=0.025)
    assert sum(weight.numel() for weight in model.model.layers.parameters()) == pytest.approx(not_embedded, rel=0.01)


def test_counts_and_flops_by_hand() -> None:
    forest = TokenForest.from_sequences([[1, 2, 3], [1, 2, 4, 5]])
    # Tokens 1 2 3 4 5 at positions 0 1 2 2 3; those of 1, 2 and 4 have a child.
    counts = Counts.of_layout(TreeLayout.from_forest(forest))
    assert counts == Counts(num_tokens=5, num_pairs=1 + 2 + 3 + 3 + 4, num_projected=3)
    model = new_model("tiny", dtype=torch.float32, device=CPU, num_layers=1)
    # q and o: 64 x 64; k and v: 64 x 32; MLP: 3 x 64 x 128.
    num_weights = 2 * 4096 + 2 * 2048 + 3 * 8192
    assert model_flops(model, counts) == 6 * num_weights * 5 + 12 * 4 * 16 * 13 + 6 * 64 * 512 * 3


@pytest.mark.parametrize("potential_overlap_ratio", [0, 0.7])
def test_every_path_has_the_gradients_of_the_rows(potential_overlap_ratio: float) -> None:
    case = tiny_case(potential_overlap_ratio)
    want_F, wanted = case.reference()
    assert sum(each.abs().sum() for each in wanted) > 0
    names = ["tree", "heuristic/1.5", "single_path/1", "relay/1", *FLAT]
    names.remove("single_path/1" if potential_overlap_ratio else "relay/1")  # rows of one tree each are not relayed
    for name in names:
        path = case.path(name)
        log_prob_F = path.gradients()
        # The results are kept in float32.
        torch.testing.assert_close(log_prob_F, want_F.to(log_prob_F.dtype), rtol=0, atol=1e-6)
        for got, want in zip(case.gradients(), wanted, strict=True):
            assert relative_error(got, want) <= 1e-10, name


def test_paths_compute_what_they_say() -> None:
    case = tiny_case(0.7)
    longest = int(case.forest.sequence_lens.max())
    tree, packs, relay, flat = (case.path(name) for name in ("tree", "heuristic/1.5", "relay/1.5", "flat/sdpa"))
    assert tree.counts.num_tokens == relay.counts.num_tokens == case.forest.num_tokens == 96
    assert packs.capacity == relay.capacity == int(np.ceil(1.5 * longest))
    assert flat.counts.num_tokens == 320
    assert flat.counts.num_pairs == sum(len(row) * (len(row) + 1) // 2 for row in case.rows.sequences)
    assert flat.counts.num_projected == 320 - 8
    assert tree.num_calls == 1
    assert flat.num_calls >= 4  # micro-batches of at most 100 tokens
    # The heuristic's packs are the optimum of so small a tree.
    for name in ("heuristic/9", "relay/9", "exact/1.5"):
        with pytest.raises(NotApplicableError):
            case.path(name)
    with pytest.raises(ValueError, match="no such path"):
        case.path("trees")


def test_a_short_run_computes_its_first_call_only() -> None:
    case = tiny_case(0.7)
    flat = case.path("flat/same")
    num_scored = (flat.gradients(is_short=True) != 0).sum()
    assert 0 < num_scored <= 100


def test_the_clock_begins_nothing_that_would_end_late() -> None:
    clock = Clock(100)
    assert clock.allows(1e20)  # nothing is known
    clock.ran(1e12, seconds=2)
    assert clock.allows(40e12)
    assert not clock.allows(60e12)
    assert not Clock(0).allows(0)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[dict]:
    """Run the benchmark and return the records that it added."""
    before = len(out.read_text().splitlines()) if out.exists() else 0
    command = ["por.py", "--device", "cpu", "--small", "--out", str(out), "--threads", str(torch.get_num_threads())]
    monkeypatch.setattr(sys, "argv", [*command, *arguments])
    por.main()
    return [json.loads(line) for line in out.read_text().splitlines()[before:]]


def test_it_measures_resumes_and_reports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "por.jsonl"
    # flash-attn-4 is not here, or not for a CPU: such a path is a result, too.
    kernels = ("--flat-kernels", "sdpa,fa4")
    assert [record["kind"] for record in run(monkeypatch, out, *kernels, "--seconds", "0")] == ["environment"]
    records = run(monkeypatch, out, *kernels)[1:]
    timed = {(each["por"], each["path"]) for each in records if each.get("repetition") == 1}
    assert timed == {(0.8, "tree"), (0.8, "flat/sdpa"), (0.8, "heuristic/1.5"), (0.8, "relay/1.5")} | {
        (0.0, path) for path in ("tree", "flat/sdpa")
    }
    not_run = {(each["kind"], each["por"], each["path"]) for each in records if "not_run" in each}
    assert not_run == {
        ("run", 0.8, "flat/fa4"),
        ("run", 0.0, "flat/fa4"),
        ("errors", 0.8, "flat/fa4"),
    }
    for each in records:
        if each["kind"] == "errors" and "not_run" not in each:
            assert 0 < each["gradient_error"] < 1e-5
            assert each["log_prob_max_error"] < 1e-5

    assert len(run(monkeypatch, out, *kernels)) == 1  # nothing is left but to say where it runs
    # A benchmark that was killed while it wrote the last run of a tree:
    lines = out.read_text().splitlines(keepends=True)
    cut = next(number for number, line in enumerate(lines) if '"por": 0.0, "path": "tree", "repetition": 1' in line)
    out.write_text("".join(lines[:cut] + lines[cut + 1 :]) + lines[cut][:40])
    again = run(monkeypatch, out, *kernels)
    assert [each["path"] for each in again if each["kind"] == "run"] == ["tree"]

    with pytest.raises(ValueError, match="--flat-tokens 1024, not 512"):
        run(monkeypatch, out, *kernels, "--flat-tokens", "512")

    monkeypatch.setattr(sys, "argv", ["report_por.py", str(out)])
    capsys.readouterr()
    report_por.main()
    printed = capsys.readouterr().out
    assert "whole trees" in printed
    assert "relay/1.5" in printed


def test_stored_trees_are_rows_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two groups that start alike share no token: 2 x (2 shared + 2 + 1) tree tokens, 14 flat ones."""
    nothing = [float("nan")] * 4
    leaves = (
        StoredLeaf(0, 0, [1, 2, 3, 4], 2, is_trained=[0, 0, 1, 1], log_probs=nothing, token_rewards=[0, 1]),
        StoredLeaf(1, 0, [1, 2, 5], 2, is_trained=[0, 0, 1], log_probs=nothing[:3], token_rewards=[0]),
    )
    stored = tmp_path / "agent.parquet"
    write_trees(stored, [StoredTree(step=0, uid=uid, leaves=leaves) for uid in ("one", "other")])
    arguments = ("--pors", "", "--stored", str(stored), "--flat-kernels", "sdpa")
    records = run(monkeypatch, tmp_path / "por.jsonl", *arguments)[1:]
    assert {(each["trees"], each["por"]) for each in records} == {("agent", 0.286)}
    assert {each["path"]: each["num_tokens"] for each in records} == {"tree": 10, "flat/sdpa": 14}
    assert len(run(monkeypatch, tmp_path / "por.jsonl", *arguments)) == 1


def test_peaks_of_trees_are_their_share_of_flat_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four branches of 64 tokens on a prompt of 64: 512 flat tokens, 320 of the tree; a pack of 1.5 paths holds 192."""
    shape = partial(star, 4, prompt_len=64, branch_len=64)
    monkeypatch.setitem(por_rows.SHAPES, "star", shape)
    arguments = ("--memory", "--models", "0.3M", "--pors", "", "--shapes", "star", "--flat-kernels", "same")
    records = run(monkeypatch, tmp_path / "por.jsonl", *arguments)[1:]
    peaks = por_speeds.measured_peaks(records)
    assert [kind for _, kind in peaks] == ["memory", "checkpointed memory"]
    for paths in peaks.values():
        calls = {path: (each["num_tokens"], each["num_calls"], each["capacity"]) for path, each in paths.items()}
        assert calls == {
            "tree": (320, 1, None),
            "flat/same": (512, 1, 512),
            "heuristic/1.5": (384, 2, 192),
            "relay/1.5": (320, 2, 192),
        }
        for path in ("tree", "heuristic/1.5", "relay/1.5"):
            assert 0.9 < por_speeds.memory_share(paths[path], paths["flat/same"]) < por_speeds.MEMORY_GOAL
        # Keys and values of the prompt: two heads of 16 in four layers, and a gradient each.
        assert paths["relay/1.5"]["store_bytes"] == 64 * (2 * 2 * 16) * 4 * (4 + 4)
    with_activations, without = (paths["tree"]["peak_bytes"] for paths in peaks.values())
    assert without < with_activations / 2
    assert len(run(monkeypatch, tmp_path / "por.jsonl", *arguments)) == 1


def test_the_share_of_a_peak_by_hand(tmp_path: Path) -> None:
    flat = {"peak_bytes": 1000, "num_tokens": 100, "capacity": 100, "store_bytes": 0}
    # 40 of 100 tokens may have 400 bytes; 420 + 8 are there, 8 of them scores.
    tree = {"peak_bytes": 428, "expansion_bytes": 8, "num_tokens": 40, "capacity": None, "store_bytes": 0}
    assert por_speeds.memory_share(tree, flat) == pytest.approx(1.05)
    relay = tree | {"peak_bytes": 328, "capacity": 20, "store_bytes": 100}
    assert por_speeds.memory_share(relay, flat) == pytest.approx(1.1)
    paths = {"tree": tree, "flat/same": flat | {"expansion_bytes": 0}}
    peaks = {(por_speeds.Key("0.3M", "drawn", 0.6), kind): paths for kind in ("memory", "checkpointed memory")}
    assert [row["checkpointing"] for row in report_por.memory_rows(peaks)] == ["no", "yes"]
    report_por_figure.draw_memory(peaks, out=tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def record(potential_overlap_ratio: float, path: str, *, repetition: int, seconds: float, **more: float | str) -> dict:
    sizes = {"num_tokens": 1000, "flops": 1e6, "held_bytes": 2**30, "peak_bytes": None, "mfu": 0.5, "attention": "fa4"}
    run = {"repetition": repetition, "wall_s": seconds, "cpu_s": 1e9}
    point = {"kind": "run", "model": "8B", "trees": "drawn", "por": potential_overlap_ratio, "path": path}
    return {**point, **sizes, **run, **more}


def test_the_report_by_hand(tmp_path: Path) -> None:
    records = [
        {"kind": "environment", "options": {"device": "cuda"}},
        *(record(0.8, "flat/same", repetition=number, seconds=9.0) for number in (1, 2, 3)),
        *(
            record(0.8, "flat/fa4", repetition=number, seconds=seconds)
            for number, seconds in enumerate((99.0, 8, 6, 7))
        ),
        *(record(0.8, "tree", repetition=number, seconds=2.0, num_tokens=200, flops=2.5e5) for number in (1, 2)),
        record(0.9, "tree", repetition=1, seconds=1.0, num_tokens=100, flops=1.25e5, peak_bytes=2**29),
        record(0.8, "heuristic/2", repetition=1, seconds=3.0, num_tokens=400, flops=5e5, capacity=400, num_calls=2),
        record(0.9, "heuristic/2", repetition=0, seconds=0.0, not_run="OutOfMemoryError: 1 GiB"),
    ]
    points = por_speeds.measured_points(records)
    first, second = report_por.whole_trees(points)
    # The fastest flat path takes 7 s, the median without the run that warms up.
    assert (first["POR"], first["tokens"]) == ("0.8", "1000 / 200")
    assert (first["bound"], first["flat/tree"], first["quotient"]) == ("4.00", "3.50", "0.88")
    assert (second["flat s"], second["flat/tree"], second["GiB tree"]) == ("~7.000", "7.00", "1.50")
    packs, not_run = report_por.limited_trees(points)
    # Twice the tree's FLOPs in 3 s: 7 / 3 of a possible 2.
    assert (packs["path"], packs["bound"], packs["flat/path"], packs["path/tree"]) == (
        "heuristic/2",
        "2.00",
        "2.33",
        "1.50",
    )
    assert not_run["s"] == "OutOfMemoryError: 1 GiB"
    engines = {"potential_overlap_ratio": 0.8, "flat_rows": 4, "flop_ratio": 4.0, "cpu_ratio_of_gates": {"auto": 3.0}}
    assert report_por.engine_rows([engines])[0]["quotient"] == "0.75"

    records += [record(0.7, "flat/same", repetition=1, seconds=6.0, trees="memory_qa")]
    records += [record(0.7, "tree", repetition=1, seconds=2.0, flops=2.5e5, trees="memory_qa")]
    points = por_speeds.measured_points(records)
    assert [row["flat/tree"] for row in report_por.whole_trees(points) if row["trees"] == "memory_qa"] == ["3.00"]
    report_por_figure.draw(points, engine_cases=[engines], out=tmp_path / "por.png")
    assert (tmp_path / "por.png").read_bytes().startswith(b"\x89PNG")


def test_the_most_valuable_points_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["por.py", "--out", str(tmp_path / "por.jsonl"), "--flat-kernels", "same,fa4"])
    points = list(por.points(por.parse_options()))
    assert [(each.model, each.por, each.kind) for each in points[:2]] == [("1.7B", 0.8, "run"), ("8B", 0.8, "run")]
    assert points[0].paths == ("tree", "flat/same", "flat/fa4")
    assert [each.kind for each in points[4:8]] == ["errors"] * 4
    assert {each.por for each in points if "flat/fa4" in each.paths} == {0.8}
    every = [(each.model, each.por, path) for each in points if each.kind == "run" for path in each.paths]
    assert len(every) == len(set(every)) == 4 * (6 + 2 + 5 * 2 * 3)
