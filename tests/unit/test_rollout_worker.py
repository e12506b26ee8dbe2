"""The worker's accounts: what is counted, when a prompt fails, which rewards are refused.

The worker here is the real class in this process without its TransferQueue. Rows that reach a queue are left to
tests/e2e/test_capture.py.
"""

import asyncio
import pickle
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
import transfer_queue as tq
from omegaconf import open_dict
from ray.exceptions import ActorDiedError, ActorUnavailableError
from scripted_llm import tokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, _agent_loop_registry
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.replica import TokenOutput
from worker_cases import InProcessWorker, prompt_of, run_sessions

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE, LEAF_SHAPE_TAG
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput, row_reward
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.recording import recording_client
from rollout_hooks.capture.report import CaptureReport, FailedSession
from rollout_hooks.capture.running import OpenSessions, Session
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.loops.base import BranchingAgentLoop
from rollout_hooks.worker import MAX_TRACEBACKS, TreeAgentLoopManager, TreeAgentLoopWorkerBase
from verl_tree.trainer.told.metrics import capture_metrics


def test_prompt_fails_only_with_its_last_session_and_every_cause_is_kept():
    worker = InProcessWorker(lambda _: RuntimeError("server lost"), num_sessions=3)
    errors = run_sessions(worker, num_sessions=3)
    # Sessions run at the same time and may end in any order.
    (error,) = [error for error in errors if error is not None]
    assert str(error) == "all 3 sessions of the prompt failed, first: RuntimeError: server lost"
    report = asyncio.run(worker.drain_capture_report("train"))
    failed = sorted(report.failed_sessions, key=lambda session: session.session_id)
    assert [(each.session_id, each.cause, each.num_calls) for each in failed] == [
        (number, "RuntimeError: server lost", 1) for number in range(3)
    ]
    assert replace(report, failed_sessions=()) == CaptureReport(
        num_sessions=3, num_calls=3, num_failed_calls=3, failed_prompts=("u",)
    )
    assert asyncio.run(worker.drain_capture_report("train")) == CaptureReport()


@pytest.mark.parametrize("validate", [False, True], ids=["train", "val"])
def test_prompts_that_verl_cuts_are_counted_and_not_warned_of_one_by_one(validate, caplog):
    """It is verl's own loop that asks verl's method, once in each session; that nobody gives rewards is no matter."""
    worker = InProcessWorker(lambda _: "x", num_sessions=3)
    worker.rollout_config.prompt_length = 4
    asks = [{"role": "user", "content": "more than four tokens"}]
    run_sessions(worker, num_sessions=3, raw_prompt=asks, validate=validate)
    num_tokens = len(worker.tokenizer.apply_chat_template(asks, add_generation_prompt=True, return_dict=False))
    report = asyncio.run(worker.drain_capture_report("val" if validate else "train"))
    assert report.cut_prompts == (num_tokens,) * 3
    assert "left-truncating" not in caplog.text


class Raising(BranchingAgentLoop):
    """A loop with a bug; each session gives another value if `varies`."""

    def __init__(self, *args, varies=False, **kwargs):
        super().__init__(*args, **kwargs)
        self.varies = varies

    async def run_branches(self, root, **row):
        await root.generate()
        raise KeyError(row["session_id"] if self.varies else "plan")


@pytest.mark.parametrize(("varies", "num_told"), [(False, 1), (True, MAX_TRACEBACKS)])
def test_a_bug_of_a_loop_is_told_with_its_place_once_for_each_cause(varies, num_told, monkeypatch, caplog):
    entry = {"_target_": f"{__name__}.Raising", "varies": varies}
    monkeypatch.setitem(_agent_loop_registry, "raising", entry)
    worker = InProcessWorker(lambda _: "fine", num_sessions=25)
    with caplog.at_level("WARNING", "rollout_hooks"):
        run_sessions(worker, num_sessions=25, agent_name="raising")
    failed = asyncio.run(worker.drain_capture_report("train")).failed_sessions
    tracebacks = [each.traceback for each in failed if each.traceback]
    assert len({each.place for each in failed}) == 1
    assert (len(failed), len(tracebacks)) == (25, num_told)
    path, line = failed[0].place.rsplit(":", 1)
    assert path == __file__
    (first, code) = tracebacks[0].splitlines()
    assert first == f'File "{__file__}", line {line}, in run_branches'
    assert code == '  raise KeyError(row["session_id"] if self.varies else "plan")'
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == num_told
    assert logged[0].endswith(tracebacks[0])


