"""verl 0.9.1 as the trainer, the advantages, the padding and the replay rely on it.

A failure here after an upgrade of verl names the seam that moved; the modules named in the tests then need a look.
"""

import inspect
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base, trainer_separate_async
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.skip import rollout_skip

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.modes import TREE_TRAINERS, TreePPOTrainerSeparateAsync, TreePPOTrainerSync
from verl_tree.trainer.pools import TRAINING
from verl_tree.trainer.rows.padding import shorten
from verl_tree.trainer.starts.resumable import DUMP_KEYS, ResumableTrainer
from verl_tree.trainer.teacher import TeacherOnRanks
from verl_tree.trainer.trainer import TreeTrainer

STEP = (
    "_balance_batch",
    "_compute_old_log_prob",
    "_compute_values",
    "_compute_advantage",
    "_update_critic",
    "_update_actor",
)
METHODS = [
    (ours, name)
    for ours in (TreeTrainer, TeacherOnRanks, ResumableTrainer)
    for name, value in vars(ours).items()
    if inspect.isfunction(value) and name != "__init__"
]


def parameters_of(function: Callable) -> list[str]:
    """Return the names of all parameters."""
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("mode", TREE_TRAINERS)
@pytest.mark.parametrize(("ours", "name"), METHODS)
def test_an_override_overrides_something_with_the_same_parameters_and_nothing_else_does(
    ours: type, name: str, mode: str
) -> None:
    method, theirs = vars(ours)[name], trainer_base.TRAINER_REGISTRY[mode]
    # `TreeTrainer` has methods of `ResumableTrainer`, too.
    overridden = [getattr(base, name) for base in (theirs, *ours.__bases__) if hasattr(base, name)]
    assert bool(overridden) == getattr(method, "__override__", False), "verl would call ours unnoticed"
    assert all(parameters_of(method) == parameters_of(each) for each in overridden)


class TracedTrainer(PPOTrainerSync):
    """verl's trainer with one row and without workers; it notes what its step calls."""

    def __init__(self) -> None:
        self.config = compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])
        self.global_steps, self.use_critic, self.use_reference_policy = 1, True, False
        self.called: list[str] = []
        self.replay_buffer = self
        self.reward_loop_manager = self
        self.reward_loop_worker_handles = ()

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, float]]:
        assert set(options) == {"global_steps", "partition_id", "batch_size"}
        return KVBatchMeta(keys=["u_0_0"], tags=[{}], partition_id="train", extra_info={}), {}

    def on_sample_end(self) -> None:
        """There is no rollout to put to sleep."""

    def _note(self, name: str, batch: KVBatchMeta, *, metrics: dict[str, float]) -> KVBatchMeta:
        assert metrics == {}
        self.called.append(name)
        return batch

    def __getattribute__(self, name: str) -> Any:
        if name in STEP:
            return partial(self._note, name)
        return super().__getattribute__(name)


def test_a_step_calls_the_overridden_methods_in_this_order() -> None:
    """The plan and the rows of a step are made by the first and read by the others."""
    trainer = TracedTrainer()
    trainer._step_once({}, {}, sample_batch_size=1)
    assert trainer.called == list(STEP)


class Workers:
    """A worker group that has trained."""

    def update_actor(self, batch: KVBatchMeta) -> dict[str, dict[str, list[float]]]:
        self.extra_info = dict(batch.extra_info)
        return {"metrics": {"mfu": [0.0], "tree/por": [0.5]}}

    def train_mini_batch(self, batch: KVBatchMeta) -> "Workers":
        self.update_actor(batch)
        return self

    def get(self) -> dict[str, dict[str, list[float]]]:
        return {"metrics": {"mfu": [0.0]}}


