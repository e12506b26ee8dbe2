"""Which prompts are sampled first, and what is counted of those that were too old. TransferQueue is a dictionary."""

import itertools
from collections.abc import Set
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from rollout_hooks.capture.report import ENDED
from verl_tree.trainer.rows.no_trajectory import NoTrajectoryError
from verl_tree.trainer.rows.replay_buffer import POLL_INTERVAL_S, TreeReplayBuffer, TreeReplayBufferAsync


def settings(**changed: Any) -> dict[str, Any]:
    return {
        "trainer_mode": "colocate_async",
        "trainer_config": {},
        "max_off_policy_threshold": 2,
        "max_off_policy_strategy": "drop",
        "sampler_kwargs": {},
        **changed,
    }


def prompt(step: int, status: str = "finished") -> dict[str, Any]:
    return {"is_prompt": True, "status": status, "global_steps": step}


def row(seq_len: int) -> dict[str, Any]:
    return {"status": "success", "seq_len": seq_len, "min_global_steps": 1, "max_global_steps": 1}


def _listed(tags: dict[str, dict[str, Any]], partition_id: str) -> dict[str, dict[str, Any]]:
    return {partition_id: {key: dict(tag) for key, tag in tags.items()}} if partition_id == "train" else {}


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """TransferQueue's tags of the partition `train`, without a cluster."""
    tags: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(tq, "kv_list", lambda partition_id="train": _listed(tags, partition_id))
    monkeypatch.setattr(tq, "kv_clear", lambda *, keys, partition_id: [tags.pop(key, None) for key in keys])  # noqa: ARG005
    return tags


@pytest.mark.parametrize("buffer_class", [TreeReplayBuffer, TreeReplayBufferAsync])
def test_of_equally_old_prompts_the_first_drawn_is_the_first_sampled(
    queue: dict[str, dict[str, Any]], buffer_class: type[TreeReplayBuffer]
) -> None:
    # Forty uids: a set would give them back in this order with a chance of 1 in 40!.
    for number in reversed(range(40)):
        queue[f"{number:09d}-x"] = prompt(step=4)
        queue[f"{number:09d}-x_0_0"] = row(3)
    queue["000000077-y"] = prompt(step=3)  # older, although it was drawn later
    queue["000000077-y_0_0"] = row(3)
    buffer = buffer_class(**settings(max_off_policy_threshold=None))
    batch, _ = buffer.sample(global_steps=4, partition_id="train", batch_size=20)
    expected = ["000000077-y_0_0", *(f"{number:09d}-x_0_0" for number in range(19))]
    assert sorted(batch.keys) == sorted(expected)
    assert len(batch.keys) == 20