class Waiting(BranchingAgentLoop):
    """A loop whose tool answers when the test says so, and then fails, so that no row is written."""

    answered: asyncio.Event

    async def run_branches(self, root, **_):
        await root.generate()
        await self.answered.wait()
        raise KeyError("plan")


def test_open_sessions_are_told_with_the_place_where_they_wait(monkeypatch):
    monkeypatch.setitem(_agent_loop_registry, "waiting", {"_target_": f"{__name__}.Waiting"})
    worker = InProcessWorker(lambda _: "a")
    place = f"{__file__}:{Waiting.run_branches.__code__.co_firstlineno + 2}"

    async def run():
        Waiting.answered = asyncio.Event()
        before = await worker.open_sessions()
        prompt = asyncio.create_task(prompt_of(worker, num_sessions=3, agent_name="waiting"))
        while (told := await worker.open_sessions()).places[place] < 3:
            await asyncio.sleep(0.01)
        Waiting.answered.set()
        await prompt
        return before, told, await worker.open_sessions()

    before, told, after = asyncio.run(run())
    assert before == after == OpenSessions(0)
    assert (told.num, told.oldest) == (3, "u_0 of loop waiting")
    assert 0 < told.oldest_s < 60
    assert pickle.loads(pickle.dumps(told)) == told


def test_failures_of_validation_are_counted_apart():
    worker = InProcessWorker(lambda _: RuntimeError("server lost"))
    run_sessions(worker, num_sessions=1, validate=True)
    assert asyncio.run(worker.drain_capture_report("train")) == CaptureReport()
    assert asyncio.run(worker.drain_capture_report("val")).num_failed_calls == 1


class Hiding(BranchingAgentLoop):
    """A loop that does without an answer."""

    async def run_branches(self, root, **_):
        with suppress(Exception):
            await root.generate()
        raise SessionFailed("there is no answer")


@pytest.mark.parametrize(
    ("error", "is_dead"),
    [(ActorDiedError(), True), (ActorUnavailableError("gone", b"0" * 16), True), (RuntimeError("too long"), False)],
    ids=["actor died", "actor unavailable", "another error"],
)
def test_a_server_that_died_is_reported_although_the_loop_hides_it(error, is_dead, monkeypatch):
    monkeypatch.setitem(_agent_loop_registry, "hiding", {"_target_": f"{__name__}.Hiding"})
    worker = InProcessWorker(lambda _: error)
    run_sessions(worker, num_sessions=2, agent_name="hiding")
    report = asyncio.run(worker.drain_capture_report("train"))
    assert len(report.dead_servers) == 2 * is_dead
    assert all(type(error).__name__ in each for each in report.dead_servers)
    assert {each.cause for each in report.failed_sessions} == {"there is no answer"}


def test_session_that_generates_nothing_fails_with_its_cause():
    worker = InProcessWorker(lambda _: TokenOutput(token_ids=[], stop_reason="aborted"))
    run_sessions(worker, num_sessions=1)
    report = asyncio.run(worker.drain_capture_report("train"))
    assert "no trajectory with a trained token" in report.failed_sessions[0].cause
    assert (report.num_aborted_calls, report.num_leaves) == (1, 0)


