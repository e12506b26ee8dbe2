"""Tables, checks and the plot of what packing.py measured, from its JSON.

    python benchmarks/report_packing.py docs/benchmarks/data/packing.json [--plot docs/packing.png]

ERR / POR is the share of the potential reuse that is left under a capacity: (flat - packed) / (flat - tree tokens).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from harness import print_table, report_options

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]

ENOUGH_CAPACITY, ENOUGH_REUSE = 4, 0.95
BOUND = "bound"
# Colours of Okabe and Ito, told apart by the colour-blind; markers tell them apart in grey.
STYLES = {
    "arrival_first_fit": ("#E69F00", "v"),
    "single_path": ("#CC79A7", "s"),
    "dfs_first_fit": ("#56B4E9", "^"),
    "deepest_first": ("#009E73", "D"),
    "heuristic": ("#0072B2", "o"),
    "exact": ("#D55E00", "x"),
    BOUND: ("#777777", ""),
}


def optimum_table(rows: list[Row]) -> list[Row]:
    """Return the gaps of every method to the optimum of the small forests."""
    table = []
    for name, is_capped in (("tokens", False), ("tokens, loss terms", True)):
        part = [row for row in rows if (row["max_loss_terms"] is not None) == is_capped]
        for method in part[0]["tokens"]:
            gaps = [row["tokens"][method] / row["optimum"] - 1 for row in part]
            table.append({"caps": name, "forests": len(part), "method": method, **_summary(gaps)})
        bound_gaps = [row["optimum"] / row["lower_bound"] - 1 for row in part]
        table.append({"caps": name, "forests": len(part), "method": "optimum over bound", **_summary(bound_gaps)})
    print(_check("exact is the optimum", all(row["tokens"]["exact"] == row["optimum"] for row in rows)))
    print(_check("the lower bound is below the optimum", all(row["lower_bound"] <= row["optimum"] for row in rows)))
    print(_check("no method is below the optimum", all(min(row["tokens"].values()) >= row["optimum"] for row in rows)))
    return table


def reuse(row: Row, *, method: str) -> float | None:
    """ERR / POR of a method (or of the lower bound, the most that can be reached); None where it gave up."""
    packed = row["lower_bound"] if method == BOUND else row["tokens"][method]
    return None if packed is None else (row["flat_tokens"] - packed) / (row["flat_tokens"] - row["tree_tokens"])


def reuse_of(rows: list[Row], *, shape: str, method: str) -> dict[float, float]:
    """Mean ERR / POR over the seeds by capacity; only capacities at which every seed was solved."""
    result = {}
    for multiple in _unique(rows, "multiple"):
        part = [row for row in rows if row["shape"] == shape and row["multiple"] == multiple]
        values = [reuse(row, method=method) for row in part]
        if None not in values:
            result[multiple] = mean(values)
    return result


def capacity_table(rows: list[Row]) -> list[Row]:
    """Mean ERR / POR of every method for every shape, and the heuristic's mean gap to the lower bound."""
    table, least = [], {}
    for shape in _unique(rows, "shape"):
        part = [row for row in rows if row["shape"] == shape]
        head = {"shape": shape, "leaves": part[0]["leaves"], "POR": f"{mean(row['por'] for row in part):.2f}"}
        for method in STYLES:
            values = reuse_of(rows, shape=shape, method=method)
            cells = {
                f"C={each:g}": f"{values[each]:.3f}" if each in values else "-" for each in _unique(rows, "multiple")
            }
            table.append({**head, "method": method, **cells})
        gaps = {}
        for multiple in _unique(rows, "multiple"):
            here = [row for row in part if row["multiple"] == multiple]
            most = mean(row["tokens"]["heuristic"] / row["lower_bound"] - 1 for row in here)
            gaps[f"C={multiple:g}"] = f"{most:.1%}"
        table.append({**head, "method": "gap to bound", **gaps})
        enough = [row for row in part if row["multiple"] >= ENOUGH_CAPACITY]
        least[shape] = [min(reuse(row, method=method) for row in enough) for method in ("heuristic", BOUND)]
    print(f"ERR / POR of the heuristic at C >= {ENOUGH_CAPACITY} longest paths is at least {ENOUGH_REUSE}:")
    for shape, (kept, possible) in least.items():
        print(_check(f"{shape}: {kept:.3f} at least (no packing is above {possible:.3f})", kept >= ENOUGH_REUSE))
    return table


def draw(rows: list[Row], *, out: Path) -> None:
    """Draw ERR / POR against C, a panel for each shape and a line for each method."""
    shapes = _unique(rows, "shape")
    num_columns = 4
    num_rows = -(-len(shapes) // num_columns)
    figure, axes = plt.subplots(
        num_rows,
        num_columns,
        figsize=(12, 2.7 * num_rows),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    multiples = _unique(rows, "multiple")
    for panel, shape in zip(axes.flat, shapes, strict=False):
        part = [row for row in rows if row["shape"] == shape]
        for method, (color, marker) in STYLES.items():
            points = reuse_of(rows, shape=shape, method=method)
            style = {BOUND: ":", "exact": "none"}.get(method, "-")
            label = {BOUND: "no packing can be above", "exact": "exact (where solved)"}.get(method, method)
            panel.plot(
                list(points),
                list(points.values()),
                linestyle=style,
                color=color,
                marker=marker,
                markersize=5,
                linewidth=1.5,
                zorder=3 if method == "exact" else 2,
                label=label,
            )
        panel.set_title(f"{shape}, {part[0]['leaves']} leaves, POR {mean(row['por'] for row in part):.2f}", fontsize=10)
        panel.set_xscale("log", base=2)
        panel.set_xticks(multiples, [f"{multiple:g}" for multiple in multiples], fontsize=8)
        panel.minorticks_off()
        panel.set_ylim(-0.03, 1.03)
        panel.grid(alpha=0.3)
        panel.set_xlabel("C (longest paths)")
    for panel in list(axes.flat)[len(shapes) :]:
        panel.axis("off")
    for panel in axes[:, 0]:
        panel.set_ylabel("ERR / POR (share of tokens)")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(out, dpi=110)
    plt.close(figure)


TABLES: dict[str, Callable[[list[Row]], list[Row]]] = {
    "optimum": optimum_table,
    "capacity": capacity_table,
    "scale": list,
}


def report(parts: dict[str, Any]) -> None:
    """Print checks and table of each part."""
    for name, part in parts.items():
        print(f"\n{name}")
        print_table(TABLES[name](part["rows"]))


def _summary(gaps: Sequence[float]) -> Row:
    is_optimal = [gap == 0 for gap in gaps]
    return {"mean": _percent(gaps, mean), "worst": _percent(gaps, max), "optimal": _percent(is_optimal, mean, digits=1)}


def _percent(values: Sequence[float], of: Callable[[Sequence[float]], float], *, digits: int = 2) -> str:
    return f"{of(values):.{digits}%}" if values else "-"


def _check(text: str, is_true: bool) -> str:
    return f"{'PASS' if is_true else 'FAIL'}: {text}"


def _unique(rows: list[Row], column: str) -> list[Any]:
    return list(dict.fromkeys(row[column] for row in rows))


def main() -> None:
    """Parse the command line, print and draw."""
    options = report_options(__doc__)
    parts = json.loads(options.data.read_text())
    report(parts)
    if options.plot:
        draw(parts["capacity"]["rows"], out=options.plot)


if __name__ == "__main__":
    main()
