"""What an operator looks at: panels, by topic.

Here stand the order of the panels and what they show of verl's own metrics. Which panel shows a metric of this project
stands in the metric's row of verl_tree/trainer/told/metric_table.csv.
"""

from dataclasses import dataclass, replace

from verl_tree.trainer.told.metric_table import METRICS

NUM_COLUMNS = 4
"""Panels beside each other."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot over the steps: of the metrics `keys`, or of those whose names match the regular expression `pattern`."""

    title: str
    keys: tuple[str, ...] = ()
    pattern: str | None = None


_ORDER: dict[str, tuple[Panel, ...]] = {
    "Learning": (
        Panel("Reward of sessions"),
        Panel("Reward of leaves"),
        Panel("Reward of validations", pattern="val-core/.+"),
        Panel("Groups whose rewards are all equal"),
        Panel("Loss", ("actor/loss", "actor/pg_loss")),
        Panel("Gradient norm", ("actor/grad_norm",)),
        Panel("Entropy", ("actor/entropy",)),
        Panel("KL to the policy before, clipped share", ("actor/ppo_kl", "actor/pg_clipfrac")),
    ),
    "Trees and sharing": (
        Panel("Share of tokens saved"),
        Panel("Compression"),
        Panel("Tokens of an update"),
        Panel("Leaves per session"),
        Panel("Depth of the trees"),
        Panel("Kinds of calls"),
    ),
    "Speed and MFU": (
        Panel(
            "Seconds",
            tuple(
                f"timing_s/{part}" for part in ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")
            ),
        ),
        Panel("MFU"),
        Panel("Tokens per second of updates"),
        Panel("Packs"),
        Panel("Fill and gap of packs"),
        Panel("Imbalance of ranks"),
        Panel("Error of the cost model"),
    ),
    "Capture and failures": (
        Panel("Sessions"),
        Panel("Failures"),
        Panel("Leaves lost or cut"),
        Panel("Drift"),
    ),
    "Staleness": (
        Panel(
            "Staleness of rows (weight syncs)",
            ("training/off_policy/trajectory_staleness/mean", "training/off_policy/trajectory_staleness/max"),
        ),
        Panel("Staleness of calls"),
        Panel("Interrupted calls"),
        Panel("Dropped as too old"),
        Panel("Tokens dropped as too old"),
    ),
    "Trust: rollout against training": (
        Panel("Log-probs of rollout and trainer, difference (nats)"),
        Panel("Probabilities, difference", ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max")),
        Panel("Probabilities, correlation", ("training/rollout_actor_probs_pearson_corr",)),
        Panel("KL", ("rollout_corr/kl", "rollout_corr/k3_kl")),
    ),
    "Memory": (
        Panel("Devices (GB)", ("actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb")),
        Panel("Host (GB)", ("actor/perf/cpu_memory_used_gb",)),
        Panel("Store of relayed trees (GiB)"),
    ),
}


def _with_ours(panel: Panel) -> Panel:
    ours = [metric for metrics in METRICS.values() for metric in metrics if metric.panel == panel.title]
    return replace(panel, keys=(*panel.keys, *(name for metric in ours for name in metric.names)))


TOPICS: dict[str, tuple[Panel, ...]] = {topic: tuple(map(_with_ours, panels)) for topic, panels in _ORDER.items()}
"""All panels by topic, in the order in which they are shown."""
