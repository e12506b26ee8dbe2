"""Makes docs/metrics.md from the table in `verl_tree.trainer.told.metric_table`.

    python scripts/make_metrics.py [--check]

`--check` changes nothing and fails if the page is out of date.
"""

import argparse
import sys
from pathlib import Path

from verl_tree.trainer.told.metric_table import CRITIC, MADE, METRICS, VALIDATION, Metric

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

HEADER = f"""# Metrics

What a run logs beside verl's own metrics, in the words of the [glossary](glossary.md). The tables are made from
[`metric_table.py`](../verl_tree/trainer/told/metric_table.py) by `python scripts/make_metrics.py`. A metric
that does not apply is not logged. [Dashboards](dashboards.md) show the most important ones.

Names marked ¹ are those of the actor's update; `{CRITIC}...` has the critic's. Names marked ² are those of training;
`{VALIDATION}...` has those of a validation.

How ranks, mini-batches and updates make the value of a step:

"""

MFU = """
## What verl's own metrics do not say

- `response_length/clip_ratio` and `prompt_length/clip_ratio` compare with the longest row of the batch, not with the
  limit. Where all prompts have one length, the second is 1. What was cut to the limit is in `tree/truncated_leaves`.
- `perf/throughput` and `perf/total_num_tokens` count flat tokens. What was computed is `tree/packed_tokens`.
- The timers of a step do not cover all of it. What `timing_s/step` has besides is verl's own work between them.

Rows of different prompts that begin alike, as with a common system prompt, are one tree. It may exceed the capacity
although the rows of each prompt do not, and is then relayed.

## MFU

MFU is work per second over the peak of the devices. verl (0.9.1) takes the work from the lengths of all flat rows. In
a tree most of it is not done, so that number says how fast a flat run would have to be, and may exceed 1. Here it is
logged as `perf/mfu/actor_flat_equivalent`, and `perf/mfu/actor` counts what was computed
([`update_flops.py`](../verl_tree/trainer/told/update_flops.py)), in runs with `tree.enabled=false`, too:

    FLOPs = verl's estimate of the rows - verl's estimate of what each shares with the row before it in its pack
            - embedding and head at every token + head where it runs

- The estimate of each type of model is verl's: 6 FLOPs per weight and token, forward and backward. Attention is 6 per
  layer, head, head dimension and square of a row: half of what its products take without a mask, as a causal mask
  shows half. So the layers of a row that shares nothing count exactly as in verl. A shared beginning counts once,
  also with sliding windows, recurrent layers and experts.
- verl counts a product with the embedding, which is a look-up, and one with the output head, for every token. Here
  the first counts nothing, and the second where it runs: at every position with verl's own engine, on trees where a
  score is read. A critic's head has one output.
- A pack that runs flat counts all of its rows. A relayed tree counts each token once.
- What runs twice is no progress and does not count: the spine, activations recomputed by gradient checkpointing,
  scores of attention recomputed in its backward pass. (With them the number would be HFU.) Rows that no loss reads do
  not count either.
- As in verl, weights that LoRA freezes count as trained ones, and vision towers not at all. A model that verl's
  counter does not know has 0.
- verl takes every CPU for one of 448 GFLOP/s, so on a CPU compare numbers of one machine only.

The quotient of both numbers is what sharing saves, times what verl counts of embedding and head and nothing computes.
Tests compare with what torch counts in real updates of packs, sections, flat packs, critics and verl's own engine:
the products of weights are equal, to the last one. What torch counts besides has a closed form, such as the pairs
that a dense mask hides.

The first four steps of the recipe `memory_qa` on two CPU cores that other work shared, 2026-11-23
([data](benchmarks/data/memory_qa_mfu.jsonl); `recipes/memory_qa/run.sh trainer.total_training_steps=4
trainer.test_freq=-1 trainer.val_before_train=false`). While the agent comes to share more, the computed number stays
and the flat-equivalent rises:

| step | 1 | 2 | 3 | 4 |
|---|---|---|---|---|
| `tree/compression` | 3.0 | 2.9 | 4.3 | 4.5 |
| `perf/mfu/actor` | .040 | .046 | .048 | .044 |
| `perf/mfu/actor_flat_equivalent` | .129 | .145 | .220 | .216 |

![Reward, share of tokens saved, seconds of an update, and both numbers, over four steps](memory_qa_mfu.png)
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


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is out of date")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/metrics.md is out of date: run python scripts/make_metrics.py")


if __name__ == "__main__":
    main()
