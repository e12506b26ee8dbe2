"""Tables of what por.py measured, from its JSON lines; report_por_figure.py draws it.

    python benchmarks/report_por.py docs/benchmarks/data/por_cpu*.jsonl [--engines por_engines.json] [--plot por.png]

Seconds are medians: by the device's clock on CUDA, of the processor on a CPU, which other work on the machine changes
less. A path is compared with the fastest flat one on the same rows. Where none ran there, it is compared with that of
the nearest POR, marked ~. The bound is that by FLOPs: of flat rows over what the path computes with gradient.

Memory is in MiB, and in brackets the share: the peak, scores and store taken off, over what flat rows take for as many
tokens as a call has. The goal is 1.1. With a large vocabulary a chunk of logits is the peak, and the goal is missed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from harness import print_table
from por_speeds import (
    MEMORY_GOAL,
    MIB,
    Measured,
    Peaks,
    Points,
    Speed,
    fastest_flat,
    flat_of,
    measured_peaks,
    measured_points,
    memory_share,
)

GIB = 2**30


def _gib(measured: Measured) -> str:
    return "-" if measured.peak_bytes is None else f"{measured.peak_bytes / GIB:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def whole_trees(points: Points) -> list[dict[str, Any]]:
    """Return the table of whole trees, a row for each model, POR and file."""
    rows = []
    for key, paths in points.items():
        tree = paths.get("tree")
        flat, flat_por = fastest_flat(points, key)
        if tree is None or flat is None:
            continue
        row: dict[str, Any] = {"model": key.model, "trees": key.trees, "POR": f"{key.por:g}"}
        if tree.not_run:
            rows.append(row | {"tokens": "-", "bound": "-", "flat s": f"{flat.seconds:.3f}", "tree s": tree.not_run})
            continue
        speed = Speed.of(tree, flat)
        rows.append(
            row
            | {
                "tokens": f"{flat.last['num_tokens']} / {tree.last['num_tokens']}",
                "bound": f"{speed.bound:.2f}",
                "flat s": f"{'' if flat_por == key.por else '~'}{flat.seconds:.3f}",
                "tree s": f"{tree.seconds:.3f}",
                "flat/tree": f"{speed.ratio:.2f}",
                "quotient": f"{speed.quotient:.2f}",
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
    for key, paths in points.items():
        flat, _ = fastest_flat(points, key)
        tree = paths.get("tree")
        for path, measured in paths.items():
            if flat is None or measured.capacity is None:
                continue
            row = {"model": key.model, "trees": key.trees, "POR": f"{key.por:g}", "path": path}
            if measured.not_run:
                rows.append(row | {"capacity": "-", "calls": "-", "ERR": "-", "s": measured.not_run})
                continue
            last, speed = measured.last, Speed.of(measured, flat)
            rows.append(
                row
                | {
                    "capacity": last["capacity"],
                    "calls": last["num_calls"],
                    "ERR": f"{1 - last['num_tokens'] / flat.last['num_tokens']:.3f}",
                    "s": f"{measured.seconds:.3f}",
                    "bound": f"{speed.bound:.2f}",
                    "flat/path": f"{speed.ratio:.2f}",
                    "quotient": f"{speed.quotient:.2f}",
                    "path/tree": "-" if tree is None or tree.not_run else f"{measured.seconds / tree.seconds:.2f}",
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


def memory_rows(peaks: Peaks) -> list[dict[str, Any]]:
    """Return the table of peaks."""
    rows = []
    for (key, kind), paths in peaks.items():
        row = {"model": key.model, "trees": key.trees, "POR": f"{key.por:g}"}
        row |= {"checkpointing": "yes" if kind.startswith("checkpointed") else "no"}
        for path, record in paths.items():
            share = memory_share(record, flat_of(paths))
            row[path] = f"{record['peak_bytes'] / MIB:.1f} ({share:.2f})"
        rows.append(row | {"store": f"{max(record['store_bytes'] for record in paths.values()) / MIB:.1f}"})
    return rows


def report(records: list[dict[str, Any]]) -> None:
    """Print the tables."""
    points, peaks = measured_points(records), measured_peaks(records)
    tables = {
        "whole trees": whole_trees(points),
        "under a capacity": limited_trees(points),
        "errors": error_rows(records),
        "memory": memory_rows(peaks),
    }
    for title, rows in tables.items():
        if rows:
            print(f"\n{title}")
            print_table(rows)
    found = [(memory_share(each, flat_of(paths)), path) for paths in peaks.values() for path, each in paths.items()]
    for kind in dict.fromkeys(path for _, path in found if not path.startswith("flat")):
        shares = [share for share, path in found if path == kind]
        num_met = sum(share <= MEMORY_GOAL for share in shares)
        print(f"memory of {kind}: at most {MEMORY_GOAL} at {num_met} of {len(shares)} points, worst {max(shares):.3f}")


def engine_rows(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of what `update.py --overlap` measured: verl's engine over the tree engine."""
    return [
        {
            "POR": f"{case['potential_overlap_ratio']:.2f}",
            "rows a call": case["flat_rows"],
            "bound": f"{case['flop_ratio']:.2f}",
            "flat/tree": f"{case['cpu_ratio_of_gates']['auto']:.2f}",
            "quotient": f"{case['cpu_ratio_of_gates']['auto'] / case['flop_ratio']:.2f}",
        }
        for case in cases
    ]


def main() -> None:
    """Parse the command line, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="what por.py wrote")
    parser.add_argument("--engines", type=Path, help="what update.py --overlap wrote")
    parser.add_argument("--plot", type=Path, help="draw the figure into this file")
    options = parser.parse_args()
    records = [json.loads(line) for path in options.data for line in path.read_text().splitlines()]
    cases = json.loads(options.engines.read_text())["cases"] if options.engines else []
    report(records)
    if cases:
        print("\nverl's engine and the tree engine")
        print_table(engine_rows(cases))
    if options.plot:
        # Imported here, as the tables are wanted on machines without matplotlib, too.
        from report_por_figure import draw, draw_memory

        if points := measured_points(records):
            draw(points, engine_cases=cases, out=options.plot)
        else:
            draw_memory(measured_peaks(records), out=options.plot)


if __name__ == "__main__":
    main()
