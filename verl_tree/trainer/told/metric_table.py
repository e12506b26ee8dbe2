"""Every metric that this project logs: its unit, how a step's value is made, what it means, and what to do about it.

`scripts/make_metrics.py` makes docs/metrics.md of it, `verl_tree.dashboards` the dashboards, and tests compare it with
what is logged.
"""

from dataclasses import dataclass

SUM = "sum"
RATIO = "ratio of sums"
MAX = "maximum"
LAST = "last update"
STEP = "once a step"
MEAN = "mean"

CRITIC, VALIDATION = "critic/", "val-aux/"


@dataclass(frozen=True, slots=True)
class Metric:
    """Metrics that are explained together."""

    names: tuple[str, ...]
    unit: str
    made: str  # How ranks, mini-batches, epochs and updates make the value of a step: a key of `MADE`
    meaning: str
    advice: str = ""
    also: str = ""  # A prefix under which they are logged, too: `CRITIC` or `VALIDATION`
    panel: str = ""  # Title of the panel of the dashboards that shows `names` (verl_tree/dashboards/panels.py)

    @property
    def keys(self) -> tuple[str, ...]:
        """All names under which they are logged."""
        return self.names + tuple(f"{self.also}{name}" for name in self.names if self.also)


MADE = {
    SUM: "added up over ranks, mini-batches, epochs and, in `separate_async`, the updates of a step",
    RATIO: "a quotient of such sums, not a mean of quotients",
    MAX: "the largest of these values",
    LAST: "that of the last update of a step",
    MEAN: "the mean over mini-batches; over updates weighted by their rows, as verl does",
    STEP: "made once, of all that the step trained or saw",
}
"""What the page says of each way to make a value."""


def _of_update(name: str, unit: str, made: str, meaning: str, advice: str = "", *, panel: str = "") -> Metric:
    return Metric((f"tree/{name}",), unit, made, meaning, advice, also=CRITIC, panel=panel)


def _of_capture(name: str, unit: str, meaning: str, advice: str = "", *, panel: str = "") -> Metric:
    return Metric((f"tree/{name}",), unit, STEP, meaning, advice, also=VALIDATION, panel=panel)


def _async(names: str, unit: str, meaning: str, advice: str = "", *, panel: str) -> Metric:
    return Metric(tuple(f"tree/async/{name}" for name in names.split()), unit, STEP, meaning, advice, panel=panel)


