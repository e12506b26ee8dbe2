"""Tables and a figure of what memory_grids.py measured, from its JSON lines.

python benchmarks/report_memory.py docs/benchmarks/data/memory_grids.jsonl [--plot docs/memory_grids.png]

A point meets the goal if its peak is at most 1.1 / compression of that of `flat`, which has all rows in one call, and
the expansion besides. Packs and sections of C tokens may have 1.1 x C / flat tokens of it, and a relay its store. With
a large vocabulary a chunk of logits is the peak, and the goal is missed.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness import markdown_table, print_table, read_records
from matplotlib.axes import Axes

Record = dict[str, Any]

MIB = 2**20
GOAL = 1.1
GRIDS = {"overlap": ("por",), "group": ("prefix_len", "ratio", "group_size"), "vocabulary": ("por",)}
"""Names of the points of each grid."""
TREE_PATHS = ("tree", "packs/1.5", "relay/1.5")
# Colours of Okabe and Ito, told apart by the colour-blind.
COLORS = {"flat": "#777777", "flat/1.5": "#BBBBBB", "tree": "#009E73", "packs/1.5": "#E69F00", "relay/1.5": "#0072B2"}
LABELS = {
    "flat": "flat, all rows in one call",
    "flat/1.5": "flat, micro-batches of 1.5 longest paths",
    "tree": "tree in one pack",
    "packs/1.5": "packs of 1.5 longest paths",
    "relay/1.5": "relay, sections of 1.5 longest paths",
}
RATIO_STYLES = {1: "-", 4: "--", 16: ":"}


class Measured:
    """The records of a file, by their point and path."""

    def __init__(self, records: list[Record]) -> None:
        self._records = [record for record in records if record["kind"] == "memory"]

    def points(self, grid: str, **wanted: Any) -> list[Record]:
        """Return the `flat` records of a grid, one for each point, in the order of the file."""
        wanted = {"grid": grid, "path": "flat", **wanted}
        return [record for record in self._records if wanted.items() <= record.items()]

    def at(self, point: Record, path: str) -> Record | None:
        """Return another path at a point of `points`, or None if it was left out."""
        names = ("grid", "por", "group_size", "prefix_len", "ratio", "is_checkpointed")
        wanted = {name: point[name] for name in names if name in point} | {"path": path}
        return next((record for record in self._records if wanted.items() <= record.items()), None)


def share(record: Record, flat: Record) -> float:
    """Return the peak over that which the tokens of one call have in `flat`, store and expansion taken off."""
    own = record["peak_bytes"] - record["expansion_bytes"] - record.get("store_bytes", 0)
    num_tokens = record["num_tokens"] if record["capacity"] is None else record["capacity"]
    return own / (flat["peak_bytes"] * num_tokens / record["num_flat_tokens"])


def table(measured: Measured, grid: str, *names: str, **wanted: Any) -> list[dict[str, str]]:
    """Return the rows of a grid's table: peaks and saved bytes in MiB, and in brackets the `share` of each peak."""
    rows = []
    for flat in measured.points(grid, **wanted):
        tree = measured.at(flat, "tree")
        assert tree is not None, flat
        row = {name.replace("_", " "): f"{flat[name]:,g}" for name in names}
        row["checkpointing"] = "yes" if flat["is_checkpointed"] else "no"
        row["compression"] = f"{flat['num_flat_tokens'] / tree['num_tokens']:.2f}"
        row |= {"flat": _mib(flat["peak_bytes"]), "flat saved": _mib(flat["saved_bytes"])}
        for path in ("flat/1.5", *TREE_PATHS):
            record = measured.at(flat, path)
            row[path] = "-" if record is None else f"{_mib(record['peak_bytes'])} ({share(record, flat):.2f})"
            if path == "tree":
                row["tree saved"] = _mib(tree["saved_bytes"])
        rows.append(row)
    return rows


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f}"


