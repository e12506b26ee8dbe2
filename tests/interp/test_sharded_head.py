"""The fused kernel where FSDP2 frees the head's weight after the forward pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_scores_and_gradients_of_sharded_models_equal_those_of_whole_ones(tmp_path):
    program = ROOT / "tests" / "support" / "sharded_head.py"
    paths = os.pathsep.join([str(ROOT), str(program.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, program, str(rank), tmp_path / "store", tmp_path / "out"], env=environment)
        for rank in range(2)
    ]
    assert [process.wait(timeout=250) for process in ranks] == [0, 0]
    found = json.loads((tmp_path / "out").read_text())
    assert found["calls"] == ["Parameter"] * 4  # two models, whole and sharded, all with a plain weight
    assert {"qwen3 scores", "qwen3 lm_head.weight", "granite lm_head.weight"} < found["errors"].keys()
    assert max(found["errors"].values()) < 1e-5, found["errors"]