METRICS: dict[str, tuple[Metric, ...]] = {
    "What trees save": (
        _of_update(
            "por",
            "share",
            RATIO,
            "POR: 1 - tree tokens / flat tokens; what sharing could save without a capacity",
            "Low: the agent shares little. See `tree/drift` and `tree/rewrites`, and let sessions branch later.",
            panel="Share of tokens saved",
        ),
        _of_update(
            "err",
            "share",
            RATIO,
            "ERR: 1 - packed tokens / flat tokens; what it does save",
            "Far below `tree/por`: packs cut trees. Raise `tree.capacity`, or set `tree.relay=auto`.",
            panel="Share of tokens saved",
        ),
        _of_update(
            "compression",
            "quotient",
            RATIO,
            "flat tokens / packed tokens; the best possible speed-up of what is linear in tokens",
            panel="Compression",
        ),
        _of_update(
            "tokens",
            "tokens",
            SUM,
            "tree tokens: each shared token once, on each rank that has it",
            panel="Tokens of an update",
        ),
        _of_update("flat_tokens", "tokens", SUM, "tokens of all trained rows", panel="Tokens of an update"),
        _of_update(
            "packed_tokens",
            "tokens",
            SUM,
            "tokens that ran forward and backward; with `tree.enabled=false` the flat tokens",
            panel="Tokens of an update",
        ),
        _of_update(
            "nodes", "nodes", SUM, "nodes of the forests", "Many of few tokens: attention has many small calls."
        ),
        _of_update("leaves", "leaves", SUM, "trained rows"),
        _of_update(
            "depth", "nodes", MAX, "nodes on the longest path", "1: nothing branches.", panel="Depth of the trees"
        ),
    ),
    "Speed": (
        Metric(
            ("perf/mfu/actor", "perf/mfu/critic"),
            "share",
            MEAN,
            "FLOPs of what an update computed, over the peak of the devices in its time ([below](#mfu))",
            "Low: see `tree/fill`, `tree/packs_flat`, `tree/rank_imbalance/predicted`.",
            panel="MFU",
        ),
        Metric(
            ("perf/mfu/actor_flat_equivalent", "perf/mfu/critic_flat_equivalent"),
            "share",
            MEAN,
            "verl's own number: FLOPs of the flat rows in the same time",
            "May exceed 1: it counts work that sharing saved. Compare it with that of a flat run.",
            panel="MFU",
        ),
        Metric(
            ("perf/update_tree_tokens_per_s", "perf/update_flat_tokens_per_s"),
            "tokens / s",
            RATIO,
            "`tree/tokens` and `tree/flat_tokens` over the time of the actor's update, on all ranks together; verl's "
            "`perf/throughput` has flat tokens per second of a whole step and GPU",
            panel="Tokens per second of updates",
        ),
        _of_update(
            "packing_s",
            "s",
            SUM,
            "time to find the forest and cut it, on the slowest rank of each mini-batch",
            "More than a few percent of the update: set `tree.packing=heuristic`.",
        ),
        Metric(
            ("timing_s/tree_log",),
            "s",
            STEP,
            "time to fetch and show trees; their files are written beside training",
            "High: raise `tree.show_every`.",
            panel="Seconds",
        ),
    ),
    "Packs": (
        _of_update("packs", "packs", SUM, "packs; sections of relayed trees do not count", panel="Packs"),
        _of_update(
            "packs_flat",
            "packs",
            SUM,
            "packs whose rows ran one by one, because the cost model predicts that to be faster (`tree.gate`)",
            "Most of them: trees do not pay here; compare with `tree.gate=never`.",
            panel="Packs",
        ),
        _of_update(
            "micro_batches", "packs", SUM, "packs and relayed trees of the rank that had most, in each mini-batch"
        ),
        _of_update(
            "gap",
            "share",
            RATIO,
            "packed tokens / lower bound - 1: at least the distance from the best packing",
            "High: raise `tree.capacity`, or set `tree.packing=exact`.",
            panel="Fill and gap of packs",
        ),
        _of_update(
            "fill",
            "share",
            RATIO,
            "packed tokens / what the packs and sections could hold",
            "Low: few rows a rank and mini-batch, or the capacity is larger than needed.",
            panel="Fill and gap of packs",
        ),
    ),
    "Relayed trees, where there are any": (
        _of_update("sections", "sections", SUM, "sections; `tree/err`, `tree/gap` and `tree/fill` count them"),
        _of_update(
            "spine_ratio",
            "share",
            RATIO,
            "spine tokens / tree tokens: what runs forward once more",
            "Near 1: the capacity is far below the paths. Raise it.",
        ),
        _of_update(
            "context_tokens", "tokens", SUM, "context that all sections, and all forwards of the spine, gathered"
        ),
        _of_update(
            "store_gib",
            "GiB",
            MAX,
            "the most that one store of keys, values and gradients held",
            "Near what is free: set `tree.relay_store=host`.",
            panel="Store of relayed trees (GiB)",
        ),
    ),
    "Ranks": (
        _of_update(
            "rank_imbalance/predicted",
            "quotient",
            RATIO,
            "predicted time of the slowest rank / mean over the ranks",
            "Above 1.2: raise `ppo_mini_batch_size`, so that there are more groups to deal.",
            panel="Imbalance of ranks",
        ),
        _of_update(
            "rank_imbalance/measured",
            "quotient",
            RATIO,
            "the same of measured processor time; not measured on a GPU",
            "Far from the prediction: see `tree/cost_model/relative_error`.",
            panel="Imbalance of ranks",
        ),
        Metric(
            ("tree/cut_groups",),
            "groups",
            SUM,
            "groups that lie on several ranks, because these would be too uneven",
            "Many: raise `ppo_mini_batch_size`.",
        ),
        Metric(("tree/cut_tokens",), "tokens", SUM, "shared tokens that are computed again, because of such cuts"),
        _of_update(
            "route_conflicts",
            "share",
            RATIO,
            "with router replay: tree tokens whose rows know routes of different experts / those with routes",
            "More than a few percent: set `tree.route_conflicts=fork`.",
        ),
    ),
    "Cost model": (
        Metric(
            tuple(
                f"tree/cost_model/s_per_{part}"
                for part in ("token", "pair", "scored", "segment", "pack", "spine", "context", "feature")
            ),
            "s",
            LAST,
            "fitted seconds of a token, a visible pair, a scored token, a node (`segment`), a pack, a spine token, "
            "a context token, a feature of an image ([balance](balance.md)); rank 0's; none before eight calls",
            also=CRITIC,
        ),
        _of_update(
            "cost_model/relative_error",
            "share",
            LAST,
            "median of |predicted / measured - 1| over the last 512 calls",
            "Above .3: times are noisy, or other work runs on the devices.",
            panel="Error of the cost model",
        ),
    ),
    "Sessions and rewards": (
        Metric(("tree/sessions",), "sessions", STEP, "sessions of the trained rows", panel="Sessions"),
        Metric(
            ("tree/leaves_per_session",),
            "leaves",
            STEP,
            "rows / sessions",
            "1: the loop does not branch.",
            panel="Leaves per session",
        ),
        Metric(
            tuple(f"tree/session_reward/{name}" for name in ("mean", "max", "min")),
            "reward",
            STEP,
            "reward of the last leaf of each session, which is what a validation scores",
            panel="Reward of sessions",
        ),
        Metric(
            ("tree/leaf_reward/mean",),
            "reward",
            STEP,
            "mean over the leaves of a session, then over sessions",
            panel="Reward of leaves",
        ),
        Metric(
            ("tree/leaf_reward/max", "tree/leaf_reward/min"),
            "reward",
            STEP,
            "the greatest and the least of all leaves",
            panel="Reward of leaves",
        ),
        Metric(
            ("tree/equal_reward_groups",),
            "share",
            STEP,
            "groups whose leaves all have one reward: an estimator that compares the leaves of a group learns nothing "
            "from them",
            "Near 1: the tasks are too easy or too hard. Raise `rollout.n`, or choose other tasks.",
            panel="Groups whose rewards are all equal",
        ),
        Metric(
            ("tree/log_prob_difference",),
            "nats",
            LAST,
            "how far log-probs of rollout engine and trainer are apart, a token; in the first steps only "
            "([why](exactness.md#whether-the-rollout-samples-from-the-policy-that-is-trained))",
            "High: the engine computes with other weights.",
            panel="Log-probs of rollout and trainer, difference (nats)",
        ),
    ),
    "Capture": (
        _of_capture(
            "sessions_ended", "sessions", "sessions that ended since the last step, failed ones too", panel="Sessions"
        ),
        _of_capture(
            "calls", "calls", "calls of the model in them; the next four say [what kind](capture.md#kinds-of-calls)"
        ),
        _of_capture("continuations", "calls", "calls that begin with a whole recorded path", panel="Kinds of calls"),
        _of_capture(
            "forks",
            "calls",
            "calls that leave a path where a text ended",
            "0, and no rewrites: nothing branches.",
            panel="Kinds of calls",
        ),
        _of_capture(
            "rewrites",
            "calls",
            "calls whose prompt has changed text",
            "High: the agent edits its history.",
            panel="Kinds of calls",
        ),
        _of_capture(
            "drift",
            "calls",
            "calls whose prompt has other tokens for the same text, and was not healed",
            "Above 0: raise `tree.drift_max_tokens`; each worker logs one example.",
            panel="Drift",
        ),
        _of_capture("realigned", "calls", "calls whose prompt was healed, whatever their kind", panel="Drift"),
        _of_capture(
            "failed_calls",
            "calls",
            "calls that raised an error",
            "The log of the training run says why.",
            panel="Failures",
        ),
        _of_capture("aborted_calls", "calls", "calls that the server gave up", panel="Failures"),
        _of_capture(
            "dropped_leaves",
            "leaves",
            "leaves without a row: no trained token within the limits, or not finished",
            panel="Leaves lost or cut",
        ),
        _of_capture(
            "truncated_leaves",
            "leaves",
            "rows cut to `rollout.response_length`",
            "Above 0: raise it.",
            panel="Leaves lost or cut",
        ),
        _of_capture(
            "failed_sessions",
            "sessions",
            "sessions that failed",
            "The summary behind the step has each cause.",
            panel="Failures",
        ),
        _of_capture(
            "failed_prompts",
            "prompts",
            "prompts without a trajectory; asynchronous modes draw others in their place",
            panel="Failures",
        ),
    ),
    "Asynchronous modes": (
        _async(
            "staleness/mean staleness/max",
            "weight syncs",
            "since a call of the trained rows began; the mean is over sampled tokens, each shared token once",
            "High: lower `max_off_policy_threshold` or `num_warmup_batches`.",
            panel="Staleness of calls",
        ),
        _async(
            "staleness/first_call staleness/last_call",
            "weight syncs",
            "the same of the first and the last call of each leaf: how much older a tree's beginning is than its ends",
            panel="Staleness of calls",
        ),
        _async("resumed_calls", "calls", "calls that a weight sync interrupted", panel="Interrupted calls"),
        _async(
            "version_span/max",
            "versions",
            "the most versions of the weights that sampled one call",
            panel="Interrupted calls",
        ),
        _async(
            "dropped_groups dropped_sessions dropped_leaves",
            "as named",
            "what was thrown away as too old",
            "Above 0: set `max_off_policy_strategy=wait`.",
            panel="Dropped as too old",
        ),
        _async("dropped_flat_tokens", "tokens", "tokens of these leaves", panel="Tokens dropped as too old"),
        _async("dropped_leaf_len/max", "tokens", "the longest leaf among these", panel="Tokens dropped as too old"),
    ),
}

KEYS = frozenset(key for metrics in METRICS.values() for metric in metrics for key in metric.keys)
"""All names under which something is logged."""
