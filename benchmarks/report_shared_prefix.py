"""Tables and the figure of what shared_prefix.py measured, and the costs of the paper's sizes by formula.

    python benchmarks/report_shared_prefix.py docs/benchmarks/data/prefix_grouper.jsonl [--plot docs/prefix_grouper.png]

Seconds are medians of the processor's. All quotients are of flat rows over the path: how many times more they take.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import print_table, read_records, report_options
from por_models import model_flops, new_model
from prefix_costs import repeated, shared
from transformers import PreTrainedModel

PAPER_SIZE = "8B"
PAPER_GROUPS, PAPER_PROMPTS, PAPER_RATIOS = (2, 4, 8, 16), (4096, 8192, 16_384), (1, 4, 16)
# Colours of Okabe and Ito, told apart by the colour-blind.
COLORS = ("#E69F00", "#009E73", "#0072B2")
"""Of prompt lengths, the shortest first."""
STYLES = {"prompt": ("-", "ours"), "published": (":", "prefix-grouper")}

Case = dict[str, dict[str, Any]]
"""The records of a case by path."""


def cases_of(records: Sequence[dict[str, Any]], kind: str, *names: str) -> dict[tuple[Any, ...], Case]:
    """Gather the records of a kind by case, which these names tell, in the order measured."""
    cases: dict[tuple[Any, ...], Case] = defaultdict(dict)
    for record in records:
        if record["kind"] == kind:
            case = tuple(record[name] for name in names)
            cases[case][record["path"]] = record | {"seconds": statistics.median(record["cpu_s"])}
    return cases


def quotient(case: Case, path: str, name: str) -> float:
    """Return what flat rows take over what a path takes."""
    return case["none"][name] / case[path][name]


def formulas() -> list[dict[str, Any]]:
    """Return the table of the paper's sizes: forward and backward of Qwen3-8B by formula."""
    model = model_of(PAPER_SIZE)
    rows = []
    for prompt_len, ratio in itertools.product(PAPER_PROMPTS, PAPER_RATIOS):
        response_len = prompt_len // ratio
        row: dict[str, Any] = {"prompt": prompt_len, "response": response_len}
        for num_rows in PAPER_GROUPS:
            flat, tree = (
                model_flops(model, count(num_rows, prompt_len=prompt_len, response_len=response_len))
                for count in (repeated, shared)
            )
            row[f"G = {num_rows}"] = f"{flat / 1e15:.2f} / {tree / 1e15:.2f} = {flat / tree:.2f}"
        rows.append(row)
    return rows


def model_of(size: str) -> PreTrainedModel:
    """Make a model without storage, for its sizes."""
    return new_model(size, dtype=torch.bfloat16, device=torch.device("meta"))


def grid(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of groups that share their prompt only."""
    rows = []
    for (prompt_len, response_len, num_rows), case in cases_of(
        records, "grid", "prompt_len", "response_len", "num_rows"
    ).items():
        row = {"prompt": prompt_len, "response": response_len, "G": num_rows}
        row |= {"tokens": f"{quotient(case, 'prompt', 'num_tokens'):.2f}"}
        for path in (path for path in STYLES if path in case):
            label = STYLES[path][1]
            row[f"FLOPs, {label}"] = f"{quotient(case, path, 'flops'):.2f}"
            row[f"bytes, {label}"] = f"{quotient(case, path, 'peak_bytes'):.2f}"
            row[f"time, {label}"] = f"{quotient(case, path, 'seconds'):.2f}"
        rows.append(row)
    return rows


def trees(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of groups of agents."""
    rows = []
    for (shape, num_rows), case in cases_of(records, "trees", "shape", "num_rows").items():
        for path, record in case.items():
            rows.append(
                {
                    "shape": f"{shape}, {num_rows} rows",
                    "tree.sharing": "(flat)" if path == "none" else path,
                    "tokens": f"{record['num_tokens']:,}",
                    "GFLOP": f"{record['flops'] / 1e9:.1f}",
                    "fewer": f"{quotient(case, path, 'flops'):.2f}",
                    "MB": f"{record['peak_bytes'] / 1e6:.0f}",
                    "less": f"{quotient(case, path, 'peak_bytes'):.2f}",
                    "s": f"{record['seconds']:.2f}",
                    "faster": f"{quotient(case, path, 'seconds'):.2f}",
                }
            )
    return rows


def report(records: Sequence[dict[str, Any]]) -> None:
    """Print the tables."""
    tables = {
        f"By formula, Qwen3-{PAPER_SIZE}, forward and backward: PFLOP repeated / shared": formulas(),
        "Groups with one prompt: flat / path": grid(records),
        "Groups of agents": trees(records),
    }
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(rows)
    errors = [record["gradient_error"] for record in records if "gradient_error" in record]
    print(f"\nLargest relative distance of a gradient from that of flat rows: {max(errors):.1e}")


def draw(records: Sequence[dict[str, Any]], *, out: Path) -> None:
    """Draw what sharing takes of what repeating takes, over the ratio of prompt and response."""
    # Imported here, as the tables are wanted on machines without it, too.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = cases_of(records, "grid", "prompt_len", "response_len", "num_rows")
    prompt_lens = sorted({prompt_len for prompt_len, _, _ in cases})
    group_sizes = sorted({num_rows for _, _, num_rows in cases})
    measures = {"flops": "FLOPs", "peak_bytes": "peak memory", "seconds": "time"}
    figure, panels = plt.subplots(
        len(measures), len(group_sizes), figsize=(11, 7.5), layout="constrained", sharex=True, sharey=True
    )
    for (name, label), row in zip(measures.items(), panels, strict=True):
        row[0].set_ylabel(f"{label} / repeated")
        for num_rows, panel in zip(group_sizes, row, strict=True):
            panel.axhline(1 / num_rows, color="black", linewidth=0.8, linestyle="--", label="1 / G")
            for (path, (style, who)), (prompt_len, color) in itertools.product(
                STYLES.items(), zip(prompt_lens, COLORS, strict=False)
            ):
                line = [
                    (prompt_len / response_len, 1 / quotient(case, path, name))
                    for (its_len, response_len, its_rows), case in cases.items()
                    if (its_len, its_rows) == (prompt_len, num_rows) and path in case
                ]
                if line:
                    title = f"{who}, prompt of {prompt_len:,}"
                    panel.plot(*zip(*sorted(line), strict=True), style, color=color, marker="o", ms=3, label=title)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
            panel.set_ylim(0, 1.05)
            panel.grid(alpha=0.3)
    for num_rows, panel, last in zip(group_sizes, panels[0], panels[-1], strict=True):
        panel.set_title(f"G = {num_rows}", fontsize=10)
        last.set_xlabel("prompt / response")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(out, dpi=90)
    plt.close(figure)


def main() -> None:
    """Parse the command line, print and draw."""
    options = report_options(__doc__)
    records = read_records(options.data)
    report(records)
    if options.plot:
        draw(records, out=options.plot)


if __name__ == "__main__":
    main()
