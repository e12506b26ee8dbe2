"""Tables and the figure of what por.py measured, from its JSON lines.

    python benchmarks/report_por.py docs/benchmarks/data/por_cpu.jsonl [--plot docs/por_cpu.png]

Seconds are medians: by the device's clock on CUDA, of the processor on a CPU, which other work on the machine changes
less. A path is compared with the fastest flat one at the same POR. Where none ran there, it is compared with that of
the nearest POR, marked ~.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
# Colours of Okabe and Ito, told apart by the colour-blind.
COLORS = {"tree": "#0072B2", "packs": "#E69F00", "relay": "#009E73"}
STYLES = ("-", "--", ":")
"""Of capacities, the largest first."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the runs of one path took, or why there are none."""

    path: str
    seconds: float
    last: dict[str, Any]  # the last record of a run
    peak_bytes: int | None
    not_run: str | None = None

    @classmethod
    def of_runs(cls, path: str, runs: list[dict[str, Any]], *, seconds_key: str) -> "Measured":
        """Take the median of the timed runs, and the largest peak of all."""
        timed = [run for run in runs if run.get("repetition", 0) > 0]
        reasons = [run["not_run"] for run in runs if "not_run" in run]
        peaks = [run["held_bytes"] + run["peak_bytes"] for run in runs if run.get("peak_bytes") is not None]
        peaks += [run["max_allocated_bytes"] for run in runs if run.get("max_allocated_bytes") is not None]
        return cls(
            path=path,
            seconds=statistics.median(run[seconds_key] for run in timed) if timed else float("nan"),
            last=timed[-1] if timed else {},
            peak_bytes=max(peaks, default=None),
            not_run=None if timed else (reasons or ["the time was over"])[0],
        )


Points = dict[tuple[str, float], dict[str, Measured]]
"""By model and POR, the paths by name."""


