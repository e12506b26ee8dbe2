"""The trainer's `tree/...` metrics: per session instead of per row, what capture saw, what failed and why.

What capture saw is a flow: it counts the sessions that ended since the last report. In the asynchronous modes these are
not the sessions of the trained rows (`tree/sessions`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from textwrap import indent

import numpy as np

from rollout_hooks.capture.report import CaptureReport, FailedSession
from verl_tree.trainer.row_keys import parse_row_key

_SCORES = "val-core/"
_MAX_CAUSES_SHOWN = 5


def session_metrics(
    keys: Sequence[str], *, rewards: np.ndarray, roles: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Return metrics over sessions, from R row keys without padding rows, their rewards (R,), and the roles of keys.

    `tree/session_reward/...` is over the sessions' last leaves: the loop's own final outputs, which validation scores.
    In `tree/leaf_reward/mean` every session has the same weight, as in `tree_grpo`. A group counts in
    `tree/equal_reward_groups` if its leaves, of all of its sessions, have one reward; the leaves of a role are a group.
    """
    roles = roles or {}
    leaf_rewards: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    group_rewards: dict[tuple[str, str | None], set[float]] = defaultdict(set)
    for key, reward in zip(keys, rewards.tolist(), strict=True):
        row = parse_row_key(key)
        leaf_rewards[row.uid, row.session].append((row.leaf, reward))
        group_rewards[row.uid, roles.get(key)].add(reward)
    final = [max(leaves)[1] for leaves in leaf_rewards.values()]
    means = [np.mean([reward for _, reward in leaves]) for leaves in leaf_rewards.values()]
    return {
        "tree/sessions": float(len(final)),
        "tree/leaves_per_session": len(keys) / len(final),
        "tree/session_reward/mean": float(np.mean(final)),
        "tree/session_reward/max": float(np.max(final)),
        "tree/session_reward/min": float(np.min(final)),
        "tree/leaf_reward/mean": float(np.mean(means)),
        "tree/leaf_reward/max": float(np.max(rewards)),
        "tree/leaf_reward/min": float(np.min(rewards)),
        "tree/equal_reward_groups": float(np.mean([len(found) == 1 for found in group_rewards.values()])),
    } | _role_metrics(keys, rewards=rewards, roles=roles)


