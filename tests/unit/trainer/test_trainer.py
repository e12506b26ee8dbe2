"""What the trainer is before there is a cluster: its registrations, workers, prompts and watched validation."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import numpy as np
from omegaconf import DictConfig
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.skip.base_skip import SKIP_REGISTRY

from rollout_hooks.capture.report import CaptureReport, FailedSession
from rollout_hooks.worker import TreeAgentLoopManager
from verl_tree.launch.command.composition import compose_config
from verl_tree.records import read_trees
from verl_tree.trainer.advantages import ESTIMATORS
from verl_tree.trainer.detach_worker import TreeDetachActorWorker
from verl_tree.trainer.hybrid_worker import TreeActorRolloutRefWorker
from verl_tree.trainer.modes import TREE_TRAINERS, TreePPOTrainerSync
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError
from verl_tree.trainer.rows.replay import TreeRolloutSkip
from verl_tree.trainer.rows.replay_buffer import (
    POLL_INTERVAL_S,
    TreeReplayBuffer,
    TreeReplayBufferAsync,
    WatchedBuffer,
)
from verl_tree.trainer.worker import TreeTrainingWorker


def config_of(*overrides: str) -> DictConfig:
    """Compose the configuration of a CPU run."""
    return compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused", *overrides])


def test_a_trainer_registers_what_its_process_needs() -> None:
    trainer = TreePPOTrainerSync(config_of())
    assert get_adv_estimator_fn("tree_grpo") is ESTIMATORS["tree_grpo"]
    assert SKIP_REGISTRY["rollout_tq"] is TreeRolloutSkip
    assert trainer.replay_buffer.poll_interval == POLL_INTERVAL_S
    assert trainer.trainer_mode == "sync"


def test_roles_that_no_leaf_has_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    trainer = TreePPOTrainerSync(config_of("tree.role_weight={planer: 0.5, worker: 1}"))
    weights = trainer.config.tree.role_weight
    for known in (["worker", "planner", "worker"], [], ["planner"]):
        trainer._tell_unknown_roles(weights, known=known)
    (told,) = [each.getMessage() for each in caplog.records if "role_weight" in each.getMessage()]
    assert told == "tree.role_weight names planer, which no leaf has so far; leaves have the roles planner, worker"
    caplog.clear()
    other = TreePPOTrainerSync(config_of("tree.role_weight={worker: 1}"))
    other._tell_unknown_roles(other.config.tree.role_weight, known=["worker"])
    assert not [each for each in caplog.records if "role_weight" in each.getMessage()]


SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]
MODES = {"sync": [], "colocate_async": ["trainer.v1.trainer_mode=colocate_async"], "separate_async": SEPARATE}


@pytest.mark.parametrize(
    ("override", "leaves_out"),
    [
        ("tree.compute=live", True),
        ("tree.compute=all", False),
        ("tree.enabled=false", False),
        ("algorithm.adv_estimator=grpo", True),
        ("algorithm.adv_estimator=gigpo", False),
        ("algorithm.use_kl_in_reward=true", False),
        ("actor_rollout_ref.actor.use_kl_loss=true", False),
    ],
)
def test_ranks_are_even_in_what_an_update_computes(override: str, leaves_out: bool) -> None:
    assert TreePPOTrainerSync(config_of(override))._leaves_out_rows == leaves_out


@pytest.mark.parametrize(("mode", "overrides"), MODES.items())
def test_every_mode_has_a_trainer_with_our_buffer(mode: str, overrides: list[str]) -> None:
    trainer = TREE_TRAINERS[mode](config_of(*overrides))
    assert trainer.trainer_mode == mode
    assert isinstance(trainer, TRAINER_REGISTRY[mode])
    assert type(trainer.replay_buffer) is (TreeReplayBuffer if mode == "sync" else TreeReplayBufferAsync)
    assert trainer.replay_buffer.refill_fn == trainer._add_prompts_to_generate
    assert trainer.replay_buffer.poll_interval == POLL_INTERVAL_S


def test_a_sampler_of_the_users_own_stays(tmp_path: Path) -> None:
    imported = "from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync"
    (tmp_path / "sampler.py").write_text(f"{imported}\n\n\nclass Mine(ReplayBufferAsync):\n    pass\n")
    sampler = "trainer.v1.sampler.custom_sampler"
    config = config_of(*MODES["colocate_async"], f"{sampler}.path={tmp_path}/sampler.py", f"{sampler}.name=Mine")
    assert type(TREE_TRAINERS["colocate_async"](config).replay_buffer).__name__ == "Mine"


@pytest.mark.parametrize("overrides", [[], ["actor_rollout_ref.actor.use_kl_loss=true"]], ids=["actor", "reference"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_separate_workers_can_save_and_restore_the_policy(overrides: list[str], hybrid: bool) -> None:
    trainer = TREE_TRAINERS["separate_async"](
        config_of(*SEPARATE, f"actor_rollout_ref.hybrid_engine={str(hybrid).lower()}", *overrides)
    )
    trainer._init_resource_pool_mgr()
    classes = [worker.__ray_metadata__.modified_class for worker in trainer.role_worker_mapping.values()]
    assert len(classes) == (1 if hybrid else 1 + len(overrides))
    assert all(issubclass(each, TreeDetachActorWorker) for each in classes)


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], {Role.ActorRollout: TreeActorRolloutRefWorker}),
        (["actor_rollout_ref.actor.use_kl_loss=true"], {Role.ActorRolloutRef: TreeActorRolloutRefWorker}),
        (
            ["algorithm.adv_estimator=gae"],
            {Role.ActorRollout: TreeActorRolloutRefWorker, Role.Critic: TreeTrainingWorker},
        ),
    ],
    ids=["actor", "reference", "critic"],
)
def test_every_role_runs_on_our_worker(overrides: list[str], roles: dict[Role, type]) -> None:
    trainer = TreePPOTrainerSync(config_of(*overrides))
    trainer._init_resource_pool_mgr()
    # Ray wraps the class in a subclass of its own.
    classes = {role: worker.__ray_metadata__.modified_class for role, worker in trainer.role_worker_mapping.items()}
    assert set(classes) == set(roles)
    assert all(issubclass(classes[role], worker) for role, worker in roles.items())


def test_uids_sort_in_the_order_in_which_prompts_were_drawn() -> None:
    trainer = TreePPOTrainerSync(config_of())
    prompts = [{"raw_prompt": np.array([f"question {n}" for n in range(3)], dtype=object)} for _ in range(4)]
    trainer.train_dataloader_it = iter(prompts)
    batches = [trainer._fetch_one_gen_batch() for _ in range(4)]
    uids = [uid for batch in batches for uid in batch["uid"]]
    assert uids == sorted(uids)
    assert len(set(uids)) == 12
    assert not any("_" in uid for uid in uids), "verl splits row keys at underscores"
    assert isinstance(batches[0].get("uid"), NonTensorStack), "what verl's agent loop workers index"


class Buffer:
    """A replay buffer without rows."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, float]]:
        self.asked.append(options)
        return KVBatchMeta(partition_id="val", keys=[], tags=[]), {"metric": 1.0}


