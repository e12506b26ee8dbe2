"""Rows between driver and workers, on real Ray and TransferQueue: store, replay, cut, pad, dispatch.

The trainer is ours without the parts that need a model. Its workers send back which rows they got and where they would
cut them.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

import ray
import transfer_queue as tq
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.utils import tensordict_utils as tu
from verl.utils.skip import SkipManager
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tree.cost.model import CostModel
from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer import advantages
from verl_tree.trainer.modes import TreePPOTrainerSync
from verl_tree.trainer.portions.portion import PortionWorker
from verl_tree.trainer.row_keys import group_rows, parse_row_key
from verl_tree.trainer.rows import replay
from verl_tree.trainer.rows.batching import MiniBatchPlan
from verl_tree.trainer.rows.padding import PADDING_LEN, real_rows
from verl_tree.trainer.rows.replay_buffer import TreeReplayBuffer, TreeReplayBufferAsync
from verl_tree.trainer.rows.step_rows import StepRows
from verl_tree.trainer.told.log_prob_guard import LogProbGuard
from verl_tree.trainer.told.update_metrics import step_metrics, take_tree_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("queue")]

NUM_RANKS = 2
GROUPS_PER_MINI_BATCH = 2
# (uid, session, leaf) -> reward. The uids sort in the order of the prompts; the third prompt has only one leaf.
REWARDS = {
    ("000000000-x", 0, 0): 1.0,
    ("000000000-x", 0, 1): 0.0,
    ("000000000-x", 1, 0): 1.0,
    ("000000001-a", 0, 0): 0.0,
    ("000000001-a", 1, 0): 0.25,
    ("000000001-a", 1, 1): 0.5,
    ("000000001-a", 1, 2): 0.75,
    ("000000002-m", 1, 0): 3.0,
}


class EchoWorker(PortionWorker, Worker):
    """A worker that keeps what it gets and sends it back when asked."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info(mesh_name="actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def take(self, data: TensorDict) -> TensorDict:
        """Cut the rows by the plan: per mini-batch, keep the rows' tokens and whether a loss reads them."""
        plan = MiniBatchPlan.from_batch(data)
        rows = iter(zip(data["input_ids"].unbind(), data["loss_mask"].unbind(), strict=True))
        self.cells = [
            [(ids.tolist(), bool(mask.any())) for ids, mask in (next(rows) for _ in range(num_rows))]
            for num_rows in plan.rows[self.rank]
        ]
        assert next(rows, None) is None
        self.num_rows = plan.num_rows
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": {}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self) -> tuple[list[list[tuple[list[int], bool]]], tuple[int, ...]]:
        """Return the cells of this rank and the denominators of all."""
        return self.cells, self.num_rows


class RowsTrainer(TreePPOTrainerSync):
    """Our trainer with rows and workers, without models and rollout."""

    def __init__(self, config: DictConfig, *, workers: RayWorkerGroup) -> None:
        advantages.register()
        replay.register()
        self.config = config
        self.trainer_mode = "sync"
        self.global_steps = 1
        self.use_critic = False
        self.agent_loop_manager = None
        self.actor_rollout_wg = workers
        self._cost_model = CostModel.prior()
        self._step_rows = StepRows()
        self._left_out = ["000000000-before_0_0"]
        self._log_prob_guard = LogProbGuard(tolerance=None, engine="no engine")
        self.replay_buffer = self._build_replay_buffer()

    @property
    def tokenizer(self) -> Any:
        """A tokenizer with the one attribute that the trainer reads."""

        class Tokenizer:
            eos_token_id = 7

        return Tokenizer()


@pytest.fixture(scope="session")
def workers(_queue_of_all: None) -> RayWorkerGroup:
    """Start one echo worker per rank."""
    return RayWorkerGroup(
        resource_pool=RayResourcePool([NUM_RANKS], use_gpu=True, max_colocate_count=1),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(EchoWorker)),
    )


