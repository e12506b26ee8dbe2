"""Metrics per session, and failures that are never silent."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("verl")

from rollout_hooks.capture.report import CaptureReport, FailedSession
from verl_tree.trainer.told.metrics import (
    capture_metrics,
    describe_cut_prompts,
    describe_failures,
    describe_step,
    describe_validation,
    session_metrics,
    tokens_per_s,
)


def test_session_metrics_by_hand() -> None:
    # Session a_0 has three leaves, the others one; rows in mixed order.
    keys = ["a_0_2", "b_0_0", "a_0_0", "a_1_0", "a_0_1"]
    rewards = np.array([0.0, 1.0, 1.0, 0.5, 1.0])
    metrics = session_metrics(keys, rewards=rewards)
    assert metrics == {
        "tree/sessions": 3.0,
        "tree/leaves_per_session": 5 / 3,
        # last leaves: 0, 1, 0.5; a mean over rows would say 0.7
        "tree/session_reward/mean": 0.5,
        "tree/session_reward/max": 1.0,
        "tree/session_reward/min": 0.0,
        "tree/leaf_reward/mean": pytest.approx((2 / 3 + 1.0 + 0.5) / 3),
        "tree/leaf_reward/max": 1.0,
        "tree/leaf_reward/min": 0.0,
        # b has one leaf; a has 0, .5 and 1
        "tree/equal_reward_groups": 0.5,
    }


def test_metrics_of_roles_by_hand() -> None:
    keys = ["a_0_0", "a_0_1", "a_0_2", "a_1_0", "a_1_1", "b_0_0"]
    rewards = np.array([1.0, 0.0, 0.5, 1.0, 0.25, 1.0])
    roles = {"a_0_0": "p", "a_0_1": "w/1", "a_0_2": "w/1", "a_1_0": "p", "b_0_0": "p"}
    metrics = session_metrics(keys, rewards=rewards, roles=roles)
    plain = session_metrics(keys, rewards=rewards)
    assert {name: value for name, value in metrics.items() if name.startswith("tree/role_")} == {
        "tree/role_reward/p": 1.0,
        "tree/role_leaves/p": 3.0,
        "tree/role_alone/p": 1 / 3,  # that of b
        "tree/role_reward/w/1": 0.25,
        "tree/role_leaves/w/1": 2.0,
        "tree/role_alone/w/1": 0.0,
    }
    # Of a: p, w/1, and the leaf without a role; of b: p. Without roles: a and b.
    assert metrics["tree/equal_reward_groups"] == 3 / 4
    assert plain["tree/equal_reward_groups"] == 1 / 2
    same = plain.keys() - {"tree/equal_reward_groups"}
    assert {name: metrics[name] for name in same} == {name: plain[name] for name in same}


def test_the_last_leaf_is_the_highest_number_not_the_last_text() -> None:
    keys = [f"a_0_{leaf}" for leaf in range(11)]
    assert session_metrics(keys, rewards=np.arange(11.0))["tree/session_reward/mean"] == 10.0


def test_a_group_of_equal_rewards_has_them_in_all_sessions() -> None:
    keys = ["a_0_0", "a_0_1", "a_1_0", "b_0_0", "b_0_1", "b_1_0", "c_0_0", "c_1_0"]
    rewards = np.array([0.5, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0, 0.0])
    metrics = session_metrics(keys, rewards=rewards)
    assert metrics["tree/equal_reward_groups"] == pytest.approx(2 / 3)
    assert (metrics["tree/leaf_reward/max"], metrics["tree/leaf_reward/min"]) == (1.0, 0.0)


def test_capture_metrics_have_the_promised_names() -> None:
    report = CaptureReport(
        num_sessions=7, num_forks=3, num_drifts=2, num_realigned=5, num_rewrites=1, failed_prompts=("a",)
    )
    metrics = capture_metrics(report)
    assert metrics["tree/sessions_ended"] == 7.0
    assert metrics["tree/forks"] == 3.0
    assert metrics["tree/drift"] == 2.0
    assert metrics["tree/realigned"] == 5.0
    assert metrics["tree/rewrites"] == 1.0
    assert metrics["tree/failed_sessions"] == 0.0
    assert metrics["tree/failed_prompts"] == 1.0
    assert set(capture_metrics(report, prefix="val-aux/tree")) == {f"val-aux/{name}" for name in metrics}


def test_every_cause_is_told_once_and_the_commonest_first() -> None:
    failed = [FailedSession("p", session, "ValueError: rare", num_calls=1) for session in range(1)]
    failed += [FailedSession("q", session, "TimeoutError: the tool", num_calls=3) for session in range(4)]
    message = describe_failures(CaptureReport(failed_sessions=tuple(failed), failed_prompts=("q",)))
    assert message.splitlines() == [
        "5 sessions failed; 1 prompts have no trajectory because all their sessions failed",
        "  4 x TimeoutError: the tool (first: q_0)",
        "  1 x ValueError: rare (first: p_0)",
    ]


def test_a_cause_is_told_with_its_place_and_two_places_are_two_causes() -> None:
    cause, told = "KeyError: 'plan'", 'File "agents.py", line 41, in solve\n  return table["plan"]'
    failed = [FailedSession("p", session, cause, num_calls=1, place="agents.py:41") for session in range(3)]
    # Two workers tell it, the second of which was drained later.
    failed[1:] = [replace(each, traceback=told) for each in failed[1:]]
    failed += [FailedSession("q", 0, cause, num_calls=1, place="agents.py:7", traceback="File 7")]
    message = describe_failures(CaptureReport(failed_sessions=tuple(failed)))
    assert message.splitlines()[1:] == [
        "  3 x KeyError: 'plan' (first: p_0)",
        '      File "agents.py", line 41, in solve',
        '        return table["plan"]',
        "  1 x KeyError: 'plan' (first: q_0)",
        "      File 7",
    ]


def test_many_causes_are_counted_and_no_failure_says_nothing() -> None:
    failed = tuple(FailedSession("p", session, f"cause {session}", num_calls=0) for session in range(8))
    assert describe_failures(CaptureReport(failed_sessions=failed)).splitlines()[-1] == "  and 3 further causes"
    assert describe_failures(CaptureReport(num_sessions=9)) is None


def test_tokens_per_second() -> None:
    tokens = {"tree/tokens": 100.0, "tree/flat_tokens": 500.0}
    assert tokens_per_s(tokens, update_s=4.0) == {
        "perf/update_tree_tokens_per_s": 25.0,
        "perf/update_flat_tokens_per_s": 125.0,
    }
    assert tokens_per_s({}, update_s=4.0) == {}
    assert tokens_per_s(tokens, update_s=0.0) == {}  # no update in the critic's warm-up


def test_a_step_in_one_line() -> None:
    metrics = {
        "tree/leaf_reward/mean": 0.531,
        "tree/session_reward/mean": 0.608,
        "tree/leaves_per_session": 2.94,
        "tree/por": 0.863,
        "tree/compression": 7.275,
        "timing_s/step": 5.425,
        "timing_s/gen": 3.178,
        "timing_s/update_actor": 0.978,
    }
    assert describe_step(metrics, step=5, num_steps=30) == (
        "step 5/30: reward 0.53 (leaves), 0.61 (sessions) | 2.9 leaves a session, POR 0.86, 7.3x fewer tokens"
        " | step 5.4 s, generation 3.2 s, update 1.0 s"
    )
    validated = describe_step(metrics | {"val-core/task/reward/mean@1": 0.516}, step=5, num_steps=30)
    assert "0.61 (sessions), validation 0.52 |" in validated
    assert (
        describe_step(dict(list(metrics.items())[:3]), step=1, num_steps=2)
        == "step 1/2: reward 0.53 (leaves), 0.61 (sessions) | 2.9 leaves a session"
    )


def test_a_step_says_what_failed_how_old_it_was_and_how_fast_the_update_ran() -> None:
    metrics = {"tree/leaf_reward/mean": 0.0, "tree/session_reward/mean": 0.0, "tree/leaves_per_session": 1.0}
    more = {"tree/failed_sessions": 8.0, "tree/failed_prompts": 0.0, "tree/async/staleness/mean": 1.26}
    speed = {"timing_s/update_actor": 2.0, "perf/update_tree_tokens_per_s": 12345.6}
    assert describe_step(metrics | more | speed, step=1, num_steps=2) == (
        "step 1/2: reward 0.00 (leaves), 0.00 (sessions) | 8 sessions failed | staleness 1.3 | 1.0 leaves a session"
        " | update 2.0 s, 12,346 tree tokens/s"
    )
    both = describe_step(metrics | more | {"tree/failed_prompts": 2.0}, step=1, num_steps=2)
    assert " | 8 sessions failed, 2 prompts failed | " in both


def test_a_validation_before_training_in_one_line() -> None:
    scores = {"val-core/b/reward/mean@1": 0.25, "val-core/a/reward/mean@1": 0.516, "val-aux/a/reward/best@4": 1.0}
    assert describe_validation(scores, step=0) == "step 0: validation 0.52 a, 0.25 b"
    best = {"val-core/openai/gsm8k/acc/best@4/mean": 0.75, "val-core/openai/gsm8k/acc/mean@4": 0.5}
    assert describe_validation(best, step=0) == "step 0: validation 0.50"
    assert describe_validation({}, step=4) == "step 4: validated"


def test_a_step_says_what_staleness_threw_away_and_nothing_if_that_was_nothing() -> None:
    metrics = {"tree/leaf_reward/mean": 0.5, "tree/session_reward/mean": 0.5, "tree/leaves_per_session": 2.0}
    dropped = {"groups": 2.0, "sessions": 8.0, "leaves": 30.0, "flat_tokens": 12345.0}
    line = describe_step(
        metrics | {f"tree/async/dropped_{name}": value for name, value in dropped.items()}, step=1, num_steps=3
    )
    assert line.endswith(" | dropped as too old: 2 prompts with 30 leaves and 12345 tokens")
    none = {f"tree/async/dropped_{name}": 0.0 for name in dropped}
    assert describe_step(metrics | none, step=1, num_steps=3) == describe_step(metrics, step=1, num_steps=3)


def test_cut_prompts_are_one_message() -> None:
    message = describe_cut_prompts(CaptureReport(cut_prompts=(17, 40, 20)), limit=16)
    assert message == (
        "3 prompts of up to 40 tokens were longer than rollout.prompt_length=16 and lost their beginnings; raise "
        "data.max_prompt_length, or set data.filter_overlong_prompts=true to leave them out"
    )
    assert describe_cut_prompts(CaptureReport(num_sessions=9), limit=16) is None