def trainer_with_buffer(*overrides: str) -> TreePPOTrainerSync:
    trainer = TreePPOTrainerSync(config_of(*overrides))
    trainer.replay_buffer = Buffer()
    trainer.global_steps, trainer.total_training_steps = 5, 10
    return trainer


def test_a_validation_is_watched_while_it_runs_and_its_samples_are_the_buffers_own(tmp_path: Path) -> None:
    trainer = trainer_with_buffer(f"tree.dump_dir={tmp_path}", "tree.show_every=0")
    trainer.tokenizer, trainer.logger = None, SimpleNamespace(logger={})
    buffer = trainer.replay_buffer
    with trainer._log_validation():
        assert trainer.replay_buffer is not buffer
        assert trainer.replay_buffer.sample(batch_size=2)[1] == {"metric": 1.0}
    assert trainer.replay_buffer is buffer
    assert buffer.asked == [{"batch_size": 2}]
    trainer._tree_log.files.wait()
    assert read_trees(tmp_path / "val_000005.parquet") == []


def test_a_validation_that_nobody_looks_at_is_not_watched() -> None:
    trainer = trainer_with_buffer("tree.dump_dir=null", "tree.show_every=0")
    buffer = trainer.replay_buffer
    with trainer._log_validation():
        assert trainer.replay_buffer is buffer