@pytest.fixture
def trainer(workers: RayWorkerGroup, tmp_path: Path) -> RowsTrainer:
    """Return a trainer that stores the rollouts of step 1."""
    config = compose_config(
        [
            "profile=cpu",
            "tree.enabled=false",
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={GROUPS_PER_MINI_BATCH}",
            "skip.rollout_tq.enable=true",
            "skip.rollout_tq.steps=[1]",
            f"skip.rollout_tq.dump_dir={tmp_path}",
            "skip.rollout_tq.action=cache",
        ]
    )
    with open_dict(config):
        config.data.gen_batch_size = None
    trainer = RowsTrainer(config, workers=workers)
    SkipManager.init(config)
    SkipManager.set_step(1)
    return trainer


def row_of(uid: str, session: int, leaf: int) -> dict[str, Any]:
    """Make a row as `agent_loop_tq` writes it: 4 prompt tokens, then 3 to 6, of which the second is a tool's."""
    seed = [int(uid[:9]), session, leaf]
    response = torch.from_numpy(np.random.default_rng(seed).integers(10, 90, size=3 + leaf + session))
    prompt = torch.arange(100, 104) + int(uid[:9])
    mask = torch.ones_like(response)
    mask[1] = 0
    scores = torch.zeros(len(response))
    scores[-1] = REWARDS[uid, session, leaf]
    input_ids = torch.cat([prompt, response])
    return {
        "prompts": prompt,
        "responses": response,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "rm_scores": scores,
        "rollout_log_probs": -torch.arange(1, len(response) + 1) / 10,
        "num_turns": 2 + leaf,
        "uid": uid,
        "session_id": session,
        "extra_fields": {"min_global_steps": 0, "max_global_steps": 0, "reward_extra_info": {"leaf": leaf}},
    }


def roll_out() -> None:
    """Write the rows in the order in which sessions happen to end, then the prompts' status."""
    sessions = sorted({(uid, session) for uid, session, _ in REWARDS}, key=lambda each: (each[1], each[0][::-1]))
    for uid, session in sessions:
        leaves = [leaf for u, s, leaf in REWARDS if (u, s) == (uid, session)]
        rows = [row_of(uid, session, leaf) for leaf in leaves]
        lens = [(len(row["prompts"]), len(row["responses"])) for row in rows]
        tags = [
            {
                "status": "success",
                "prompt_len": prompt_len,
                "response_len": response_len,
                "seq_len": prompt_len + response_len,
                "global_steps": 1,
                "min_global_steps": 0,
                "max_global_steps": 0,
            }
            for prompt_len, response_len in lens
        ]
        keys = [f"{uid}_{session}_{leaf}" for leaf in leaves]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows), tags=tags)
    end_prompts({uid: "finished" for uid, _, _ in REWARDS})


def end_prompts(statuses: dict[str, str]) -> None:
    """Mark prompts as ended, as the agent loop workers do."""
    tags = [{"is_prompt": True, "status": status, "global_steps": 1} for status in statuses.values()]
    tq.kv_batch_put(keys=list(statuses), partition_id="train", tags=tags)


def sample(trainer: RowsTrainer) -> KVBatchMeta:
    """Return the rows of a step."""
    batch, _ = trainer.replay_buffer.sample(global_steps=1, partition_id="train", batch_size=3)
    return batch