@pytest.mark.parametrize(("filters", "num_lists"), [(False, 2), (True, 4)])
def test_rows_are_listed_when_as_many_prompts_as_are_missing_have_ended(
    queue: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, filters: bool, num_lists: int
) -> None:
    """Each look is answered by two workers' counts; one prompt more has ended each time. A filter replaces some."""
    lists, looks = [], itertools.count()

    def kv_list(partition_id: str | None = None) -> dict[str, Any]:
        if partition_id is None:
            lists.append(dict(queue))
            return {"train": lists[-1]}
        assert partition_id == ENDED
        num_ended = min(next(looks), 6)
        for number in range(num_ended):
            queue[f"{number:09d}-x"] = prompt(step=1)
            queue[f"{number:09d}-x_0_0"] = row(3)
        # The third worker has made its key and not yet written its tag.
        return {ENDED: {"w1": {"num": num_ended // 2}, "w2": {"num": num_ended - num_ended // 2}, "w3": {}}}

    monkeypatch.setattr(tq, "kv_list", kv_list)
    monkeypatch.setattr(tq, "kv_batch_get", lambda *, keys, **_: {"rm_scores": [torch.ones(1) for _ in keys]})
    of_filter = {"filter_groups_metric": "reward", "refill_fn": print, "train_batch_size": 6, "gen_batch_size": 1}
    of_run = settings(trainer_mode="sync", poll_interval=0.0) | (of_filter if filters else {})
    batch, _ = TreeReplayBuffer(**of_run).sample(global_steps=1, partition_id="train", batch_size=6)
    assert len(batch.keys) == 6
    assert len(lists) == num_lists


def test_prompts_that_have_not_ended_are_told_at_every_list(queue: dict[str, dict[str, Any]]) -> None:
    queue |= {"a": prompt(step=1), "a_0_0": row(3), "b": prompt(step=1, status="running"), "b_0_0": row(3)}
    queue |= {"c": prompt(step=1, status="pending"), "d": prompt(step=1, status="failure")}
    told: list[Set[str]] = []
    buffer = TreeReplayBuffer(**settings(trainer_mode="sync"))
    buffer.on_listed = told.append
    buffer.sample(global_steps=1, partition_id="train", batch_size=1)
    assert told == [{"b", "c"}]


def test_stale_prompts_are_counted_with_all_they_take_along(queue: dict[str, dict[str, Any]]) -> None:
    """At step 5 prompts of step 3 span three versions, more than two; another of the same age still runs."""
    refills = iter([{"d": prompt(step=3), "d_0_0": row(50)}, {"e": prompt(step=5), "e_0_0": row(4)}])
    refilled: list[int] = []

    def refill(num_prompts: int) -> None:
        refilled.append(num_prompts)
        queue.update(next(refills))

    queue |= {"a": prompt(step=3), "a_0_0": row(10), "a_0_1": row(30), "a_1_0": row(5)}
    queue |= {"b": prompt(step=3, status="running"), "b_0_0": row(100)}
    queue |= {"c": prompt(step=4), "c_0_0": row(7)}
    buffer = TreeReplayBufferAsync(**settings(poll_interval=0.01, refill_fn=refill))
    batch, metrics = buffer.sample(global_steps=5, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["c_0_0", "e_0_0"]
    assert refilled == [1, 1]
    assert metrics["training/off_policy/evicted_samples"] == 2
    dropped = buffer.drain_dropped()
    assert dropped == {
        "tree/async/dropped_groups": 2.0,
        "tree/async/dropped_sessions": 3.0,
        "tree/async/dropped_leaves": 4.0,
        "tree/async/dropped_flat_tokens": 95.0,
        "tree/async/dropped_leaf_len/max": 50.0,
    }
    assert buffer.drain_dropped() == dict.fromkeys(dropped, 0.0)
    assert "b_0_0" in queue, "its group is not complete yet"


def test_a_step_without_a_trajectory_ends_with_our_error(queue: dict[str, dict[str, Any]]) -> None:
    """To replace failed groups, as verl advises, would not end such a run at all."""
    queue |= {"a": prompt(step=1, status="failure"), "b": prompt(step=1, status="failure")}
    buffer = TreeReplayBuffer(**settings(trainer_mode="sync"))
    with pytest.raises(NoTrajectoryError, match=r"^all sessions of 2 prompts failed$"):
        buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    queue |= {"b": prompt(step=1), "b_0_0": row(3)}
    batch, _ = TreeReplayBuffer(**settings(trainer_mode="sync")).sample(
        global_steps=1, partition_id="train", batch_size=2
    )
    assert batch.keys == ["b_0_0"]


@pytest.mark.parametrize("has_success", [False, True])
def test_replaced_prompts_that_all_fail_end_the_run(queue: dict[str, dict[str, Any]], has_success: bool) -> None:
    """Six prompts fail; with one among them that does not, they are no reason to end the run."""
    statuses = iter(["failure", "finished" if has_success else "failure", *["failure"] * 3, "finished"])
    numbers = itertools.count()

    def refill(num_prompts: int) -> None:
        for status in itertools.islice(statuses, num_prompts):
            uid = f"r{next(numbers)}"
            queue[uid] = prompt(step=1, status=status)
            if status == "finished":
                queue[f"{uid}_0_0"] = row(3)

    queue |= {"a": prompt(step=1, status="failure"), "b": prompt(step=1, status="failure")}
    theirs = ReplayBufferAsync(**settings(trainer_config=OmegaConf.create({}), refill_fn=refill))
    buffer = TreeReplayBufferAsync.like(theirs, max_failed=4)
    if has_success:
        batch, _ = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
        assert sorted(batch.keys) == ["r1_0_0", "r5_0_0"]
    else:
        with pytest.raises(NoTrajectoryError, match=r"^all sessions of 4 prompts in a row failed$"):
            buffer.sample(global_steps=1, partition_id="train", batch_size=2)


def test_a_filtered_group_is_one_whose_leaves_all_earned_the_same(
    queue: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leaves of one session may differ where the results of all sessions are equal."""
    rewards = {"a_0_0": 1.0, "a_0_1": 1.0, "a_1_0": 1.0, "b_0_0": 0.0, "b_0_1": 1.0, "b_1_0": 1.0}
    others = iter("cdef")

    def refill(num_prompts: int) -> None:
        for uid in itertools.islice(others, num_prompts):
            queue.update({uid: prompt(step=1), f"{uid}_0_0": row(3)})

    def scores(*, keys: list[str], **_: Any) -> dict[str, Any]:
        return {"rm_scores": [torch.tensor([0.0, rewards.get(key, 0.0)]) for key in keys]}

    monkeypatch.setattr(tq, "kv_batch_get", scores)
    queue |= {"a": prompt(step=1), "b": prompt(step=1)} | {key: row(3) for key in rewards}
    of_filter = {"filter_groups_metric": "reward", "refill_fn": refill, "train_batch_size": 2, "gen_batch_size": 1}
    buffer = TreeReplayBuffer(**settings(trainer_mode="sync", poll_interval=0.01, **of_filter))
    batch, metrics = buffer.sample(global_steps=1, partition_id="train", batch_size=2)
    assert sorted(batch.keys) == ["b_0_0", "b_0_1", "b_1_0", "c_0_0"]
    assert metrics["training/filter_groups/evicted_samples"] == 1


# By prompt, role and leaf: what it earned. The roles of a and b agree in themselves, those of d have one leaf each.
BY_ROLE = {
    "a": {"p": [1.0, 1.0], "w": [0.0, 0.0]},
    "b": {"p": [1.0, 1.0], "w": [0.5], None: [2.0, 2.0]},
    "c": {"p": [1.0, 1.0], "w": [0.0, 0.5]},
    "d": {"p": [1.0], "w": [0.0]},
    "e": {None: [1.0, 1.0]},
    "f": {None: [1.0, 0.0]},
}


@pytest.mark.parametrize("buffer_class", [TreeReplayBuffer, TreeReplayBufferAsync])
@pytest.mark.parametrize("metric", ["reward", "acc"])
def test_a_prompt_with_roles_is_filtered_if_no_role_has_leaves_that_differ(
    queue: dict[str, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    buffer_class: type[TreeReplayBuffer],
) -> None:
    values: dict[str, float] = {}
    for uid, roles in BY_ROLE.items():
        queue[uid] = prompt(step=1)
        for role, earned in roles.items():
            for value in earned:
                key = f"{uid}_0_{sum(each.startswith(uid) for each in values)}"
                values[key] = value
                queue[key] = row(3) | ({} if role is None else {"leaf_role": role})
    asked: list[list[str]] = []

    def columns(*, keys: list[str], **_: Any) -> dict[str, Any]:
        asked.append(list(keys))
        return {
            "rm_scores": [torch.tensor([0.0, values[key]]) for key in keys],
            "extra_fields": [{"reward_extra_info": {"acc": values[key]}} for key in keys],
        }

    monkeypatch.setattr(tq, "kv_batch_get", columns)
    buffer = buffer_class(**settings(filter_groups_metric=metric, refill_fn=lambda _: None))
    buffer._sync_metadata_from_transfer_queue()
    filtered, counts = buffer._dapo_filtered_keys("train")
    assert filtered == {"a", "b", "e"}
    assert counts == {1.0: 3}
    num_asked = len(asked)
    assert buffer._dapo_filtered_keys("train") == (filtered, counts)
    assert len(asked) == num_asked, "prompts that have ended are classified once"
    assert buffer._dapo_filtered_keys("val") == (set(), {})


@pytest.mark.parametrize(
    ("verls", "ours"), [(ReplayBuffer, TreeReplayBuffer), (ReplayBufferAsync, TreeReplayBufferAsync)]
)
def test_our_buffer_takes_over_every_setting_but_the_poll_interval(
    verls: type[ReplayBuffer], ours: type[TreeReplayBuffer]
) -> None:
    def refill(num_prompts: int) -> None:
        """Nothing is refilled here."""

    changed = {
        "trainer_mode": "sync",
        "trainer_config": OmegaConf.create({"a": 1}),
        "max_off_policy_threshold": 5,
        "max_off_policy_strategy": "wait",
        "sampler_kwargs": {"b": 2},
        "refill_fn": refill,
        "filter_groups_metric": "reward",
        "train_batch_size": 6,
        "gen_batch_size": 1,
        "max_inflight_gen_batches": 3,
        "sync_refill_failed_groups": True,
    }
    buffer = ours.like(verls(**changed), max_failed=12)
    assert buffer.max_failed == 12
    assert {name: vars(buffer)[name] for name in changed} == changed
    assert buffer.poll_interval == POLL_INTERVAL_S


def test_the_switch_of_hybrid_replicas_keeps_verls_interval() -> None:
    """`_step_had_idle` compares the time that the trainer waited with one poll."""
    config = OmegaConf.create({"hybrid_rollout": {"enable_switch": True}})
    theirs = ReplayBufferAsync(**settings(trainer_mode="separate_async", trainer_config=config))
    assert TreeReplayBufferAsync.like(theirs, max_failed=2).poll_interval == theirs.poll_interval != POLL_INTERVAL_S