def measured_points(records: list[dict[str, Any]]) -> Points:
    """Gather the runs of every point."""
    device = next(record["options"]["device"] for record in records if record["kind"] == "environment")
    runs: dict[tuple[str, float], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["kind"] == "run":
            runs[record["model"], record["por"]][record["path"]].append(record)
    seconds_key = "wall_s" if device == "cuda" else "cpu_s"
    return {
        point: {path: Measured.of_runs(path, each, seconds_key=seconds_key) for path, each in paths.items()}
        for point, paths in sorted(runs.items())
    }


def fastest_flat(points: Points, model: str, por: float) -> tuple[Measured | None, float]:
    """Return the fastest flat path of a model at the nearest POR that has one, and that POR."""
    found = [
        (abs(other - por), measured.seconds, other, measured)
        for (name, other), paths in points.items()
        for path, measured in paths.items()
        if name == model and path.startswith("flat/") and measured.not_run is None
    ]
    if not found:
        return None, por
    *_, other, measured = min(found, key=lambda each: each[:2])
    return measured, other


def _gib(measured: Measured) -> str:
    return "-" if measured.peak_bytes is None else f"{measured.peak_bytes / GIB:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def whole_trees(points: Points) -> list[dict[str, Any]]:
    """Return the table of whole trees, a row for each model and POR."""
    rows = []
    for (model, por), paths in points.items():
        tree = paths.get("tree")
        flat, flat_por = fastest_flat(points, model, por)
        if tree is None or flat is None:
            continue
        row: dict[str, Any] = {"model": model, "POR": f"{por:g}"}
        if tree.not_run:
            rows.append(row | {"F/T": "-", "by FLOPs": "-", "flat s": f"{flat.seconds:.3f}", "tree s": tree.not_run})
            continue
        ratio, by_flops = flat.seconds / tree.seconds, flat.last["flops"] / tree.last["flops"]
        rows.append(
            row
            | {
                "F/T": f"{flat.last['num_tokens'] / tree.last['num_tokens']:.2f}",
                "by FLOPs": f"{by_flops:.2f}",
                "flat s": f"{'' if flat_por == por else '~'}{flat.seconds:.3f}",
                "tree s": f"{tree.seconds:.3f}",
                "flat/tree": f"{ratio:.2f}",
                "of FLOPs": f"{ratio / by_flops:.0%}",
                "MFU flat": _share(flat.last["mfu"]),
                "MFU tree": _share(tree.last["mfu"]),
                "GiB flat": _gib(flat),
                "GiB tree": _gib(tree),
                "kernel": f"{tree.last['attention']}; {flat.path}: {flat.last['attention']}",
            }
        )
    return rows


def limited_trees(points: Points) -> list[dict[str, Any]]:
    """Return the table of packs and sections."""
    rows = []
    for (model, por), paths in points.items():
        flat, _ = fastest_flat(points, model, por)
        for path, measured in paths.items():
            if flat is None or path == "tree" or path.startswith("flat/"):
                continue
            row = {"model": model, "POR": f"{por:g}", "path": path}
            if measured.not_run:
                rows.append(row | {"capacity": "-", "calls": "-", "ERR": "-", "s": measured.not_run})
                continue
            last = measured.last
            rows.append(
                row
                | {
                    "capacity": last["capacity"],
                    "calls": last["num_calls"],
                    "ERR": f"{1 - last['num_tokens'] / flat.last['num_tokens']:.3f}",
                    "s": f"{measured.seconds:.3f}",
                    "flat/path": f"{flat.seconds / measured.seconds:.2f}",
                    "GiB": _gib(measured),
                }
            )
    return rows


def error_rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of errors."""
    rows = []
    for record in records:
        if record["kind"] != "errors":
            continue
        row = {"model": record["model"], "POR": f"{record['por']:g}", "path": record["path"]}
        if "not_run" in record:
            rows.append(row | {"dtype": "-", "gradient": record["not_run"]})
            continue
        row |= {"dtype": record["dtype"], "gradient": f"{record['gradient_error']:.1e}"}
        row |= {"worst parameter": f"{record['worst_parameter_error']:.1e}"}
        row |= {"log-prob rms": f"{record['log_prob_rms_error']:.1e}", "max": f"{record['log_prob_max_error']:.1e}"}
        rows.append(row)
    return rows


def report(records: list[dict[str, Any]]) -> None:
    """Print the tables."""
    points = measured_points(records)
    tables = {
        "whole trees": whole_trees(points),
        "under a capacity": limited_trees(points),
        "errors": error_rows(records),
    }
    for title, rows in tables.items():
        if rows:
            names = list(dict.fromkeys(name for row in rows for name in row))
            print(f"\n{title}")
            print_table([{name: row.get(name, "") for name in names} for row in rows])


def draw(points: Points, *, out: Path) -> None:
    """Draw flat / tree over the POR, a panel for each model, with both bounds."""
    # Imported here, as the tables are wanted on machines without it, too.
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(model for model, _ in points))
    figure, panels = plt.subplots(
        1, len(models), figsize=(1.2 + 4.6 * len(models), 4), layout="constrained", squeeze=False
    )
    for panel, model in zip(panels[0], models, strict=True):
        _draw_model(panel, points, model)
        panel.set_title(f"Qwen3, {model} weights", fontsize=10)
        panel.set_xlabel("POR")
    panels[0][0].set_ylabel("time of flat rows / time")
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _draw_model(panel: "Axes", points: Points, model: str) -> None:
    pors = [por for name, por in points if name == model]
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for por in pors:
        flat, _ = fastest_flat(points, model, por)
        for path, measured in points[model, por].items():
            if flat is None or measured.not_run or path.startswith("flat/"):
                continue
            lines[path].append((por, flat.seconds / measured.seconds))
            if path == "tree":
                lines["1 / (1 - POR)"].append((por, flat.last["num_tokens"] / measured.last["num_tokens"]))
                lines["bound by FLOPs"].append((por, flat.last["flops"] / measured.last["flops"]))
    capacities = sorted({float(path.split("/")[1]) for path in lines if "/" in path and path[0] in "pr"}, reverse=True)
    for name, line in lines.items():
        if name == "1 / (1 - POR)":
            panel.plot(*zip(*line, strict=True), color="black", linewidth=0.8, linestyle=":", label=name, zorder=3)
        elif name == "bound by FLOPs":
            panel.plot(*zip(*line, strict=True), color="#777777", linewidth=0.8, label=name)
        else:
            kind, _, capacity = name.partition("/")
            style = STYLES[capacities.index(float(capacity)) % len(STYLES)] if capacity else "-"
            label = f"{kind}, {capacity} longest paths" if capacity else kind
            width = 1.2 if capacity else 2
            panel.plot(
                *zip(*line, strict=True),
                style,
                color=COLORS[kind],
                marker="o",
                markersize=3,
                linewidth=width,
                label=label,
            )
    panel.set_yscale("log", base=2)
    panel.yaxis.set_major_formatter("{x:g}")
    panel.grid(alpha=0.3)


def main() -> None:
    """Parse the command line, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what por.py wrote")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    options = parser.parse_args()
    records = [json.loads(line) for line in options.data.read_text().splitlines()]
    report(records)
    if options.plot:
        draw(measured_points(records), out=options.plot)


if __name__ == "__main__":
    main()