def fetch(batch: KVBatchMeta) -> dict[str, dict[str, Any]]:
    """Return every field of every row, by key."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train")
    rows: dict[str, dict[str, Any]] = {key: {} for key in batch.keys}
    for name in list(data.keys()):
        values = data[name]
        parts = values.unbind() if isinstance(values, torch.Tensor) else list(values)
        for key, part in zip(batch.keys, parts, strict=True):
            rows[key][name] = part.tolist() if isinstance(part, torch.Tensor) else part
    return rows


def clear(batch: KVBatchMeta) -> None:
    tq.kv_clear(keys=batch.keys, partition_id="train")


def test_stored_rollouts_with_several_leaves_come_back_exactly(trainer: RowsTrainer) -> None:
    roll_out()
    stored = sample(trainer)
    rows = fetch(stored)
    assert len(rows) == len(REWARDS)
    order = [row for group in group_rows(stored.keys) for row in group]
    assert order != list(range(len(order))), "rows must arrive in another order than that of their keys"
    clear(stored)

    skip = SkipManager.skip_instances["rollout_tq"]
    assert skip.maybe_load_and_inject(1, ["000000009-p", "000000010-q", "000000011-r"])
    replayed = sample(trainer)
    assert replayed.keys == [stored.keys[row] for row in order]
    assert fetch(replayed) == rows
    tags = {key: {**tag, "is_replayed": True} for key, tag in zip(stored.keys, stored.tags, strict=True)}
    assert dict(zip(replayed.keys, replayed.tags, strict=True)) == tags
    clear(replayed)

    # Weight versions keep their distance to the step that trains on them.
    with open_dict(trainer.config):
        trainer.config.skip.rollout_tq.action = "repeat"
    SkipManager.init(trainer.config)
    skip = SkipManager.skip_instances["rollout_tq"]
    skip.load_dump_data(step=4, new_prompt_uids=["p", "q", "r"], n=2, global_steps=4)
    later = sample(trainer)
    assert {tag["min_global_steps"] for tag in later.tags} == {3}
    assert {tag["global_steps"] for tag in later.tags} == {4}
    clear(later)


def test_a_replayed_sync_period_keeps_its_mini_batches(trainer: RowsTrainer) -> None:
    """The prompts end in another order than that of their numbers, and each makes a mini-batch."""
    uids = ["000000002-m", "000000000-x", "000000001-a"]
    with open_dict(trainer.config):
        trainer.config.trainer.v1.trainer_mode = "separate_async"
        trainer.config.trainer.v1.separate_async.parameter_sync_step = len(uids)
    SkipManager.init(trainer.config)
    SkipManager.set_step(1)
    buffer = TreeReplayBufferAsync(
        trainer_mode="separate_async",
        trainer_config=trainer.config.trainer.v1.separate_async,
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs=DictConfig({}),
        poll_interval=0.05,
    )
    roll_out()
    end_prompts(dict.fromkeys(uids, "running"))
    stored = []
    for uid in uids:
        end_prompts({uid: "finished"})
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        assert {parse_row_key(key).uid for key in batch.keys} == {uid}
        stored.append(sorted(batch.keys))
        clear(batch)

    assert SkipManager.skip_instances["rollout_tq"].maybe_load_and_inject(1, ["p", "q", "r"])
    for keys in stored:
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=1)
        assert sorted(batch.keys) == keys
        clear(batch)


def test_a_prompt_that_had_failed_is_replayed_as_failed(trainer: RowsTrainer) -> None:
    roll_out()
    lost = [f"{uid}_{session}_{leaf}" for uid, session, leaf in REWARDS if uid == "000000002-m"]
    tq.kv_clear(keys=lost, partition_id="train")
    end_prompts({"000000002-m": "failure"})
    stored = sample(trainer)
    assert {parse_row_key(key).uid for key in stored.keys} == {"000000000-x", "000000001-a"}
    clear(stored)

    skip = SkipManager.skip_instances["rollout_tq"]
    assert skip.maybe_load_and_inject(1, ["000000009-p", "000000010-q", "000000011-r"])
    replayed = sample(trainer)  # waits for three ended prompts; would hang if only two were marked
    assert sorted(replayed.keys) == sorted(stored.keys)
    clear(replayed)

    assert skip.maybe_load_and_inject(1, ["p", "q", "r"])
    clear(sample(trainer))
    with pytest.raises(ValueError, match="replay with the batch size"):
        skip.load_dump_data(step=1, new_prompt_uids=["p"], n=2, global_steps=1)
    tq.kv_clear(keys=stored.keys, partition_id="train")


def test_rows_reach_the_ranks_as_planned_and_advantages_skip_padding(trainer: RowsTrainer) -> None:
    roll_out()
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(sample(trainer), metrics)
    keys_of_real_rows = real_rows(batch).keys
    assert sorted(keys_of_real_rows) == sorted(f"{uid}_{session}_{leaf}" for uid, session, leaf in REWARDS)
    padding = [tag for tag in batch.tags if tag.get("is_padding", False)]
    # Mini-batch 0 is group 0 (3 rows) and group 1 (4 rows). Mini-batch 1, group 2 (1 row), is on the rank with fewer.
    assert sorted(trainer._mini_batch_plan.rows) == [(3, 2), (4, 1)]
    assert trainer._mini_batch_plan.num_rows == (7, 1)
    assert [tag["seq_len"] for tag in padding] == [PADDING_LEN] * 2
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/balanced_min"]
    # A flat run reports what a tree engine would have shared: here the four prompt tokens of each group.
    trees = step_metrics([take_tree_metrics(metrics)])
    assert trees["tree/flat_tokens"] == sum(4 + 3 + session + leaf for _, session, leaf in REWARDS)
    assert trees["tree/tokens"] == trees["tree/flat_tokens"] - 4 * (2 + 3)
    assert trees["tree/compression"] == 1.0

    put_log_probs(batch, reference_is_lower_by=0.0)
    check_advantages(trainer, batch)

    batch.extra_info.update(trainer._mini_batch_plan.to_extra_info())
    trainer.actor_rollout_wg.take(batch)
    check_cells(trainer.actor_rollout_wg.echo())
    clear(batch)


def test_the_longest_row_of_each_session_is_left_and_compared_with_the_others_left(trainer: RowsTrainer) -> None:
    """Leaves of a session have one token more than the one before."""
    roll_out()
    with open_dict(trainer.config):
        trainer.config.tree.rows = "longest"
    sampled = sample(trainer)
    tq.kv_batch_put(keys=trainer._left_out, partition_id="train", tags=[{}])
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(sampled, metrics)
    longest = ["000000000-x_0_1", "000000000-x_1_0", "000000001-a_0_0", "000000001-a_1_2", "000000002-m_1_0"]
    assert sorted(real_rows(batch).keys) == longest
    others = set(sampled.keys) - set(longest)
    assert set(tq.kv_list("train")["train"]) == {*batch.keys, *others}, "only the others of the step before are gone"
    assert sorted(trainer._left_out) == sorted(others)
    assert trainer._mini_batch_plan.num_rows == (4, 1)
    assert batch.extra_info == sampled.extra_info
    # Without the other leaves: the prompt and one row of each session, 4 + 3 + session + leaf tokens.
    assert step_metrics([take_tree_metrics(metrics)])["tree/flat_tokens"] == 8 + 8 + 7 + 10 + 8

    put_log_probs(batch, reference_is_lower_by=0.0)
    rows = fetch(trainer._compute_advantage(batch, {}))
    # Pairs of rewards 0 and 1, and 0 and .75: means .5 and .375, deviations as large, unbiased stds sqrt(2) times that.
    expected = {key: sign * 0.5**0.5 for key, sign in zip(longest, (-1, 1, -1, 1), strict=False)}
    for key, advantage in expected.items():
        assert rows[key]["advantages"][0] == pytest.approx(advantage, rel=1e-5), key
    assert rows[longest[-1]]["advantages"][0] == pytest.approx(3.0, rel=1e-5)
    clear(batch)
    tq.kv_clear(keys=trainer._left_out, partition_id="train")


def put_log_probs(batch: KVBatchMeta, *, reference_is_lower_by: float) -> None:
    """Write what the workers' log-prob passes would have written for every row, padding too."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=["rollout_log_probs"])
    rows = [
        {"old_log_probs": values, "ref_log_prob": values - reference_is_lower_by}
        for values in data["rollout_log_probs"].unbind()
    ]
    tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))