def test_missing_reward_is_refused_with_the_remedy():
    """One good answer, but nobody to score it: reward.num_workers=0."""
    worker = InProcessWorker(lambda _: "fine")
    run_sessions(worker, num_sessions=1)
    report = asyncio.run(worker.drain_capture_report("train"))
    assert "reward.num_workers=0" in report.failed_sessions[0].cause
    assert (report.num_calls, report.num_dropped_leaves) == (1, 1)


@pytest.mark.parametrize("validate", [False, True])
def test_the_last_session_of_a_prompt_tags_the_rows_of_all(validate, monkeypatch):
    """One session fails. The others write equal rows, which are scored later, and then one of them writes the tags."""
    puts = []

    async def put(**arguments):
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    replies = iter([RuntimeError("server lost"), "fine", "fine"])
    worker = InProcessWorker(lambda _: next(replies), num_sessions=3, reward_handles=None)
    assert run_sessions(worker, num_sessions=3, validate=validate) == [None] * 3
    rows, told = (puts, []) if validate else (puts[:-1], puts[-1:])
    keys = sorted(key for put in rows for key in put["keys"])
    assert len(keys) == len(set(keys)) == 2
    assert set(keys) < {"u_0_0", "u_1_0", "u_2_0"}, "sessions ask in any order"
    assert not any(LEAF_SHAPE_TAG in tag for put in rows for tag in put["tags"])
    for put in told:
        assert (put["keys"], put["partition_id"]) == (keys, "train")
        first, second = (np.frombuffer(tag[LEAF_SHAPE_TAG], LEAF_SHAPE)[0].tolist() for tag in put["tags"])
        num_tokens, num_answered = rows[0]["tags"][0]["seq_len"], rows[0]["tags"][0]["response_len"]
        assert first[:6] == (0, 0, num_tokens, num_answered, num_answered, num_answered)
        assert second[:6] == (1, num_tokens, num_tokens, num_answered, num_answered, 0)
        assert np.isnan([first[6], second[6]]).all()


class TwoRoles(BranchingAgentLoop):
    """One leaf with a role and one without."""

    async def run_branches(self, root, **_):
        (side,) = root.fork()
        await side.generate()
        side.finish(0.5, role="side")
        await root.generate()
        root.finish(1.0)


@pytest.mark.parametrize("validate", [False, True])
def test_rows_with_a_role_are_tagged_with_it_when_their_session_ends(validate, monkeypatch):
    puts = []

    async def put(**arguments):
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    monkeypatch.setitem(_agent_loop_registry, "two_roles", {"_target_": f"{__name__}.TwoRoles"})
    worker = InProcessWorker(lambda _: "fine", num_sessions=2)
    assert run_sessions(worker, num_sessions=2, validate=validate, agent_name="two_roles") == [None] * 2
    named = [put for put in puts if "leaf_role" in put["tags"][0]]
    partition = "val" if validate else "train"
    assert sorted(put["keys"] for put in named) == [["u_0_0"], ["u_1_0"]]
    assert [(put["partition_id"], put["tags"]) for put in named] == [(partition, [{"leaf_role": "side"}])] * 2
    for put in named:
        before = [each for each in puts[: puts.index(put)] if "fields" in each]
        assert any(put["keys"][0] in each["keys"] for each in before), "the row is written first"


def test_the_reward_of_a_row_is_the_sum_of_its_scores():
    row = TreeAgentLoopOutput(
        prompt_ids=[1], response_ids=[2, 3, 4], response_mask=[1, 0, 1], metrics=AgentLoopMetrics(), num_turns=2
    )
    assert row_reward(row) is None
    rewards = {"leaf_reward": 0.5, "reward_score": 4.0, "node_rewards": ((0, 0.25), (1, 2.0))}
    for fields in ({"reward_score": 4.0}, {"leaf_reward": 0.5, "reward_score": 4.0}, rewards):
        scored = row.model_copy(update=fields)
        assert row_reward(scored) == scored.as_dict()["rm_scores"].sum().item()
    other = AgentLoopOutput(**{name: getattr(row, name) for name in AgentLoopOutput.model_fields})
    assert row_reward(other) is None, "another class may write other scores"