def test_an_update_sends_what_extra_info_holds_and_names_the_actors_metrics() -> None:
    trainer = TracedTrainer()
    trainer.actor_rollout_wg = trainer.critic_wg = Workers()
    for update in (PPOTrainerSync._update_actor, PPOTrainerSync._update_critic):
        plan = {"mini_batch_rows": ((1,),), "mini_batch_num_rows": (1,)}
        metrics: dict[str, float] = {}
        batch = KVBatchMeta(keys=["u_0_0"], tags=[{}], partition_id="train", extra_info=dict(plan))
        update(trainer, batch, metrics)
        sent = trainer.actor_rollout_wg.extra_info
        assert {name: sent[name] for name in plan} == plan
        assert {"epochs", "seed", "dataloader_kwargs"} <= set(sent), "what TreeTrainingWorker reads"
        if update is PPOTrainerSync._update_actor:
            assert metrics["actor/tree/por"] == 0.5


def test_the_trainer_registry_refuses_a_second_class_so_the_task_runner_assigns() -> None:
    assert trainer_base.TRAINER_REGISTRY["sync"] is PPOTrainerSync
    with pytest.raises(ValueError, match="already registered"):
        trainer_base.register_trainer("sync")(TreePPOTrainerSync)
    runner = TaskRunnerV1.__ray_metadata__.modified_class
    assert parameters_of(runner.run)[:2] == ["self", "config"]  # Ray appends its own
    assert parameters_of(run_ppo) == ["config", "task_runner_class"]


def test_dispatch_info_is_queried_per_mesh() -> None:
    # Bound to every worker group by name.
    assert parameters_of(Worker._query_dispatch_info)[:2] == ["self", "mesh_name"]


def test_padding_template_has_the_fields_that_are_shortened() -> None:
    source = {
        "prompts": torch.arange(5),
        "position_ids": torch.arange(9),
        "routed_experts": torch.ones(9, 2, 3),
        "teacher_ids": torch.ones(9, 4),
        "uid": "u",
    }
    row, tag = padding_utils.construct_minimal_padding_template(source, {"seq_len": 9}, eos_token_id=7)
    length = padding_utils.SYNTHETIC_PADDING_SEQ_LEN
    by_token = {name for name, value in row.items() if isinstance(value, torch.Tensor) and len(value) == length}
    assert by_token == {"input_ids", "attention_mask", "position_ids", "routed_experts", "teacher_ids"}
    by_response = {name for name, value in row.items() if isinstance(value, torch.Tensor) and len(value) == 1}
    assert by_response == {"responses", "response_mask", "loss_mask", "rm_scores", "rollout_log_probs"}
    assert len(row["prompts"]) == length - 1
    assert tag["is_padding"] is True

    short, short_tag = shorten(row, tag)
    assert {name: len(short[name]) for name in by_token} == dict.fromkeys(by_token, 2)
    assert len(short["prompts"]) == 1
    assert (short_tag["prompt_len"], short_tag["response_len"], short_tag["seq_len"]) == (1, 1, 2)


class _NoSetup(trainer_base.PPOTrainer):
    """Stands between verl's separate trainer and its base; it starts nothing."""

    def _setup(self) -> None:
        self.llm_server_manager = SimpleNamespace(rollout_replicas=[])


class _SetUpTheirs(PPOTrainerSeparateAsync, _NoSetup):
    pass


class _SetUpOurs(TreePPOTrainerSeparateAsync, _NoSetup):
    pass


def set_up(trainer_class: type, patch: pytest.MonkeyPatch) -> Any:
    """Run `_setup` of a separate trainer without hybrid replicas; no server starts."""
    servers = SimpleNamespace(get_replicas=list, server_addresses=[])
    patch.setattr(trainer_separate_async.LLMServerManager, "create", lambda **_: servers)
    trainer = object.__new__(trainer_class)
    trainer.config = compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])
    trainer.config.actor_rollout_ref.rollout.checkpoint_engine.backend = "naive"
    trainer._enable_hybrid_replicas, trainer.actor_rollout_wg = False, None
    trainer._setup()
    return trainer


