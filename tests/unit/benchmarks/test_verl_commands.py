"""How the launch commands of verl's examples are collected and sorted, and the tables that docs/from_verl.md shows."""

import re
from pathlib import Path

import pytest
from verl_commands import Command, Outcome, judge, keys_of, read, record, table_of_folders, table_of_keys

ROOT = Path(__file__).parents[3]
PPO = "verl.trainer.main_ppo"
SCRIPT = """#!/usr/bin/env bash
set -xeuo pipefail
DEVICE=$(python3 -c 'import no_such_package' 2>/dev/null && echo npu || echo gpu)
mkdir -p MADE
rm -rf KEPT
nvidia-smi
wget http://localhost/data
python3 prepare.py
OPTIONS=(trainer.experiment_name=$(basename "$0" .sh)_${DEVICE} "trainer.logger=['console', 'wandb']")
python3 -m verl.trainer.main_ppo "${OPTIONS[@]}" trainer.default_local_dir=$PWD/runs "$@"
torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer optim.lr=1e-5
"""


def test_only_commands_are_recorded(tmp_path: Path) -> None:
    """The script makes, removes and fetches nothing, and its settings are those of a shell."""
    script = tmp_path / "examples" / "some_trainer" / "run_small.sh"
    script.parent.mkdir(parents=True)
    made, kept = tmp_path / "made", tmp_path / "kept"
    kept.mkdir()
    script.write_text(SCRIPT.replace("MADE", str(made)).replace("KEPT", str(kept)))
    name = "some_trainer/run_small.sh"
    arguments = ("trainer.experiment_name=run_small_gpu", "trainer.logger=['console', 'wandb']")
    assert list(record(tmp_path)) == [
        Command(name, PPO, (*arguments, "trainer.default_local_dir=verl/runs")),
        Command(name, "verl.trainer.sft_trainer", ("optim.lr=1e-5",)),
    ]
    assert kept.exists()
    assert not made.exists()


def test_what_becomes_of_a_command() -> None:
    """The files of an example are not here, which is not asked."""
    known = ("trainer.n_gpus_per_node=8", "data.train_files=/no/such/file.parquet")
    same = judge(Command("a/run.sh", PPO, known))
    assert (same.translated, same.refused, same.kind) == ((), (), "as it is")
    fused = judge(Command("a/run.sh", PPO, (*known, "actor_rollout_ref.model.use_fused_kernels=True")))
    assert fused.kind == "translated"
    assert keys_of(fused.translated) == [f"actor_rollout_ref.{role}.use_fused_kernels" for role in ("model", "actor")]
    other = judge(Command("b/run.sh", PPO, (*known, "model_engine=torchtitan")))
    assert (other.kind, other.engine) == ("another engine", "torchtitan")
    assert keys_of(other.refused) == ["model_engine"]
    misspelt = judge(Command("b/run.sh", PPO, ("trainer.n_gpu=8",)))
    assert keys_of(misspelt.refused) == ["trainer.n_gpu"]
    tuning = judge(Command("c/run.sh", "verl.trainer.sft_trainer", ("no.such=key",)))
    assert tuning == Outcome("c/run.sh", "verl.trainer.sft_trainer")


def test_tables_by_hand() -> None:
    outcomes = [
        Outcome("b/1.sh", PPO, translated=("x.a=1, x.b=2: off",)),
        Outcome("b/2.sh", PPO, translated=("x.a=3: off",), refused=("y=2: no", "z=1: no")),
        Outcome("b/5.sh", PPO, "veomni", refused=("y=3: no",)),
        Outcome("a/3.sh", PPO),
        Outcome("a/4.sh", "verl.trainer.sft_trainer"),
    ]
    assert [list(row.values()) for row in table_of_folders(outcomes)] == [
        ["a", "1", "1", "0", "0", "0", ""],
        ["b", "3", "0", "1", "1", "1", "`y` 1"],
        ["all", "4", "1", "1", "1", "1", "`y` 1"],
    ]
    assert [list(row.values()) for row in table_of_keys(outcomes, "translated")] == [["`x.a`", "1"], ["`x.b`", "1"]]
    assert [list(row.values()) for row in table_of_keys(outcomes, "refused")] == [["`y`", "2"], ["`z`", "1"]]


@pytest.mark.parametrize(("name", "data"), [("examples", "verl_commands.jsonl"), ("recipes", "verl_recipes.jsonl")])
def test_the_page_shows_what_was_recorded(name: str, data: str) -> None:
    _, *counts, reasons = table_of_folders(read(ROOT / "docs" / "benchmarks" / "data" / data))[-1].values()
    # The page says in words what is no key of a setting; those come last.
    keys = [each for each in reasons.split(", ") if re.fullmatch(r"`\w+(\.\w+)+` \d+", each)]
    assert reasons.startswith(", ".join(keys))
    assert f"| {' | '.join([name, *counts, ', '.join(keys)])}" in (ROOT / "docs" / "from_verl.md").read_text()
