"""Recipes with a pretrained model as their user starts them: it is made, fine-tuned, answers, and takes two steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import read_metrics
from transformers import AutoTokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def test_an_answer_ends_where_the_models_turn_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "recipes.smollm.prepare", "--cache-dir", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    tokenizer = AutoTokenizer.from_pretrained(made.stdout.strip())
    turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False).endswith(f"a{tokenizer.eos_token}\n")
    assert tokenizer.pad_token == tokenizer.eos_token


@pytest.mark.parametrize(("recipe", "least_score", "least_por"), [("sums", 0.3, 0.3), ("calculator", 0.9, 0.8)])
def test_two_steps(recipe: str, least_score: float, least_por: float, tmp_path: Path) -> None:
    """At first the model knows sums of one digit, and after the fine-tuning products."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    options = ("trainer.total_training_steps=2", "trainer.test_freq=2")
    done = subprocess.run(
        [ROOT / "recipes" / recipe / "run.sh", *options],
        env={**os.environ, "PATH": path, "RUN": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert (tmp_path / "metrics.png").exists()
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert set(steps) == {0, 1, 2}
    validation = {key: value for key, value in steps[0].items() if key.startswith("val-core/")}
    assert validation.keys() == steps[2].keys() & validation.keys()
    assert max(validation.values()) > least_score, validation
    for step in (1, 2):
        assert steps[step]["tree/por"] > least_por
        assert steps[step]["actor/grad_norm"] > 0
        assert steps[step]["training/rollout_probs_diff_max"] < 1e-4
