"""The trainer's `tree/...` metrics: per session instead of per row, what capture saw, what failed and why.

What capture saw is a flow: it counts the sessions that ended since the last report. In the asynchronous modes these are
not the sessions of the trained rows (`tree/sessions`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rollout_hooks.capture.report import CaptureReport
from verl_tree.trainer.batching import parse_row_key

_MAX_CAUSES_SHOWN = 5


def session_metrics(keys: Sequence[str], *, rewards: np.ndarray) -> dict[str, float]:
    """Return metrics over sessions, from R row keys without padding rows and their rewards (R,).

    `tree/session_reward/...` is over the sessions' last leaves: the loop's own final outputs, which validation scores.
    In `tree/leaf_reward/mean` every session has the same weight, as in `tree_grpo`.
    """
    leaf_rewards: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for key, reward in zip(keys, rewards.tolist(), strict=True):
        row = parse_row_key(key)
        leaf_rewards[row.uid, row.session].append((row.leaf, reward))
    final = [max(leaves)[1] for leaves in leaf_rewards.values()]
    means = [np.mean([reward for _, reward in leaves]) for leaves in leaf_rewards.values()]
    return {
        "tree/sessions": float(len(final)),
        "tree/leaves_per_session": len(keys) / len(final),
        "tree/session_reward/mean": float(np.mean(final)),
        "tree/session_reward/max": float(np.max(final)),
        "tree/session_reward/min": float(np.min(final)),
        "tree/leaf_reward/mean": float(np.mean(means)),
    }


def capture_metrics(report: CaptureReport, *, prefix: str = "tree") -> dict[str, float]:
    """Return what the agent loops did since the last report; all 0 if stored rollouts were replayed."""
    counts = {
        "sessions_ended": report.num_sessions,
        "calls": report.num_calls,
        "continuations": report.num_continuations,
        "forks": report.num_forks,
        "rewrites": report.num_rewrites,
        "drift": report.num_drifts,
        "realigned": report.num_realigned,
        "failed_calls": report.num_failed_calls,
        "aborted_calls": report.num_aborted_calls,
        "dropped_leaves": report.num_dropped_leaves,
        "truncated_leaves": report.num_truncated_leaves,
        "failed_sessions": len(report.failed_sessions),
        "failed_prompts": len(report.failed_prompts),
    }
    return {f"{prefix}/{name}": float(count) for name, count in counts.items()}


def describe_failures(report: CaptureReport) -> str | None:
    """Return one message about all that failed, each cause once with its number of sessions; None if nothing failed."""
    if not report.failed_sessions and not report.failed_prompts:
        return None
    sessions_of: dict[str, list[str]] = defaultdict(list)
    for failed in report.failed_sessions:
        sessions_of[failed.cause].append(f"{failed.uid}_{failed.session_id}")
    lines = [
        f"{len(report.failed_sessions)} sessions failed; "
        f"{len(report.failed_prompts)} prompts have no trajectory because all their sessions failed"
    ]
    by_frequency = sorted(sessions_of.items(), key=lambda item: -len(item[1]))
    for cause, sessions in by_frequency[:_MAX_CAUSES_SHOWN]:
        lines.append(f"  {len(sessions)} x {cause} (first: {sessions[0]})")
    if len(by_frequency) > _MAX_CAUSES_SHOWN:
        lines.append(f"  and {len(by_frequency) - _MAX_CAUSES_SHOWN} further causes")
    return "\n".join(lines)


def describe_step(metrics: Mapping[str, float], *, step: int, num_steps: int) -> str:
    """Return one line for people: is the agent learning, and what do the trees save?

    For example `step 5/30: reward 0.53, validation 0.52 | 3.0 leaves a session, POR 0.86, 7.3x fewer tokens`. What was
    not measured is left out.
    """
    validation = [value for name, value in sorted(metrics.items()) if name.startswith("val-core/")]
    reward = [f"reward {metrics['tree/session_reward/mean']:.2f}"] + [
        f"validation {value:.2f}" for value in validation[:1]
    ]
    tree = [f"{metrics['tree/leaves_per_session']:.1f} leaves a session"]
    if "tree/por" in metrics:
        tree += [f"POR {metrics['tree/por']:.2f}", f"{metrics['tree/compression']:.1f}x fewer tokens"]
    seconds = {"step": "timing_s/step", "generation": "timing_s/gen", "update": "timing_s/update_actor"}
    times = [f"{name} {metrics[key]:.1f} s" for name, key in seconds.items() if key in metrics]
    dropped = []
    if metrics.get("tree/async/dropped_groups"):
        groups, leaves, tokens = (metrics[f"tree/async/dropped_{name}"] for name in ("groups", "leaves", "flat_tokens"))
        dropped = [f"dropped as too old: {groups:.0f} prompts with {leaves:.0f} leaves and {tokens:.0f} tokens"]
    return f"step {step}/{num_steps}: " + " | ".join(", ".join(part) for part in (reward, tree, times, dropped) if part)


def tokens_per_s(metrics: Mapping[str, float], *, update_s: float) -> dict[str, float]:
    """Return the tree and flat tokens of all epochs per second of the update; nothing if no update ran."""
    if "tree/tokens" not in metrics or update_s <= 0:
        return {}
    return {
        "perf/update_tree_tokens_per_s": metrics["tree/tokens"] / update_s,
        "perf/update_flat_tokens_per_s": metrics["tree/flat_tokens"] / update_s,
    }
