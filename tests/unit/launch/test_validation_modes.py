"""Settings of the trainer modes that cannot work are refused, each with its remedy; what may work is warned of."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("verl")

from input_cases import resolved

from verl_tree.launch.checks import find, modes
from verl_tree.launch.checks.refusals import Finding

ROLLOUT, CORRECTION = "actor_rollout_ref.rollout", "algorithm.rollout_correction"
COLOCATE = ["trainer.v1.trainer_mode=colocate_async"]
ENGINE = f"{ROLLOUT}.checkpoint_engine"
SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"{ROLLOUT}.nnodes=1",
    f"{ROLLOUT}.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_gpus=2",
    f"{ENGINE}.backend=mine",
    f"{ENGINE}.custom_backend_module=json",
]
DROP = "trainer.v1.sampler.max_off_policy_strategy=drop"
NO_THRESHOLD = "trainer.v1.sampler.max_off_policy_threshold=null"


def findings(*overrides: str) -> list[Finding]:
    """Return what the checks of this module find."""
    config = resolved(*overrides)
    return [finding for check in modes.CHECKS for finding in check(config)]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        COLOCATE,
        SEPARATE,
        [*SEPARATE, "actor_rollout_ref.hybrid_engine=false"],
        [DROP, NO_THRESHOLD],
        [*COLOCATE, NO_THRESHOLD, f"{CORRECTION}.rollout_is=token"],
        [*COLOCATE, f"{CORRECTION}.bypass_mode=true"],
    ],
    ids=lambda overrides: " ".join(overrides)[-60:],
)
def test_settings_that_work(overrides: list[str]) -> None:
    """A synchronous run never has old rows, whatever the sampler is told."""
    assert findings(*overrides) == []
    assert list(find(resolved(*overrides))) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            [*SEPARATE, "data.train_batch_size=4"],
            ["data.train_batch_size=4", "parameter_sync_step=2 x", "ppo_mini_batch_size=4"],
        ),
        ([*SEPARATE, f"{ROLLOUT}.nnodes=0"], [f"{ROLLOUT}.nnodes=0", "at least 1"]),
        ([*SEPARATE, f"{ROLLOUT}.n_gpus_per_node=0"], ["n_gpus_per_node=0", "at least 1"]),
        ([*SEPARATE, "ray_kwargs.ray_init.num_gpus=1"], ["num_gpus=1", "needs 1 and the rollout 1 more"]),
        ([*SEPARATE, f"{ENGINE}.custom_backend_module=no_such_module"], ["=no_such_module", "imported"]),
        ([*SEPARATE, f"{ENGINE}.custom_backend_module=no.such.module"], ["=no.such.module", "imported"]),
        (
            [*SEPARATE, f"{ENGINE}.backend=carrier_pigeon", f"{ENGINE}.custom_backend_module=null"],
            ["backend=carrier_pigeon", "registered backends", "naive"],
        ),
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], ["=2: a replica takes 2 ranks", "trainer.nnodes", "=1"]),
        ([f"{ROLLOUT}.tensor_model_parallel_size=0"], ["=0: a replica takes 0 ranks"]),
        (
            [*SEPARATE, "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.data_parallel_size=2"],
            ["a replica takes 2 ranks", f"{ROLLOUT}.nnodes x {ROLLOUT}.n_gpus_per_node=1"],
        ),
    ],
    ids=lambda value: value[-1][-50:],
)
def test_settings_that_cannot_work_are_refused(overrides: list[str], parts: list[str]) -> None:
    (finding,) = findings(*overrides)
    assert not finding.is_warning
    for part in parts:
        assert part in finding.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about GPUs from a machine without one")
def test_an_engine_for_gpus_is_only_warned_of_where_there_are_none() -> None:
    nccl = [*SEPARATE, f"{ENGINE}.backend=pigeon", f"{ENGINE}.custom_backend_module=null", "trainer.device=cuda"]
    (finding,) = findings(*nccl)
    assert finding.is_warning
    assert f"{ENGINE}.backend=pigeon" in finding.message
    assert "no CUDA device" in finding.message


def test_a_pool_of_its_own_need_not_hold_what_the_trainers_ranks_hold() -> None:
    """Replicas of two ranks on two ranks of their own; the trainer has one rank."""
    alone = [*SEPARATE, "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.n_gpus_per_node=2"]
    two = [f"{ROLLOUT}.tensor_model_parallel_size=2", "ray_kwargs.ray_init.num_gpus=3"]
    assert findings(*alone, *two) == []
    (finding,) = findings(*alone, *two, "actor_rollout_ref.hybrid_engine=true")
    assert "trainer.nnodes x trainer.n_gpus_per_node=1" in finding.message


@pytest.mark.parametrize("mode", [COLOCATE, SEPARATE], ids=["colocate", "separate"])
@pytest.mark.parametrize(
    ("override", "parts"),
    [(DROP, ["drop", "8 weight syncs", "wait"]), (NO_THRESHOLD, ["max_off_policy_threshold=None", "rollout_is=token"])],
)
def test_old_rows_are_warned_of(mode: list[str], override: str, parts: list[str]) -> None:
    (finding,) = findings(*mode, override)
    assert finding.is_warning
    for part in parts:
        assert part in finding.message


def test_the_module_of_a_checkpoint_engine_is_looked_for_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pigeon_engine.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert findings(*SEPARATE, f"{ENGINE}.custom_backend_module=pigeon_engine") == []
    assert "pigeon_engine" not in sys.modules
