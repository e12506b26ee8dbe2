"""Draw the metrics of training runs: reward, sharing, the duration of the updates and MFU, or one panel for each key.

    verl-tree plot runs/arithmetic_tools/metrics.jsonl [--baseline OTHER.jsonl] [--out FILE.png]

reads the JSON lines that verl's logger ``file`` writes: ``{"step": 3, "data": {"tree/por": 0.8, ...}}``. Other panels:

    verl-tree plot a1.jsonl --baseline a2.jsonl b.jsonl --names a,a,b --keys actor/loss,actor/grad_norm

draws a panel for each key. Runs of one name, such as three seeds, are one line, their mean, in a band from the least to
the greatest. An axis is logarithmic where the values are positive and 100 times apart. With `--over timing_s/step` or
`--over tree/tokens`, values stand over what was spent until then, the mean of the runs, in place of over steps.

    verl-tree plot runs/arithmetic_tools/metrics.jsonl --workspace

draws what the dashboards show of one run (docs/dashboards.md).
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from verl_tree.commands.metrics_file import Metrics, Series, read_metrics, series
from verl_tree.commands.workspace_picture import draw_workspace
from verl_tree.trainer.told.metrics import validation_keys

MAX_COLUMNS = 4
"""Panels beside each other, of chosen keys."""

SESSION_REWARD = "tree/session_reward/mean"
# With their line widths: where everything fits into one pack the two are equal.
SHARING = {"tree/por": ("potential overlap (POR)", 4.0), "tree/err": ("effective reuse (ERR)", 1.5)}
UPDATE_S = "timing_s/update_actor"
MFU = ("perf/mfu/actor", "perf/mfu/actor_flat_equivalent")


def draw(runs: dict[str, Metrics], *, out: Path) -> None:
    """Draw training runs, by name, into the picture `out`: the first solid, the others dashed."""
    figure, panels = plt.subplots(1, 4, figsize=(17, 3.8), layout="constrained")
    reward_axes, sharing_axes, update_axes, mfu_axes = panels
    for number, (name, metrics) in enumerate(runs.items()):
        style = "-" if number == 0 else "--"
        label = f" ({name})" if len(runs) > 1 else ""
        validations = validation_keys(chain.from_iterable(metrics.values()))
        for source, key in validations.items():
            of = f" of {source}" if len(validations) > 1 else ""
            _line(reward_axes, series(metrics, key=key), label=f"validation{of}{label}", style=style, marker="o")
        _line(reward_axes, series(metrics, key=SESSION_REWARD), label=f"training sessions{label}", style=style)
        for sharing_key, (title, width) in SHARING.items():
            points = series(metrics, key=sharing_key)
            _line(sharing_axes, points, label=f"{title}{label}", style=style, width=width)
        _line(update_axes, series(metrics, key=UPDATE_S), label=f"update{label}", style=style)
        for mfu_key in MFU:
            _line(mfu_axes, series(metrics, key=mfu_key), label=f"{mfu_key}{label}", style=style)
    reward_axes.set(title="mean reward")
    sharing_axes.set(title="share of tokens saved", ylim=(0, 1))
    update_axes.set(title="actor update, seconds")
    mfu_axes.set(title="MFU: computed, and of flat rows")
    for axes in (update_axes, mfu_axes):
        axes.set_ylim(bottom=0)
    for axes in panels:
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small", framealpha=0.7, edgecolor="none")
    figure.savefig(out, dpi=130)
    plt.close(figure)


def draw_keys(runs: Sequence[tuple[str, Metrics]], *, keys: Sequence[str], out: Path, over: str | None = None) -> None:
    """Draw a panel for each key into the picture `out`, with a line for each name of runs.

    Raises:
        ValueError: No run logged a key, or one of the runs not `over`.
    """
    for name, metrics in runs:
        if over is not None and not series(metrics, key=over)[0]:
            raise ValueError(f"--over {over}: the run {name!r} did not log it; name a key of the metrics file")
    num_columns = min(len(keys), MAX_COLUMNS)
    num_rows = math.ceil(len(keys) / num_columns)
    size = (4.3 * num_columns, 3.4 * num_rows)
    figure, panels = plt.subplots(num_rows, num_columns, figsize=size, layout="constrained", squeeze=False)
    for axes in panels.flat[len(keys) :]:
        axes.remove()
    names = list(dict.fromkeys(name for name, _ in runs))
    for key, axes in zip(keys, panels.flat, strict=False):
        drawn: list[float] = []
        for number, name in enumerate(names):
            named = [metrics for each, metrics in runs if each == name]
            places, values = series_of_runs(named, key=key, over=over)
            if not places:
                continue
            # The first line is wide, so that one on top of it leaves it in sight.
            style, width = ("-", 3.5) if number == 0 else ("--", 1.5)
            (line,) = axes.plot(places, [fmean(each) for each in values], style, linewidth=width, label=name)
            if max(map(len, values)) > 1:
                axes.fill_between(
                    places, list(map(min, values)), list(map(max, values)), color=line.get_color(), alpha=0.2
                )
            drawn += [value for each in values for value in each]
        if not drawn:
            raise ValueError(f"no run logged {key!r}; name a key of the metrics file")
        if min(drawn) > 0 and max(drawn) >= 100 * min(drawn):
            axes.set_yscale("log")
        axes.set(title=key, xlabel=over or "step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def series_of_runs(
    runs: Sequence[Metrics], *, key: str, over: str | None = None
) -> tuple[list[float], list[list[float]]]:
    """Return the steps at which all of the runs logged `key`, and the values of the runs at each.

    With `over`, the sum of that metric until each step, a mean over the runs, in place of the step.
    """
    steps = sorted(set.intersection(*(set(series(metrics, key=key)[0]) for metrics in runs)))
    values = [[metrics[step][key] for metrics in runs] for step in steps]
    if over is None:
        return list(steps), values
    spent = [
        fmean(sum(data.get(over, 0.0) for each, data in metrics.items() if each <= step) for metrics in runs)
        for step in steps
    ]
    return spent, values


def summary(metrics: Metrics) -> str:
    """Return a few lines with the first and last values of what the picture shows."""
    validations = validation_keys(chain.from_iterable(metrics.values())).values()
    lines = []
    for key in (*validations, SESSION_REWARD, *SHARING, "tree/compression", UPDATE_S, *MFU):
        steps, values = series(metrics, key=key)
        if steps:
            lines.append(f"  {key}: {values[0]:.3g} at step {steps[0]}, {values[-1]:.3g} at step {steps[-1]}")
    return "\n".join(lines)


def _line(axes: Axes, points: Series, *, label: str, style: str, marker: str = "", width: float = 1.5) -> None:
    steps, values = points
    if steps:
        axes.plot(steps, values, style, marker=marker, linewidth=width, label=label)


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, draw and print a summary."""
    parser = argparse.ArgumentParser(
        prog="verl-tree plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("metrics", type=Path)
    parser.add_argument("--baseline", type=Path, nargs="+", default=[], help="metrics of other runs to draw with it")
    parser.add_argument("--names", type=_words, help="a name for each run, divided by commas; default: their folders")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--keys", type=_words, help="metrics to draw, one panel each, divided by commas")
    shown.add_argument("--workspace", action="store_true", help="draw the panels of the dashboards")
    parser.add_argument("--over", metavar="KEY", help="with --keys: over the sum of this metric, not over steps")
    parser.add_argument("--out", type=Path, help="default: the metrics file with the ending .png")
    options = parser.parse_args(arguments)
    paths = [options.metrics, *options.baseline]
    names = options.names or [str(path.parent) for path in paths]
    if len(names) != len(paths):
        sys.exit(f"--names gives {len(names)} names to {len(paths)} runs: give one to each")
    if options.workspace and options.baseline:
        sys.exit("--workspace draws one run: leave --baseline out, or choose --keys")
    if options.over and not options.keys:
        sys.exit(f"--over {options.over}: choose --keys")
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        sys.exit(f"{', '.join(missing)}: no such file; give what verl's logger `file` wrote")
    runs = [(name, read_metrics(path)) for name, path in zip(names, paths, strict=True)]
    out = options.out or options.metrics.with_suffix(".png")
    if options.keys:
        draw_keys(runs, keys=options.keys, out=out, over=options.over)
    elif options.workspace:
        draw_workspace(runs[0][1], out=out)
    else:
        if len(set(names)) < len(names):
            sys.exit(f"runs of one name, {', '.join(names)}: give other --names, or --keys, which draws their mean")
        draw(dict(runs), out=out)
        print(summary(runs[0][1]))
    print(f"  plot: {out}")


def _words(text: str) -> list[str]:
    return text.split(",")
