"""The figure of what por.py measured: update time against overlap, as figure 8 of the Tree Training paper.

Upper row: flat rows' time over that of a path, with the bound by FLOPs of the whole tree. Lower row: the quotient of
the two. A panel for whole trees, one for each capacity, and one for stored trees. Of memory: peaks against overlap.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from por_speeds import DRAWN, MIB, Measured, Peaks, Points, Speed, fastest_flat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, told apart by the colour-blind; markers tell them apart in grey.
PATHS = {
    "tree": ("#0072B2", "o"),
    "relay": ("#009E73", "D"),
    "exact": ("#D55E00", "x"),
    "auto": ("#E69F00", "^"),
    "heuristic": ("#E69F00", "^"),
    "deepest_first": ("#56B4E9", "v"),
    "dfs_first_fit": ("#F0E442", "<"),
    "single_path": ("#CC79A7", "s"),
    "flat": ("#777777", "s"),
}
MODELS = [("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "D"), ("#CC79A7", "v")]
BOUND: dict[str, Any] = {"color": "black", "linewidth": 0.8, "linestyle": ":", "label": "bound by FLOPs", "zorder": 3}

Pair = tuple["Axes", "Axes"]  # of one column: ratios above, quotients below
Line = list[tuple[float, Speed]]


def draw(points: Points, *, engine_cases: list[dict[str, Any]], out: Path) -> None:
    """Draw all panels; `engine_cases` are those of `update.py --overlap`."""
    drawn = {key: paths for key, paths in points.items() if key.trees == DRAWN}
    stored = {key: paths for key, paths in points.items() if key.trees != DRAWN}
    found = [(key.model, each.capacity) for key, paths in drawn.items() for each in paths.values() if each.capacity]
    # The model with most paths under capacities; the others are in the table.
    limited_model = max((model for model, _ in found), key=[model for model, _ in found].count, default="")
    capacities = sorted({capacity for model, capacity in found if model == limited_model}, reverse=True)
    num_columns = bool(drawn) + len(capacities) + bool(stored)
    figure, axes = plt.subplots(
        2,
        num_columns,
        figsize=(0.6 + 3.4 * num_columns, 6),
        height_ratios=(3, 2),
        layout="constrained",
        squeeze=False,
    )
    columns = iter(axes.T)
    if drawn:
        _draw_whole(next(columns), drawn, engine_cases)
    for capacity in capacities:
        _draw_limited(next(columns), drawn, model=limited_model, capacity=capacity)
    if stored:
        _draw_stored(next(columns), stored)
    axes[0, 0].set_ylabel("time of flat rows / time")
    axes[1, 0].set_ylabel("of the bound")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def _lines(points: Points, *, model: str) -> dict[str, Line]:
    """Return the speeds of every path of a model over the POR; the bound is that of the whole tree."""
    lines: dict[str, Line] = {}
    for key, paths in points.items():
        flat, _ = fastest_flat(points, key)
        tree = paths.get("tree")
        if key.model != model or flat is None or tree is None or tree.not_run:
            continue
        bound = Speed.of(tree, flat).bound
        for path, measured in paths.items():
            if measured.kind != "flat" and not measured.not_run:
                lines.setdefault(path, []).append((key.por, Speed(Speed.of(measured, flat).ratio, bound)))
    return lines


def _plot(pair: Pair, line: Line, **style: Any) -> None:
    pors = [por for por, _ in line]
    above, below = pair
    above.plot(pors, [speed.ratio for _, speed in line], markersize=4, linewidth=1.4, **style)
    below.plot(pors, [speed.quotient for _, speed in line], markersize=4, linewidth=1.4, **style)


def _finish(pair: Pair, *, title: str) -> None:
    above, below = pair
    above.set_title(title, fontsize=10)
    above.set_yscale("log", base=2)
    above.yaxis.set_major_formatter("{x:g}")
    above.legend(frameon=False, fontsize=7, loc="upper left")
    below.axhline(1, color="black", linewidth=0.8, linestyle=":")
    below.axhline(0.9, color="#999999", linewidth=0.8)
    below.set_ylim(0, 1.15)
    below.set_xlabel("POR")
    for panel in pair:
        panel.grid(alpha=0.3)


def _draw_whole(pair: Pair, points: Points, engine_cases: list[dict[str, Any]]) -> None:
    models = list(dict.fromkeys(key.model for key in points))
    for number, (model, (color, marker)) in enumerate(zip(models, MODELS, strict=False)):
        line = _lines(points, model=model).get("tree", [])
        if number == 0:
            pair[0].plot([por for por, _ in line], [speed.bound for _, speed in line], **BOUND)
        _plot(pair, line, color=color, marker=marker, label=f"Qwen3, {model}")
    if engine_cases:
        line = [
            (case["potential_overlap_ratio"], Speed(case["cpu_ratio_of_gates"]["auto"], case["flop_ratio"]))
            for case in engine_cases
        ]
        _plot(pair, line, color="#777777", marker="*", linestyle="none", label="verl's engine / tree engine")
    _finish(pair, title="whole trees")


def _draw_limited(pair: Pair, points: Points, *, model: str, capacity: float) -> None:
    lines = _lines(points, model=model)
    whole = lines["tree"]
    pair[0].plot([por for por, _ in whole], [speed.bound for _, speed in whole], **BOUND)
    _plot(pair, whole, color=PATHS["tree"][0], alpha=0.4, label="whole tree")
    for path, line in lines.items():
        measured = Measured(path, 0.0, {}, None)
        if measured.capacity == capacity:
            color, marker = PATHS[measured.kind]
            _plot(pair, line, color=color, marker=marker, label=measured.kind)
    _finish(pair, title=f"at most {capacity:g} longest paths a call ({model})")


def _draw_stored(pair: Pair, points: Points) -> None:
    above, below = pair
    names, speeds = [], []
    for key, paths in sorted(points.items(), key=lambda each: each[0].por):
        flat, _ = fastest_flat(points, key)
        if flat is not None and "tree" in paths and not paths["tree"].not_run:
            names.append(f"{key.trees}\nPOR {key.por:.2f}")
            speeds.append(Speed.of(paths["tree"], flat))
    places, color = range(len(names)), PATHS["tree"][0]
    above.bar(places, [speed.ratio for speed in speeds], color=color, width=0.6, label="measured")
    bounds = [speed.bound for speed in speeds]
    above.bar(places, bounds, edgecolor="black", facecolor="none", linestyle=":", width=0.6, label="bound by FLOPs")
    below.bar(places, [speed.quotient for speed in speeds], color=color, width=0.6)
    for place, speed in zip(places, speeds, strict=True):
        below.text(place, speed.quotient, f"{speed.quotient:.2f}", ha="center", va="bottom", fontsize=7)
    above.set_xticks([])
    below.set_xticks(places, names, rotation=90, fontsize=7)
    above.set_title(f"stored trees ({next(iter(points)).model})", fontsize=10)
    above.legend(frameon=False, fontsize=7, loc="upper left")
    below.set_ylim(0, 1.15)
    below.axhline(0.9, color="#999999", linewidth=0.8)
    above.grid(alpha=0.3, axis="y")


def draw_memory(peaks: Peaks, *, out: Path) -> None:
    """Draw the peaks of drawn trees over the POR, without and with gradient checkpointing."""
    kinds = {"memory": "without gradient checkpointing", "checkpointed memory": "with gradient checkpointing"}
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for panel, (kind, title) in zip(panels, kinds.items(), strict=True):
        points = {key.por: paths for (key, its_kind), paths in peaks.items() if (key.trees, its_kind) == (DRAWN, kind)}
        for path in dict.fromkeys(path for paths in points.values() for path in paths):
            line = [(por, paths[path]["peak_bytes"] / MIB) for por, paths in points.items() if path in paths]
            color, marker = PATHS[path.partition("/")[0]]
            panel.plot(*zip(*line, strict=True), color=color, marker=marker, markersize=4, label=path)
            if path.startswith("flat"):
                ideal = [(por, peak * (1 - por)) for por, peak in line]
                panel.plot(*zip(*ideal, strict=True), ":", color="black", label="flat / compression", zorder=3)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("POR")
        panel.set_yscale("log", base=2)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("peak beyond weights and gradients, MiB")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(out, dpi=100)
    plt.close(figure)