def check_advantages(trainer: RowsTrainer, batch: KVBatchMeta) -> None:
    """Compare with values by hand: each leaf is normalised over its group, and sessions weigh the same."""
    updated = trainer._compute_advantage(batch, {})
    assert updated.keys == batch.keys
    assert updated.tags == batch.tags
    assert updated.fields is None or "advantages" in updated.fields
    fetched = fetch(updated)
    advantages_of = {key: row["advantages"] for key, row in fetched.items()}
    std = 0.3**0.5 + 1e-6  # weights 1/4, 1/4, 1/2 of the rewards 1, 0, 1: mean 0.75, unbiased variance 0.3
    assert advantages_of["000000000-x_0_1"] == pytest.approx([-0.75 / std, 0.0, -0.75 / std, -0.75 / std], rel=1e-5)
    assert advantages_of["000000000-x_1_0"] == pytest.approx([0.25 / std, 0.0, 0.25 / std, 0.25 / std], rel=1e-5)
    # Session 0: 0; session 1: 0.25, 0.5, 0.75. Mean 0.25, sum(w d^2) = 0.0625 / 2 + (0 + 0.0625 + 0.25) / 6 =
    # 1 / 12 and sum(w^2) = 1/4 + 3/36 = 1/3, so the unbiased variance is 1/8.
    assert advantages_of["000000001-a_1_2"][0] == pytest.approx(0.5 / (0.125**0.5 + 1e-6), rel=1e-5)
    assert advantages_of["000000001-a_1_0"] == pytest.approx([0.0] * 4, abs=1e-6)
    assert advantages_of["000000002-m_1_0"][0] == pytest.approx(3.0, rel=1e-5)
    padding = [key for key in batch.keys if key.startswith("pad")]
    assert [advantages_of[key] for key in padding] == [[0.0]] * len(padding)
    assert {row["returns"][0] for key, row in fetched.items() if key in padding} == {0.0}