def test_rewards_that_verl_would_mix_up_are_refused():
    plain = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=AgentLoopMetrics())
    rewarded = TreeAgentLoopOutput(**dict(plain), leaf_reward=1.0)
    shared_reward_model = InProcessWorker(lambda _: "a", reward_handles=None)
    shared_reward_model._check_rewards([plain])
    with pytest.raises(ValueError, match="enable_resource_pool=True"):
        shared_reward_model._check_rewards([rewarded, plain])
    InProcessWorker(lambda _: "a", reward_handles=["handle"])._check_rewards([rewarded, plain])


class Teacher:
    """The client of a teacher's servers: the log-prob of a token is its id, negated."""

    def __init__(self):
        self.asked = []

    async def compute_teacher_logprobs_single(self, *, sequence_ids, routing_key, **_of_images):
        self.asked.append((tuple(sequence_ids), routing_key))
        ids = torch.tensor([*sequence_ids[1:], 0])[:, None]
        return ids, -ids.float()


@pytest.mark.parametrize("validate", [False, True], ids=["train", "val"])
def test_a_teacher_is_asked_about_every_leaf(validate, monkeypatch):
    """Verl itself asks about the last row of a session only, and about none of a validation."""
    puts = []

    async def put(**arguments):
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    monkeypatch.setitem(_agent_loop_registry, "forking", {"_target_": "forking_loop.ForkingLoop"})
    worker = InProcessWorker(lambda _: "fine", num_sessions=1)
    worker.distillation_enabled, worker.teacher_key, worker.teacher_server_manager = True, "task", Teacher()
    assert run_sessions(worker, num_sessions=1, agent_name="forking", validate=validate, task="maths") == [None]
    fields = puts[0]["fields"]
    assert len(fields) == 4
    asked = worker.teacher_server_manager.asked
    if validate:
        assert not asked
        assert "teacher_logprobs" not in fields
        return
    assert sorted(asked) == sorted((tuple(row.tolist()), "maths") for row in fields["input_ids"].unbind())
    for row in range(4):
        ids = fields["input_ids"][row]
        assert fields["teacher_logprobs"][row][:-1, 0].tolist() == (-ids[1:]).float().tolist()
        assert fields["teacher_ids"][row][:-1, 0].tolist() == ids[1:].tolist()


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_finite_number_is_refused(reward):
    """Whoever gave it; here a loop, as verl's reward function would."""
    row = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, reward_score=reward)
    worker = InProcessWorker(lambda _: "a", reward_handles=None)
    with pytest.raises(ValueError, match=rf"is {reward}: .*reward\.custom_reward_function"):
        asyncio.run(worker._compute_score([row], kwargs={}))


def test_the_worker_that_runs_sessions_is_a_copy():
    worker = InProcessWorker(lambda _: RuntimeError("x"))
    client = worker.llm_client
    run_sessions(worker, num_sessions=1)
    assert worker.llm_client is client
    assert worker._session is None


@pytest.mark.parametrize(("drift", "num_splices"), [(None, 1), ("heal", 1), ("fork", 0)])
def test_the_option_decides_whether_drift_is_healed_and_one_example_is_logged(drift, num_splices, caplog):
    worker = InProcessWorker(lambda _: "a")
    # Spaces before a full stop are text, whatever the tokenizer's clean-up would make of them.
    assert recording_client(worker).tree._decode(tokenizer().encode("a .", add_special_tokens=False)) == "a ."
    if drift is not None:
        with open_dict(worker.config):
            worker.config.tree = {"drift": drift}
    client = recording_client(worker)
    tree = client.tree
    # Two spellings of one text: the end token, and its characters.
    end = tokenizer().encode("<|im_end|>", add_special_tokens=False)
    letters = [tokenizer().convert_tokens_to_ids(character) for character in "<|im_end|>"]
    tree.complete(tree.begin([5]), letters)
    realignment = tree.realign([5, *end, 6])
    tree.begin(realignment)
    assert len(realignment.splices) == num_splices
    session = Session("u", 0, "train", client, wants_log_probs=False, agent_name="x")
    for _ in range(2):
        worker._tell_drift(session)
    (record,) = [record for record in caplog.records if "<|im_end|>" in record.getMessage()]
    assert ("the recorded ones were sent" in record.getMessage()) is bool(num_splices)


