"""verl 0.9.1 as the trainer, the advantages, the padding and the replay rely on it.

A failure here after an upgrade of verl names the seam that moved; the modules named in the tests then need a
look.
"""

import inspect
from collections.abc import Callable

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.base import Worker
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
from verl.trainer.ppo import core_algos, padding_utils
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base, utils
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.utils.skip import SkipManager, base_skip, rollout_skip

from verl_tree.trainer.trainer import TreePPOTrainerSync


def parameters_of(function: Callable) -> list[str]:
    """Names of all parameters."""
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name",
    [name for name, value in vars(TreePPOTrainerSync).items() if inspect.isfunction(value) and name != "__init__"],
)
def test_every_override_overrides_something_with_the_same_parameters(name: str) -> None:
    own = {"_num_ranks", "_report_failures", "_rows_of"}
    if name in own:
        assert not hasattr(PPOTrainerSync, name), f"verl has a {name} now: ours would replace it unnoticed"
        return
    assert parameters_of(vars(TreePPOTrainerSync)[name]) == parameters_of(getattr(PPOTrainerSync, name))


def test_the_step_calls_the_overridden_methods_in_this_order() -> None:
    source = inspect.getsource(PPOTrainerSync._step_once)
    calls = ["_balance_batch(", "_compute_old_log_prob(", "_compute_advantage(", "_update_critic(", "_update_actor("]
    positions = [source.index(call) for call in calls]
    assert positions == sorted(positions)
    fit = inspect.getsource(PPOTrainerSync.fit)
    assert fit.index("self.step(") < fit.index("_compute_metrics(") < fit.index("tq.kv_clear("), (
        "step() reads the rows' rewards from TransferQueue before they are cleared"
    )


def test_the_update_keeps_what_extra_info_holds() -> None:
    for update in (PPOTrainerSync._update_actor, PPOTrainerSync._update_critic):
        source = inspect.getsource(update)
        assert "batch.extra_info.update(extra_info)" in source
        assert "mini_batch_rows" not in source and "mini_batch_num_rows" not in source
    assert 'rename_dict(output["metrics"], "actor/")' in inspect.getsource(PPOTrainerSync._update_actor)


def test_the_trainer_registry_refuses_a_second_class_so_the_task_runner_assigns() -> None:
    assert trainer_base.TRAINER_REGISTRY["sync"] is PPOTrainerSync
    with pytest.raises(ValueError, match="already registered"):
        trainer_base.register_trainer("sync")(TreePPOTrainerSync)
    runner = TaskRunnerV1.__ray_metadata__.modified_class
    assert parameters_of(runner.run)[:2] == ["self", "config"]  # Ray appends its own
    assert "get_trainer_cls(config.trainer.v1.trainer_mode)" in inspect.getsource(runner.run)
    assert parameters_of(run_ppo) == ["config", "task_runner_class"]


def test_roles_and_worker_mapping() -> None:
    source = inspect.getsource(PPOTrainerSync._init_resource_pool_mgr)
    assert "self.role_worker_mapping[role] = ray.remote(ActorRolloutRefWorker)" in source
    assert "self.role_worker_mapping[Role.Critic] = ray.remote(TrainingWorker)" in source
    assert {"Critic", "ActorRollout", "ActorRolloutRef", "RefPolicy"} <= set(Role.__members__)


def test_dispatch_info_is_queried_per_mesh() -> None:
    # Bound to every worker group by name.
    assert parameters_of(Worker._query_dispatch_info)[:2] == ["self", "mesh_name"]
    assert "worker_group._dispatch_info[role]" in inspect.getsource(PPOTrainerSync._balance_batch)


def test_an_estimator_gets_rewards_mask_config_and_uids() -> None:
    from verl.trainer.ppo.ray_trainer import compute_advantage

    source = inspect.getsource(compute_advantage)
    for key in ('"token_level_rewards"', '"response_mask"', '"config"', 'adv_kwargs["index"]'):
        assert key in source
    assert "adv_estimator != core_algos.AdvantageEstimator.GRPO" in inspect.getsource(
        utils.compute_advantage_for_multi_trajectories
    ), "only verl's own GRPO sees the last leaf of a session alone"
    assert "tree_grpo" not in [member.value for member in core_algos.AdvantageEstimator]
    assert parameters_of(core_algos.register_adv_est) == ["name_or_enum"]


def test_the_fields_that_advantages_write() -> None:
    source = inspect.getsource(PPOTrainerSync._compute_advantage)
    for field in ("advantages", "returns", "token_level_rewards", "rollout_is_weights"):
        assert f'"{field}"' in source
    assert source.count("fields.append(") == 3, "a field that padding rows would lack was added"


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

    from verl_tree.trainer.padding import shorten

    short, short_tag = shorten(row, tag)
    assert {name: len(short[name]) for name in by_token} == dict.fromkeys(by_token, 2)
    assert len(short["prompts"]) == 1
    assert (short_tag["prompt_len"], short_tag["response_len"], short_tag["seq_len"]) == (1, 1, 2)


def test_the_replay_buffer() -> None:
    assert "poll_interval" in parameters_of(ReplayBuffer.__init__)
    assert "time.sleep(self.poll_interval)" in inspect.getsource(ReplayBuffer._wait_for_next_poll)


def test_the_store_of_rollouts() -> None:
    store = rollout_skip.RolloutTqSkip
    assert parameters_of(store.load_dump_data) == [
        "self",
        "step",
        "new_prompt_uids",
        "n",
        "global_steps",
        "partition_id",
    ]
    assert parameters_of(store._resolve_load_step_v1) == ["self", "step"]
    assert parameters_of(store._get_v1_inner_dir) == ["self", "step", "inner_idx"]
    assert store.tq_batch_name == "tq_batch.pt"
    stored = inspect.getsource(store.prepare_data)
    for key in ("tensordict", "tags", "keys", "global_steps"):
        assert f'"{key}"' in stored
    assert "self.load_dump_data(" in inspect.getsource(store.maybe_load_and_inject)
    assert "SKIP_REGISTRY[name] = cls" in inspect.getsource(base_skip.register_skip), "a later entry wins"
    assert "SKIP_REGISTRY.items()" in inspect.getsource(SkipManager.init)


def test_row_keys_have_the_form_that_is_parsed() -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert 'f"{uid}_{session_id}_{i}"' in inspect.getsource(worker._agent_loop_postprocess)


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