def test_without_hybrid_replicas_verls_setup_fails_at_a_log_message_and_ours_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the first part fails, verl has mended it: `TreePPOTrainerSeparateAsync._setup` can go."""
    with pytest.raises(TypeError, match="flush"):
        set_up(_SetUpTheirs, monkeypatch)
    level = trainer_separate_async.logger.level
    trainer = set_up(_SetUpOurs, monkeypatch)
    assert trainer.current_mode is trainer_separate_async.HybridEngineMode.TRAINER, "what verl does before the message"
    assert trainer_separate_async.logger.level == level


def test_a_detached_worker_restores_what_its_handlers_saved() -> None:
    """Two strategies are known by name, and what was saved is unpacked for them; ours is not."""
    worker = object.__new__(DetachActorWorker)
    restored: list[tuple[Any, ...]] = []
    worker._strategy_handlers = (lambda module: (module, "spec"), lambda *saved: restored.append(saved))
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module="module"))
    for strategy in ("fsdp2", "fsdp_tree"):
        worker.config = SimpleNamespace(actor=SimpleNamespace(strategy=strategy))
        worker.save_model_to_cpu(0)
        assert worker.cpu_saved_models == {0: ("module", "spec")}
        worker.restore_model_from_cpu(0)
        worker.clear_cpu_model(0)
        assert worker.cpu_saved_models == {}
    assert restored == [("module", "module", "spec"), ("module", ("module", "spec"))]
    worker._strategy_handlers = None
    with pytest.raises(NotImplementedError, match="fsdp_tree"):
        worker._get_strategy_handlers()


def test_old_log_probs_of_later_updates_come_from_the_saved_policy() -> None:
    """Update 0 saves; update 1 saves the current weights, goes back to those of update 0, and returns."""
    calls: list[tuple[str, int]] = []

    class Group:
        def __getattr__(self, name: str) -> Callable[[int], None]:
            return lambda n: calls.append((name, n))

    class Base(trainer_base.PPOTrainer):
        def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:  # noqa: ARG002
            calls.append(("compute", self.local_trigger_step))
            return batch

    class Trainer(PPOTrainerSeparateAsync, Base):
        pass

    trainer = object.__new__(Trainer)
    trainer.config = compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])
    trainer.actor_rollout_wg = Group()
    for trainer.local_trigger_step in (0, 1):
        trainer._compute_old_log_prob(None, {})
    assert calls == [
        ("save_model_to_cpu", 0),
        ("compute", 0),
        ("save_model_to_cpu", 1),
        ("restore_model_from_cpu", 0),
        ("compute", 1),
        ("restore_model_from_cpu", 1),
        ("clear_cpu_model", 1),
    ]


@pytest.mark.parametrize("buffer_class", [ReplayBuffer, ReplayBufferAsync])
def test_a_replay_buffer_keeps_its_settings_under_their_names(buffer_class: type[ReplayBuffer]) -> None:
    trainer = TreePPOTrainerSync(compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"]))
    buffer = buffer_class(
        trainer_mode="sync",
        trainer_config=trainer.config.trainer.v1.sync,
        max_off_policy_threshold=3,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
    )
    assert set(parameters_of(ReplayBuffer)) <= set(vars(buffer))
    assert parameters_of(buffer_class) == parameters_of(ReplayBuffer)


def test_prompts_are_sampled_by_step_and_the_sort_is_stable() -> None:
    buffer = ReplayBuffer("sync", {}, None, "drop", {})
    buffer.prompt_global_steps["train"] = {"a": 2, "b": 1, "c": 2, "d": 1}
    uids, _, _ = buffer._select_prompt_uids("train", ["c", "d", "a", "b"], 3)
    assert uids == ["d", "b", "c"]


def test_a_buffer_waits_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verl_tree.trainer.rows.replay_buffer` looks while it waits, and notes what is waited for and what is there."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    buffer = ReplayBuffer("sync", {}, None, "drop", {}, poll_interval=12.5)
    assert buffer._wait_for_next_poll("train", now := time.time()) == now
    assert slept == [12.5]
    assert parameters_of(ReplayBuffer.sample) == ["self", "global_steps", "partition_id", "batch_size"]
    waits = ["self", "global_steps", "partition_id", "target_count"]
    assert parameters_of(ReplayBufferAsync.wait_for_sampleable) == waits
    buffer.finished_keys["train"], buffer.failure_keys["train"] = {"a", "b"}, {"c"}
    assert buffer._sampleable_terminal_keys("train", ({"a"}, set(), set(), Counter())) == {"b", "c"}
    assert "self._sync_metadata_from_transfer_queue()" in inspect.getsource(ReplayBuffer.sample)


def test_ranks_of_a_pool_may_ask_for_a_resource_of_one_node() -> None:
    pool = RayResourcePool([2, 2])
    assert (pool.store, pool.accelerator_type) == ([2, 2], None)
    assert "bundle[self.accelerator_type] = 1e-4" in inspect.getsource(RayResourcePool.get_placement_groups)
    manager = ResourcePoolManager({TRAINING: [2]}, {})
    assert 'global_pool_id = "global_pool"' in inspect.getsource(trainer_base.PPOTrainer._init_resource_pool_mgr)
    assert list(manager.resource_pool_spec) == [TRAINING]


def test_generations_are_written_to_a_file_named_by_the_step(tmp_path: Path) -> None:
    columns = ["inputs", "outputs", "gts", "scores", "reward_extra_infos_dict", "dump_path"]
    assert parameters_of(PPOTrainerSync._write_generations) == [*columns, "global_steps"]
    assert parameters_of(PPOTrainerSync._dump_generations) == ["self", *columns]
    PPOTrainerSync._write_generations(["in"], ["out"], [None], [0.5], {}, str(tmp_path), 3)
    assert [each.name for each in tmp_path.iterdir()] == ["3.jsonl"]
    for key in DUMP_KEYS:
        assert f'config.trainer.get("{key}", None)' in inspect.getsource(trainer_base.PPOTrainer)


def test_the_store_of_rollouts() -> None:
    store = rollout_skip.RolloutTqSkip
    expected = ["self", "step", "new_prompt_uids", "n", "global_steps", "partition_id"]
    assert parameters_of(store.load_dump_data) == expected
    assert parameters_of(store._resolve_load_step_v1) == ["self", "step"]
    assert parameters_of(store._get_v1_inner_dir) == ["self", "step", "inner_idx"]
    assert store.tq_batch_name == "tq_batch.pt"


def test_batches_of_transfer_queue() -> None:
    meta = KVBatchMeta(keys=["a", "b", "c"], tags=[{"n": 1}, {"n": 2}, {"n": 3}], extra_info={"plan": ((1, 2), (3,))})
    meta.reorder([2, 0, 1])
    assert (meta.keys, meta.tags) == (["c", "a", "b"], [{"n": 3}, {"n": 1}, {"n": 2}])
    assert meta.select_keys(["a", "c"]).keys == ["a", "c"]
    assert [part.keys for part in meta.chunk(3)] == [["c"], ["a"], ["b"]]
    assert meta.chunk(3)[1].extra_info == {"plan": ((1, 2), (3,))}
    assert parameters_of(tq.kv_batch_put)[:4] == ["keys", "partition_id", "fields", "tags"]
    assert parameters_of(tq.kv_batch_get) == ["keys", "partition_id", "select_fields"]


def test_tensordict_functions() -> None:
    assert parameters_of(tu.assign_non_tensor_stack) == ["tensor_dict", "key", "val"]
    data = TensorDict({"x": torch.arange(3)}, batch_size=3)
    tu.assign_non_tensor_stack(data, "uid", ["a", "b", "c"])
    assert list(data["uid"]) == ["a", "b", "c"]
    assert list(tu.index_select_tensor_dict(data, [2, 0])["uid"]) == ["c", "a"]


def test_balance_metrics_accept_ranges() -> None:
    metrics = seqlen_balancing.log_seqlen_unbalance([3, 1, 2, 2], [range(0, 2), range(2, 4)], prefix="p")
    assert (metrics["p/balanced_min"], metrics["p/balanced_max"]) == (4, 4)