def page_tables(measured: Measured) -> dict[str, str]:
    """Return the tables of docs/measurements.md: the first grid, with gradient checkpointing."""
    rows = table(measured, "overlap", "por", is_checkpointed=True)
    for row in rows:
        for name in ("checkpointing", "flat saved", "flat/1.5", "tree saved"):
            del row[name]
    return {"overlap": markdown_table(rows)}


def shares(measured: Measured) -> dict[tuple[str, str], list[float]]:
    """Return the shares of each path at the points of each grid."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for grid in GRIDS:
        for flat in measured.points(grid):
            for path in TREE_PATHS:
                if (record := measured.at(flat, path)) is not None:
                    found[grid, path].append(share(record, flat))
    return dict(found)


def report(measured: Measured) -> None:
    """Print the tables of all grids, and where the goal is met."""
    for grid, names in GRIDS.items():
        if rows := table(measured, grid, *names):
            print(f"\n{grid}: peaks in MiB (over what its tokens have in flat)")
            print_table(rows)
    for (grid, path), each in shares(measured).items():
        num_met = sum(one <= GOAL for one in each)
        print(f"{grid}, {path}: goal of {GOAL} met at {num_met} of {len(each)} points, worst {max(each):.3f}")


def draw(measured: Measured, *, out: Path) -> None:
    """Draw the peaks over the POR above, and over the group size below."""
    figure = plt.figure(figsize=(11, 8.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    panels = above.subplots(1, 2, sharey=True)
    for panel, is_checkpointed in zip(panels, (False, True), strict=True):
        _draw_overlap(panel, measured, is_checkpointed=is_checkpointed)
    panels[0].set_ylabel("peak beyond weights and gradients, MiB")
    handles, labels = panels[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    prefix_lens = sorted({point["prefix_len"] for point in measured.points("group")})
    panels = below.subplots(1, len(prefix_lens), sharey=True, squeeze=False)[0]
    for panel, prefix_len in zip(panels, prefix_lens, strict=True):
        _draw_groups(panel, measured, prefix_len=prefix_len)
    panels[0].set_ylabel("peak, MiB")
    handles, labels = panels[0].get_legend_handles_labels()
    below.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _draw_overlap(panel: Axes, measured: Measured, *, is_checkpointed: bool) -> None:
    points = measured.points("overlap", is_checkpointed=is_checkpointed)
    for path in COLORS:
        found = [(point["por"], record) for point in points if (record := measured.at(point, path))]
        peaks = [record["peak_bytes"] / MIB for _, record in found]
        panel.plot([por for por, _ in found], peaks, color=COLORS[path], marker="o", markersize=4, label=LABELS[path])
    ideal = [point["peak_bytes"] / MIB * (1 - point["por"]) for point in points]
    panel.plot([point["por"] for point in points], ideal, ":", color="black", label="flat / compression", zorder=3)
    panel.set_title(f"gradient checkpointing {'on' if is_checkpointed else 'off'}", fontsize=10)
    panel.set_xlabel("POR")
    _log_scale(panel)


def _draw_groups(panel: Axes, measured: Measured, *, prefix_len: int) -> None:
    for ratio, style in RATIO_STYLES.items():
        points = measured.points("group", is_checkpointed=True, prefix_len=prefix_len, ratio=ratio)
        for path in ("flat", "tree"):
            records = [measured.at(point, path) for point in points]
            peaks = [record["peak_bytes"] / MIB for record in records if record is not None]
            label = f"{path}, prefix / suffix {ratio}"
            sizes = [point["group_size"] for point in points]
            panel.plot(sizes, peaks, style, color=COLORS[path], marker="o", markersize=4, label=label)
    panel.set_title(f"prefix of {prefix_len:,} tokens, checkpointing on", fontsize=10)
    panel.set_xlabel("group size")
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter("{x:.0f}")
    _log_scale(panel)


def _log_scale(panel: Axes) -> None:
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.3)


def main() -> None:
    """Parse the command line, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what memory_grids.py wrote")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    options = parser.parse_args()
    measured = Measured(read_records(options.data))
    report(measured)
    if options.plot:
        draw(measured, out=options.plot)


if __name__ == "__main__":
    main()
