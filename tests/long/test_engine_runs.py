"""Whole runs on VeOmni and Megatron: one on trees is killed, and verl's own engine repeats its rollouts.

And shorter ones of the asynchronous trainers on both.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import other_engines
import pytest
from async_run import COLOCATE, SEPARATE, check_prompts, read_steps
from family_runs import FAMILIES, check_steps, inputs, make_text
from family_runs import NUM_STEPS as FAMILY_STEPS
from replayed_runs import replaying_options, worst_difference
from tiny_run import make_inputs, run, run_and_kill_driver

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

NUM_STEPS, SAVE_FREQ = 10, 6
"""Four steps lie behind the checkpoint from which the second run goes on; the first one dies right after the last."""
OPTIONS = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.total_training_steps=20",
    f"trainer.save_freq={SAVE_FREQ}",
    "trainer.resume_mode=auto",
)
VEOMNI = (
    "model_engine=veomni",
    "actor_rollout_ref.actor.optim.optimizer=adamw",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
)
EXPERTS = (*VEOMNI, "actor_rollout_ref.actor.veomni.expert_parallel_size=2")
STAGES = (
    "model_engine=megatron",
    "actor_rollout_ref.actor.optim.optimizer=adam",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
)
ROUTES = (*STAGES, "actor_rollout_ref.actor.megatron.router_replay.mode=R2")
LARGEST_KL = 1e-4
"""How far samples may be from the trained weights (`rollout_corr/kl`); a step moves 3e-3, so vLLM has all weights."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen3", VEOMNI, id="Qwen3, VeOmni"),
        pytest.param("qwen3 moe", EXPERTS, id="Qwen3-MoE, VeOmni with experts over ranks"),
        pytest.param("qwen3", STAGES, id="Qwen3, Megatron with two stages"),
        pytest.param("qwen3 moe", ROUTES, id="Qwen3-MoE, Megatron with two stages and replayed routes"),
    ],
)
def test_verls_engine_repeats_what_the_trees_did(
    family: str,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_text(tmp_path, family=family)
    engine = options[0].removeprefix("model_engine=")
    monkeypatch.setenv("PYTHONPATH", str(other_engines.folder_of(engine)), prepend=os.pathsep)
    all_options = (*OPTIONS, *options, *replaying_options(f"{tmp_path}/rollouts", num_steps=NUM_STEPS))
    tree = run_and_kill_driver(tmp_path, "tree", *all_options, after_step=NUM_STEPS)
    tree = {step: metrics for step, metrics in tree.items() if step <= NUM_STEPS}
    assert sorted(tree) == list(range(1, NUM_STEPS + 1))
    assert all(metrics["tree/por"] > 0.4 for metrics in tree.values())
    assert all(abs(metrics["rollout_corr/kl"]) < LARGEST_KL for metrics in tree.values())

    ended = ("tree.enabled=false", f"trainer.total_training_steps={NUM_STEPS}")
    flat = run(tmp_path, "flat", *all_options, *ended, timeout_s=900)
    assert sorted(flat) == list(range(SAVE_FREQ + 1, NUM_STEPS + 1))
    worst = worst_difference({step: tree[step] for step in flat}, flat)
    # AdamW divides by gradients that are almost zero, as in the whole runs on FSDP2.
    assert max(worst.values()) <= 1e-4, worst


@pytest.mark.parametrize("name", [pytest.param("Qwen3-VL", marks=FAMILIES["Qwen3-VL"].marks)])
def test_images_train_on_veomni(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(other_engines.folder_of("veomni")), prepend=os.pathsep)
    with inputs(name, tmp_path) as family:
        options = (*VEOMNI, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.optim.lr=1e-3", *family.options)
        options += ("tree.capacity=64", f"trainer.total_training_steps={FAMILY_STEPS}")
        steps = run(tmp_path, "tree", *options, timeout_s=900)
    check_steps(name, steps)


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate_async", "separate_async"])
@pytest.mark.parametrize(("engine", "optimizer"), [("veomni", "adamw"), ("megatron", "adam")])
def test_asynchronous_trainers_train_whole_groups(
    engine: str, optimizer: str, mode: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(other_engines.folder_of(engine)), prepend=os.pathsep)
    optim = "actor_rollout_ref.actor.optim"
    options = (f"model_engine={engine}", f"{optim}.optimizer={optimizer}", f"{optim}.lr=1e-3")
    options += ("trainer.n_gpus_per_node=2",) if engine == "veomni" else ()
    stored = f"tree.dump_dir={tmp_path}/trees"
    steps = run(tmp_path, "async", *mode, *options, stored, "trainer.total_training_steps=4", "trainer.test_freq=4")
    assert sorted(steps) == [1, 2, 3, 4]
    check_prompts(read_steps(tmp_path, steps))
    assert all(metrics["tree/por"] > 0.4 for metrics in steps.values())
    assert all(metrics["actor/grad_norm"] > 0 for metrics in steps.values())


@pytest.mark.parametrize("engine", ["megatron", "veomni"])
def test_the_stage_of_engines_is_rehearsed(engine: str, tmp_path: Path) -> None:
    """What `scripts/gpu_check.sh engines` runs, on a CPU."""
    out = tmp_path / "records.jsonl"
    asked = ("--engine", engine, "--device", "cpu", "--small", "--out", str(out))
    subprocess.run([sys.executable, "benchmarks/check_engines.py", *asked], check=True)
    record = json.loads(out.read_text())
    assert record["passed"], record
    assert "skipped" not in record
