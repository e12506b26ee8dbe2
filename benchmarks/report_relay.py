"""Tables and figures of what relay.py measured, from its JSON.

python benchmarks/report_relay.py docs/benchmarks/data/relay.json [--plots docs]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from harness import print_table
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

Record = dict[str, Any]

MIB = 2**20
BOUND_FACTOR = 1.1
# Colours of Okabe and Ito, told apart by the colour-blind.
SPEED_COLORS = {"flat": "#777777", "packs": "#E69F00", "relay": "#0072B2"}
MEMORY_STYLES = {
    "one_pack": ("one pack", "#777777", "-"),
    "one_pack_checkpointed": ("one pack, checkpointed", "#777777", "--"),
    "relay": ("relay", "#0072B2", "-"),
    "relay_checkpointed": ("relay, checkpointed", "#0072B2", "--"),
}


def print_speed(record: Record) -> None:
    """Print times as multiples of one pack, the predictions and the largest difference of gradients."""
    print("\nspeed: processor time / that of one pack (predicted)")
    rows = []
    for name, shape in record["shapes"].items():
        work, predicted = shape["works"]["relay"], shape["predicted"]
        row = {"shape": name, "T": shape["tree_tokens"], "C": shape["capacity"], "sections": work["num_packs"]}
        row |= {"spine/T": f"{work['num_spine'] / shape['tree_tokens']:.2f}", "s": f"{shape['cpu_s']['one_pack']:.2f}"}
        for path in ("flat", "packs", "relay", "relay_host", "relay/2", "relay/4", "one_pack_checkpointed"):
            measured = shape["of_one_pack"].get(path)
            guess = f" ({predicted[path]:.2f})" if path in predicted else ""
            row[path] = "-" if measured is None else f"{measured:.2f}{guess}"
        rows.append(row | {"gradients": f"{max(shape['gradient_difference'].values()):.1e}"})
    print_table(rows)
    error = record["relative_error"]
    print(
        f"median error on the packs of the fit: {error:.1%}"
        if error is not None
        else "too few packs: predicted by the prior"
    )


def relative_peaks(shape: Record) -> dict[str, float]:
    """Return the peak of every relayed layout over (a pack of C tokens + store)."""
    return {
        path: each["peak_bytes"] / (each["pack_of_c_bytes"] + each["store_bytes"])
        for path, each in shape["layouts"].items()
        if path.startswith("relay")
    }


def print_memory(record: Record) -> None:
    """Print peaks in MiB, and how far those of relay are above a pack of C tokens and the store."""
    print("\nmemory: peak in MiB; relay: (x of a pack of C tokens + store)")
    rows = []
    for name, shape in record["shapes"].items():
        over = relative_peaks(shape)
        for suffix in ("", "_checkpointed"):
            row = {"shape": name + suffix}
            for layout in ("one_pack", "packs", "relay", "relay/2", "relay/4"):
                measured = shape["layouts"].get(layout + suffix)
                more = f" ({over[layout + suffix]:.2f}x)" if layout.startswith("relay") else ""
                row[layout] = "-" if measured is None else f"{measured['peak_bytes'] / MIB:.0f}{more}"
            row["store"] = f"{shape['layouts']['relay' + suffix]['store_bytes'] / MIB:.0f}"
            rows.append(row)
    print_table(rows)
    worst = max(max(relative_peaks(shape).values()) for shape in record["shapes"].values())
    print(f"{'PASS' if worst <= BOUND_FACTOR else 'FAIL'}: at most {BOUND_FACTOR}x, worst {worst:.2f}x")


def draw_speed(record: Record, *, out: Path) -> None:
    """Draw the times as bars, three for each shape, and the predictions as marks."""
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    shapes = record["shapes"]
    for number, (path, color) in enumerate(SPEED_COLORS.items()):
        for place, shape in enumerate(shapes.values()):
            ratio, x = shape["of_one_pack"].get(path), place + (number - 1) * 0.27
            if ratio is None:
                axes.text(x, 0.1, "impossible", rotation=90, ha="center", va="bottom", fontsize=8, color=color)
                continue
            axes.bar(x, ratio, width=0.25, color=color, label=path if place == 0 else None)
            axes.text(x, ratio + 0.08, f"{ratio:.2f}", ha="center", fontsize=7)
            if path in shape["predicted"]:
                label = "predicted by the cost model" if place == 0 and path == "relay" else None
                axes.plot(x, shape["predicted"][path], "_", color="black", markersize=13, label=label)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(shapes)), [f"{name}\nC = {shape['capacity']:,}" for name, shape in shapes.items()])
    axes.set_ylabel("time / that of one unlimited pack")
    axes.legend(frameon=False)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def draw_memory(record: Record, *, out: Path) -> None:
    """Draw the peak against the capacity, a panel for each shape."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    for panel, (name, shape) in zip(axes.flat, record["shapes"].items(), strict=True):
        _draw_peaks(panel, shape)
        panel.set_title(f"{name}, T = {shape['tree_tokens']:,}", fontsize=10)
    for panel in axes[:, 0]:
        panel.set_ylabel("peak of an update, MiB")
    for panel in axes[-1]:
        panel.set_xlabel("C, tokens")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _draw_peaks(panel: Axes, shape: Record) -> None:
    layouts = shape["layouts"]
    capacities = {"relay": shape["capacity"], "relay/2": shape["capacity"] // 2, "relay/4": shape["capacity"] // 4}
    for path, (label, color, style) in MEMORY_STYLES.items():
        if path.startswith("one_pack"):
            peaks = [layouts[path]["peak_bytes"] / MIB] * len(capacities)
        else:
            suffix = path.removeprefix("relay")
            peaks = [layouts[layout + suffix]["peak_bytes"] / MIB for layout in capacities]
        marker = "" if path.startswith("one_pack") else "o"
        panel.plot(list(capacities.values()), peaks, style, color=color, marker=marker, markersize=4, label=label)
    store_and_pack = [
        (layouts[layout]["pack_of_c_bytes"] + layouts[layout]["store_bytes"]) / MIB for layout in capacities
    ]
    panel.plot(
        list(capacities.values()), store_and_pack, "x", color="#D55E00", markersize=8, label="pack of C tokens + store"
    )
    if "packs" in layouts:
        peak = layouts["packs"]["peak_bytes"] / MIB
        panel.plot(shape["capacity"], peak, "s", color="#E69F00", markersize=6, label="packs")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter("{x:.0f}")
    panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    panel.yaxis.set_minor_formatter("{x:.0f}")
    panel.tick_params(axis="y", which="both", labelsize=8)
    panel.set_xticks(list(capacities.values()), [f"{capacity:,}" for capacity in capacities.values()], fontsize=8)
    panel.grid(alpha=0.3, which="both")


def draw(record: Record, *, folder: Path) -> None:
    """Draw the figures of the parts that were measured."""
    for part, draw_part in (("speed", draw_speed), ("memory", draw_memory)):
        if part in record:
            draw_part(record[part], out=folder / f"relay_{part}.png")


def report(record: Record) -> None:
    """Print the tables of the parts that were measured."""
    for part, print_part in (("speed", print_speed), ("memory", print_memory)):
        if part in record:
            print_part(record[part])


def main() -> None:
    """Parse the command line, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="what relay.py wrote")
    parser.add_argument("--plots", type=Path, help="draw the figures into this folder")
    options = parser.parse_args()
    record = json.loads(options.data.read_text())
    report(record)
    if options.plots:
        draw(record, folder=options.plots)


if __name__ == "__main__":
    main()