@pytest.mark.parametrize(("abandoned", "num_leaves"), [(None, 0), ("drop", 0), ("keep", 1)])
def test_the_option_decides_whether_answers_that_nobody_read_are_leaves(abandoned, num_leaves):
    worker = InProcessWorker(lambda _: "a")
    if abandoned is not None:
        with open_dict(worker.config):
            worker.config.tree = {"abandoned": abandoned}
    tree = recording_client(worker).tree
    tree.complete(tree.begin([5]), [6])
    tree.leave_out(0, LeftOut.ABANDONED)
    assert len(tree.leaves()) == num_leaves
    assert CaptureReport.of_calls(tree).num_abandoned_leaves == 1 - num_leaves


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_router_hears_whose_prompt_a_call_is(is_deterministic):
    """Under `full_determinism` vLLM gets the id, which must be the same in every training run; a uid is not."""
    worker = InProcessWorker(lambda _: RuntimeError("seen"))
    worker.config.actor_rollout_ref.rollout.full_determinism = is_deterministic
    run_sessions(worker, num_sessions=2)
    found = worker.llm_client.request_ids
    assert [each.partition("@prompt:")[2] for each in found] == ["" if is_deterministic else "u"] * 2


def test_what_servers_had_in_their_prefix_caches_is_counted():
    cached = iter([0, 7, None])
    worker = InProcessWorker(
        lambda _: TokenOutput(token_ids=[5], stop_reason="completed", extra_fields={"num_cached_tokens": next(cached)})
    )
    client = recording_client(worker)
    for length in (8, 9, 10):
        asyncio.run(client.generate("r", prompt_ids=[1] * length, sampling_params={}))
    report = CaptureReport.of_calls(client.tree)
    # A server that says nothing is not one whose cache is empty.
    assert (report.num_prompt_tokens, report.num_cached_tokens) == (17, 7)
    assert capture_metrics(report)["tree/prefix_cache_hit_rate"] == 7 / 17
    assert "tree/prefix_cache_hit_rate" not in capture_metrics(CaptureReport(num_sessions=1))


def test_reports_add_up_and_travel():
    tree = SessionTree()
    tree.complete(tree.begin([1]), [2])
    tree.complete(tree.begin([1, 2]), [3])  # continuation
    tree.complete(tree.begin([1, 5]), [6])  # fork
    tree.complete(tree.begin([1, 2, 3, 4, 2, 3, 9]), [], is_aborted=True)  # continuation
    tree.fail(tree.begin([1, 9]), "gone")  # fork
    tree.complete(tree.begin([1, 2, 8]), [4])  # fork
    report = CaptureReport.of_calls(tree)
    assert report == CaptureReport(
        num_sampled_tokens=4,
        num_calls=6,
        num_continuations=2,
        num_forks=3,
        num_failed_calls=1,
        num_aborted_calls=1,
    )
    failed = FailedSession("u", 0, "gone", 1)
    total = report + CaptureReport(num_sessions=2, failed_sessions=(failed,)) + CaptureReport(num_sessions=1)
    assert (total.num_sessions, total.num_forks, total.failed_sessions) == (3, 3, (failed,))
    assert pickle.loads(pickle.dumps(total)) == total


def test_classes_extend_verls():
    assert issubclass(TreeAgentLoopManager, AgentLoopManagerTQ)
    assert issubclass(TreeAgentLoopWorkerBase, AgentLoopWorkerTQ.__ray_metadata__.modified_class)