def test_the_kl_penalty_is_in_the_rewards_and_does_not_see_padding(trainer: RowsTrainer) -> None:
    roll_out()
    with open_dict(trainer.config):
        trainer.config.algorithm.use_kl_in_reward = True
        trainer.config.algorithm.norm_adv_by_std_in_grpo = False
        trainer.config.algorithm.kl_ctrl.kl_coef = 0.5
        trainer.config.algorithm.rollout_correction.rollout_is = "token"
    trainer.kl_ctrl_in_reward = get_kl_controller(trainer.config.algorithm.kl_ctrl)
    batch = trainer._balance_batch(sample(trainer), {})
    put_log_probs(batch, reference_is_lower_by=0.25)
    metrics: dict[str, Any] = {}
    rows = fetch(trainer._compute_advantage(batch, metrics))
    # Two of the ten rows are padding. As rows without KL they would lower the mean to 0.2.
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    # What verl computes for the real rows exists in the padding rows, too.
    assert all(
        {"advantages", "returns", "token_level_rewards", "rollout_is_weights"} <= set(row) for row in rows.values()
    )
    assert rows["000000002-m_1_0"]["token_level_rewards"] == pytest.approx([-0.125, 0, -0.125, 3 - 0.125])
    # Trained tokens of the leaves 0_0, 0_1, 1_0 of the first prompt: 2, 3, 3.
    rewards = np.array([1.0, 0.0, 1.0]) - 0.125 * np.array([2, 3, 3])
    mean = rewards @ [0.25, 0.25, 0.5]
    names = ["000000000-x_0_0", "000000000-x_0_1", "000000000-x_1_0"]
    assert [rows[name]["advantages"][0] for name in names] == pytest.approx(rewards - mean, abs=1e-6)
    clear(batch)


def check_cells(echoed: list[tuple[list[list[tuple[list[int], bool]]], tuple[int, ...]]]) -> None:
    """Every cell holds whole groups, then padding; mini-batches hold the prompts in their order."""
    assert len(echoed) == NUM_RANKS
    groups: dict[int, list[list[int]]] = {0: [], 1: []}
    for cells, num_rows in echoed:
        assert num_rows == (7, 1)
        for index, cell in enumerate(cells):
            is_trained = [trained for _, trained in cell]
            assert is_trained == sorted(is_trained, reverse=True), "padding comes last"
            assert all(ids == [7] * PADDING_LEN for ids, trained in cell if not trained)
            groups[index].append([ids[0] - 100 for ids, trained in cell if trained])
    assert sorted(groups[0]) == [[0, 0, 0], [1, 1, 1, 1]]
    assert sorted(groups[1]) == [[], [2]]


def test_the_replay_buffer_is_polled_often(trainer: RowsTrainer) -> None:
    assert type(trainer.replay_buffer) is TreeReplayBuffer
    assert trainer.replay_buffer.poll_interval < 0.1
