"""Makes docs/metrics.md from the table in `verl_tree.trainer.told.metric_table`.

    python scripts/make_metrics.py [--check]

`--check` changes nothing and fails if the page is out of date.
"""

from made_pages import ROOT, write_or_check

from verl_tree.trainer.told.metric_table import CRITIC, MADE, METRICS, VALIDATION, Metric

PAGE = ROOT / "docs" / "metrics.md"

HEADER = f"""# Metrics

What a run logs beside verl's own metrics, in the words of the [glossary](glossary.md). The tables are made from
[`metric_table.csv`](../verl_tree/trainer/told/metric_table.csv) by `python scripts/make_metrics.py`. A metric
that does not apply is not logged. [Dashboards](dashboards.md) show the most important ones.

¹: of the actor's update, with `{CRITIC}...` for the critic's. ²: of training, with `{VALIDATION}...` for a
validation's.

How ranks, mini-batches and updates make the value of a step:

"""

MFU = """
## What verl's own metrics do not say

- `response_length/clip_ratio` and `prompt_length/clip_ratio` compare with the longest row of the batch, not with the
  limit. Where all prompts have one length, the second is 1. What was cut to the limit is in `tree/truncated_leaves`.
- `perf/throughput` and `perf/total_num_tokens` count flat tokens. What was computed is `tree/packed_tokens`.

Rows of different prompts that begin alike, as with a common system prompt, are one tree. It may exceed the capacity
although the rows of each prompt do not, and is then relayed.

## MFU

verl (0.9.1) takes the work from the lengths of all flat rows: `perf/mfu/actor_flat_equivalent`. `perf/mfu/actor` counts
what was computed ([`update_flops.py`](../verl_tree/trainer/told/update_flops.py)), in runs with `tree.enabled=false`,
too:

    FLOPs = verl's estimate of the rows - verl's estimate of what each shares with the row before it in its pack
            - embedding and head at every token + head where it runs

- The estimate of each type of model is verl's, so the layers of a row that shares nothing count exactly as in verl.
- verl counts a product with the embedding, which is a look-up, and one with the head, for every token. Here the first
  counts nothing, and the second where a score is read.
- A pack that runs flat counts all of its rows, a relayed tree each token once. What runs twice is no progress and does
  not count: the spine, activations recomputed by gradient checkpointing. Rows that no loss reads do not count either.
- Weights that LoRA freezes count as trained ones, and vision towers not at all. A model that verl's counter does not
  know has 0. verl takes every CPU for one of 448 GFLOP/s: compare numbers of one machine only.

The quotient of both numbers is what sharing saves ([four steps of a run](measurements.md#mfu)).
"""


def page() -> str:
    """Return the page: a table for each section."""
    made = "".join(f"- *{name}*: {meaning}\n" for name, meaning in MADE.items())
    tables = "".join(
        f"\n## {section}\n\n| metric | unit | value of a step | meaning | what to do |\n|---|---|---|---|---|\n"
        + "".join(map(_row, metrics))
        for section, metrics in METRICS.items()
    )
    return HEADER + made + tables + MFU


def _row(metric: Metric) -> str:
    mark = {"": "", CRITIC: " ¹", VALIDATION: " ²"}[metric.also]
    names = ", ".join(f"`{name}`" for name in metric.names) + mark
    meaning = metric.meaning.replace("|", "\\|")
    return f"| {names} | {metric.unit} | {metric.made} | {meaning} | {metric.advice} |\n"


if __name__ == "__main__":
    write_or_check(PAGE, page, by="make_metrics.py", description=__doc__)