def _role_metrics(keys: Sequence[str], *, rewards: np.ndarray, roles: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics of each role; the table has them under the name ROLE."""
    leaves: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    of_prompt: dict[tuple[str, str], int] = Counter()
    for key, reward in zip(keys, rewards.tolist(), strict=True):
        if key in roles:
            row = parse_row_key(key)
            leaves[roles[key]][row.uid, row.session].append(reward)
            of_prompt[row.uid, roles[key]] += 1
    metrics: dict[str, float] = {}
    for role, sessions in sorted(leaves.items()):
        num_leaves = sum(map(len, sessions.values()))
        num_lone = sum(num == 1 for (_, named), num in of_prompt.items() if named == role)
        metrics[f"tree/role_reward/{role}"] = float(np.mean([np.mean(each) for each in sessions.values()]))
        metrics[f"tree/role_leaves/{role}"] = float(num_leaves)
        metrics[f"tree/role_alone/{role}"] = num_lone / num_leaves
    return metrics


def capture_metrics(report: CaptureReport, *, prefix: str = "tree") -> dict[str, float]:
    """Return what the agent loops did since the last report; all 0 if stored rollouts were replayed."""
    counts = {
        "sessions_ended": report.num_sessions,
        "sampled_tokens": report.num_sampled_tokens,
        "calls": report.num_calls,
        "continuations": report.num_continuations,
        "forks": report.num_forks,
        "rewrites": report.num_rewrites,
        "drift": report.num_drifts,
        "realigned": report.num_realigned,
        "failed_calls": report.num_failed_calls,
        "aborted_calls": report.num_aborted_calls,
        "dropped_leaves": report.num_dropped_leaves,
        "abandoned_leaves": report.num_abandoned_leaves,
        "truncated_leaves": report.num_truncated_leaves,
        "failed_sessions": len(report.failed_sessions),
        "failed_prompts": len(report.failed_prompts),
        "retried_prompts": report.num_retried_prompts,
    }
    found = {f"{prefix}/{name}": float(count) for name, count in counts.items()}
    if report.num_prompt_tokens:
        found[f"{prefix}/prefix_cache_hit_rate"] = report.num_cached_tokens / report.num_prompt_tokens
    return found


def describe_failures(report: CaptureReport) -> str | None:
    """Return one message about all that failed; None if nothing failed.

    Each cause is told once, with the number of sessions, the first of them and the place in the user's code.
    """
    if not report.failed_sessions and not report.failed_prompts:
        return None
    sessions_of: dict[tuple[str, str], list[FailedSession]] = defaultdict(list)
    for failed in report.failed_sessions:
        sessions_of[failed.cause, failed.place].append(failed)
    lines = [
        f"{len(report.failed_sessions)} sessions failed; "
        f"{len(report.failed_prompts)} prompts have no trajectory because all their sessions failed"
    ]
    by_frequency = sorted(sessions_of.values(), key=lambda sessions: -len(sessions))
    for sessions in by_frequency[:_MAX_CAUSES_SHOWN]:
        first = sessions[0]
        lines.append(f"  {len(sessions)} x {first.cause} (first: {first.uid}_{first.session_id})")
        tracebacks = [failed.traceback for failed in sessions if failed.traceback]
        lines += [indent(text, " " * 6) for text in tracebacks[:1]]
    if len(by_frequency) > _MAX_CAUSES_SHOWN:
        lines.append(f"  and {len(by_frequency) - _MAX_CAUSES_SHOWN} further causes")
    return "\n".join(lines)


def describe_cut_prompts(report: CaptureReport, *, limit: int) -> str | None:
    """Return one message about prompts longer than `limit` tokens, which verl cut; None if there were none."""
    if not report.cut_prompts:
        return None
    return (
        f"{len(report.cut_prompts)} prompts of up to {max(report.cut_prompts)} tokens were longer than "
        f"rollout.prompt_length={limit} and lost their beginnings; raise data.max_prompt_length, or set "
        "data.filter_overlong_prompts=true to leave them out"
    )


def describe_step(metrics: Mapping[str, float], *, step: int, num_steps: int) -> str:
    """Return one line for people: is the agent learning, what failed, what do the trees save, how fast is it?

    For example `step 5/30: reward 0.53 (leaves), 0.61 (sessions), validation 0.52 | 3 sessions failed | 3.0 leaves a
    session, POR 0.86, 7.3x fewer tokens, 63% live | step 5.4 s, generation 3.2 s, update 1.0 s, 4,161 tree
    tokens/s`. What was not measured, and what is zero as it should be, is left out.
    """
    leaves, sessions = metrics["tree/leaf_reward/mean"], metrics["tree/session_reward/mean"]
    reward = [f"reward {leaves:.2f} (leaves)", f"{sessions:.2f} (sessions)", *_validation(metrics)]
    lost = {"sessions": "tree/failed_sessions", "prompts": "tree/failed_prompts"}
    failed = [f"{metrics[key]:.0f} {name} failed" for name, key in lost.items() if metrics.get(key)]
    stale = [f"staleness {metrics[key]:.1f}" for key in ("tree/async/staleness/mean",) if key in metrics]
    tree = [f"{metrics['tree/leaves_per_session']:.1f} leaves a session"]
    if "tree/por" in metrics:
        tree += [f"POR {metrics['tree/por']:.2f}", f"{metrics['tree/compression']:.1f}x fewer tokens"]
    if metrics.get("tree/live_tokens", 1.0) < 1.0:
        tree.append(f"{metrics['tree/live_tokens']:.0%} live")
    seconds = {"step": "timing_s/step", "generation": "timing_s/gen", "update": "timing_s/update_actor"}
    times = [f"{name} {metrics[key]:.1f} s" for name, key in seconds.items() if key in metrics]
    if "perf/update_tree_tokens_per_s" in metrics:
        times.append(f"{metrics['perf/update_tree_tokens_per_s']:,.0f} tree tokens/s")
    dropped = []
    if metrics.get("tree/async/dropped_groups"):
        groups, leaves, tokens = (metrics[f"tree/async/dropped_{name}"] for name in ("groups", "leaves", "flat_tokens"))
        dropped = [f"dropped as too old: {groups:.0f} prompts with {leaves:.0f} leaves and {tokens:.0f} tokens"]
    parts = (reward, failed, stale, tree, times, dropped)
    return f"step {step}/{num_steps}: " + " | ".join(", ".join(part) for part in parts if part)


def describe_validation(metrics: Mapping[str, float], *, step: int) -> str:
    """Return one line about a validation that no step precedes."""
    return f"step {step}: {', '.join(_validation(metrics)) or 'validated'}"


def validation_keys(names: Iterable[str]) -> dict[str, str]:
    """Return verl's key of the mean validation reward of each data source, `val-core/SOURCE/reward/mean@1` for one."""
    found = sorted(name for name in set(names) if name.startswith(_SCORES) and "/mean@" in name)
    return {name.removeprefix(_SCORES).rsplit("/", 2)[0]: name for name in found}


def _validation(metrics: Mapping[str, float]) -> list[str]:
    keys = validation_keys(metrics)
    shown = [f"{metrics[key]:.2f}{f' {source}' if len(keys) > 1 else ''}" for source, key in keys.items()]
    return [f"validation {', '.join(shown)}"] if shown else []


def tokens_per_s(metrics: Mapping[str, float], *, update_s: float) -> dict[str, float]:
    """Return the tree and flat tokens of all epochs per second of the update; nothing if no update ran."""
    if "tree/tokens" not in metrics or update_s <= 0:
        return {}
    return {
        "perf/update_tree_tokens_per_s": metrics["tree/tokens"] / update_s,
        "perf/update_flat_tokens_per_s": metrics["tree/flat_tokens"] / update_s,
    }
