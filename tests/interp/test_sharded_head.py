"""The fused kernel on two ranks: where FSDP2 frees the head's weight after the forward pass, and in teams."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_two_ranks(program, tmp_path):
    """Run a program of tests/support on two ranks, which write to `out` of the folder."""
    program = ROOT / "tests" / "support" / program
    paths = os.pathsep.join([str(ROOT), str(program.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), tmp_path / "store", tmp_path / "out"], env=environment)
        for rank in range(2)
    ]
    assert [process.wait(timeout=250) for process in ranks] == [0, 0]


def test_scores_and_gradients_of_sharded_models_equal_those_of_whole_ones(tmp_path):
    run_two_ranks("sharded_head.py", tmp_path)
    found = json.loads((tmp_path / "out").read_text())
    assert found["calls"] == ["Parameter"] * 4  # two models, whole and sharded, all with a plain weight
    assert {"qwen3 scores", "qwen3 lm_head.weight", "granite lm_head.weight"} < found["errors"].keys()
    assert max(found["errors"].values()) < 1e-5, found["errors"]


def test_teams_and_sections_score_as_on_the_chunked_path(tmp_path):
    """Loss and gradients, of packs and sections, of a rank by itself and of two ranks that compute each call."""
    run_two_ranks("fused_calls.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"out{rank}").read_text())
        assert len(found) == 8
        for name, result in found.items():
            assert result["error"] < 1e-5, name
            num_calls = result["fused"]["model"]
            assert num_calls > (4 if "relay" in name else 0), name
            assert result["fused"] == {"model": num_calls, "kernel": num_calls}, name
            assert result["both"] == {"model": 2 * num_calls, "kernel": num_calls}, name