def test_the_buffer_comes_back_when_validation_fails_and_nothing_is_logged(tmp_path: Path) -> None:
    trainer = trainer_with_buffer(f"tree.dump_dir={tmp_path}", "tree.show_every=1")
    buffer = trainer.replay_buffer
    with pytest.raises(RuntimeError, match="no rows"), trainer._log_validation():
        raise RuntimeError("no rows")
    assert trainer.replay_buffer is buffer
    assert list(tmp_path.iterdir()) == []
    assert trainer._tree_log.last_shown == {}


class ReportingManager(TreeAgentLoopManager):
    """A manager without workers, whose report is known."""

    def __init__(self, report: CaptureReport, *, partition: str = "val") -> None:
        self.report = report
        self.partition = partition

    def drain_capture_report(self, partition: str = "train") -> CaptureReport:
        assert partition == self.partition
        return self.report


def test_a_step_without_a_trajectory_says_why_every_session_failed(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_with_buffer()
    told = 'File "agents.py", line 41, in solve'
    failed = tuple(FailedSession("u", session, "KeyError: 'plan'", 1, traceback=told) for session in range(2))
    trainer.agent_loop_manager = ReportingManager(CaptureReport(failed_sessions=failed, failed_prompts=("u",)))
    with pytest.raises(NoTrajectoryError) as error, trainer._explained("val"):
        raise NoTrajectoryError("all sessions of 1 prompts failed")
    assert str(error.value).splitlines() == [
        "step 5 (val): 2 sessions failed; 1 prompts have no trajectory because all their sessions failed",
        "  2 x KeyError: 'plan' (first: u_0)",
        f"      {told}",
    ]
    assert caplog.text == "", "the error says it, as the last lines of the log"
    with pytest.raises(RuntimeError, match="something else"), trainer._explained("val"):
        raise RuntimeError("something else")
    assert "2 x KeyError: 'plan'" in caplog.text


@pytest.mark.parametrize("hidden", [True, False], ids=["the loop hid it", "the session failed"])
def test_a_step_whose_server_died_is_neither_trained_nor_saved(hidden: bool) -> None:
    """What it reports is kept for whoever reports next."""
    trainer = trainer_with_buffer()
    failed = () if hidden else (FailedSession("u", 0, "EngineDeadError: gone", 3, num_rows=2),)
    report = CaptureReport(num_sessions=1, failed_sessions=failed, dead_servers=("EngineDeadError: gone",))
    trainer.agent_loop_manager = ReportingManager(report, partition="train")
    with pytest.raises(RuntimeError, match=r"^step 5: the server of 1 sessions died .*EngineDeadError: gone.*neither"):
        trainer.require_whole()
    trainer.agent_loop_manager = ReportingManager(CaptureReport(num_sessions=2), partition="train")
    assert trainer._drain_report("train").num_sessions == 3
    trainer.require_whole()


def test_a_step_without_a_trajectory_under_another_manager_says_so() -> None:
    trainer = trainer_with_buffer()
    trainer.agent_loop_manager = None
    with pytest.raises(NoTrajectoryError, match=r"^step 5 \(train\): all sessions"), trainer._explained("train"):
        raise NoTrajectoryError("all sessions of 1 prompts failed")


def test_a_sample_is_shown_before_it_is_used() -> None:
    buffer, seen = Buffer(), []
    batch, _ = WatchedBuffer(buffer, on_sample=seen.append).sample(batch_size=1)
    assert seen == [batch]
