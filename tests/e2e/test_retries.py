"""Agent loop workers are killed (kill -9) while they run prompts, with verl's manager, Ray and TransferQueue."""

import itertools
import os
import signal
import time

import pytest
import ray
import transfer_queue as tq
from omegaconf import open_dict
from ray.exceptions import ActorDiedError
from scripted_llm import ScriptedClient
from test_capture import N, reward_by_verl, settings, start  # noqa: F401  # a fixture, and verl's reward function
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

from rollout_hooks.capture.report import ENDED
from rollout_hooks.worker import TreeAgentLoopManager
from verl_tree.trainer.rows.replay_buffer import TreeReplayBuffer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LOOP = "single_turn_agent"
SLOW_S = 8.0


class Delay:
    """One session in N of a "slow" prompt is slow, so that the others have written their rows before it ends."""

    def __init__(self):
        self.calls = itertools.count()

    def __call__(self, prompt):
        return SLOW_S if "slow" in prompt and next(self.calls) % N == 0 else 0.0


def answer(prompt):
    if "killer" in prompt:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


@pytest.fixture
def manager(queue, settings):  # noqa: ARG001, F811
    with open_dict(settings):
        settings.actor_rollout_ref.rollout.agent.num_workers = 2
    reward_worker = ray.remote(RewardLoopWorker).remote(settings)
    client = ScriptedClient(answer, Delay())
    made = TreeAgentLoopManager.create(config=settings, llm_client=client, reward_loop_worker_handles=[reward_worker])
    made.retries = True
    yield made
    for worker in made.agent_loop_workers:
        ray.kill(worker)


def buffer_of(on_listed):
    """Return the trainer's buffer, with what `TreeTrainer` sets."""
    made = TreeReplayBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        poll_interval=0.05,
    )
    made.on_listed = on_listed
    return made


def kill(worker):
    """Kill the process of a worker, and wait until Ray knows it."""
    os.kill(ray.get(worker.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    is_known = False
    while not is_known:
        time.sleep(0.05)
        try:
            ray.get(worker.__ray_ready__.remote())
        except ActorDiedError:
            is_known = True


def test_the_open_prompts_of_a_dead_worker_run_again(manager):
    """The first worker is killed when it has ended a prompt, and two of three sessions of the other one."""
    first, second = manager.agent_loop_workers
    uids = start(manager, [(text, LOOP) for text in ("quick", "slow", "quick", "slow")], "train")
    written, left = [], []

    def on_listed(open_uids):
        rows = [key for key in tq.kv_list("train")["train"] if key.startswith(f"{uids[1]}_")]
        if len(rows) == N - 1 and uids[0] not in open_uids and not written:
            written.extend(rows)
            kill(first)
        manager.retry_lost(open_uids)
        if manager.agent_loop_workers[0] != first and not left:  # it takes seconds until the new one writes
            left.append([key for key in tq.kv_list("train")["train"] if key.startswith(f"{uids[1]}_")])

    batch, _ = buffer_of(on_listed).sample(global_steps=1, partition_id="train", batch_size=4)
    assert len(written) == N - 1, "it was killed in the middle of a prompt"
    assert left == [[]], "what it had written is gone before its prompt runs again"
    assert sorted(batch.keys) == sorted(f"{uid}_{session}_0" for uid in uids for session in range(N))
    data = tq.kv_batch_get(keys=list(batch.keys), partition_id="train", select_fields=["rm_scores", "responses"])
    assert data["rm_scores"].to_padded_tensor(0.0).sum(dim=1).tolist() == [0.75] * 4 * N
    assert manager.agent_loop_workers[0] != first
    assert manager.agent_loop_workers[1] == second
    assert sorted(tag["num"] for tag in tq.kv_list(ENDED)[ENDED].values()) == [1, 1, 2], "each prompt has ended once"
    report = manager.drain_capture_report("train")
    assert report.num_retried_prompts == 1
    assert report.num_sessions == 3 * N, "what the dead worker had counted is lost"
    assert (report.failed_sessions, report.failed_prompts) == ((), ())

    tq.kv_clear(keys=list(batch.keys), partition_id="train")
    kill(second)
    assert manager.drain_capture_report("train").num_retried_prompts == 0, "nothing was lost"
    uids = start(manager, [("quick", LOOP)] * 2, "val")
    batch, _ = buffer_of(manager.retry_lost).sample(global_steps=1, partition_id="val", batch_size=2)
    assert sorted(batch.keys) == sorted(f"{uid}_0_0" for uid in uids), "one died between two generations"
    assert manager.drain_capture_report("val").num_retried_prompts == 1
    tq.kv_clear(keys=list(batch.keys), partition_id="val")


def test_prompts_that_lose_their_worker_again_end_the_run(manager):
    uids = start(manager, [("killer", LOOP), ("quick", LOOP)], "train")
    with pytest.raises(RuntimeError, match=rf"^2 agent loop workers, .* the same 1 prompts \(first: {uids[0]}\)"):
        buffer_of(manager.retry_lost).sample(global_steps=1, partition_id="train", batch_size=2)
