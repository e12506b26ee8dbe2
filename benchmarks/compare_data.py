"""The numbers behind docs/experiments.md, from two folders of data side by side: as committed, and as measured anew.

    python benchmarks/compare_data.py docs/benchmarks/data runs/reproduce/benchmarks/data

A file that the second folder lacks is left out. Quotients of times differ by the noise of the machine; counted numbers
and peaks of memory on a CPU are the same.
"""

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import print_table, read_records
from por_speeds import Speed, fastest_flat, flat_of, measured_peaks, measured_points

Headlines = Iterator[tuple[str, float]]


def of_figure_8(path: Path) -> Headlines:
    """Yield flat / tree of whole trees, over its bound."""
    points = measured_points(read_records(path))
    for key, paths in points.items():
        flat, _ = fastest_flat(points, key)
        if flat is not None and "tree" in paths and paths["tree"].not_run is None:
            yield f"{key.model}, {key.trees}, POR {key.por:.2f}", Speed.of(paths["tree"], flat).quotient


def of_prompts(path: Path) -> Headlines:
    """Yield what repeated prompts take over shared ones, of the largest group with the longest prompt."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for record in read_records(path):
        if record["kind"] == "grid" and record["num_rows"] == 16 and record["prompt_len"] == 1024:
            found[record["response_len"], record["path"]] = record
    for (response_len, name), flat in found.items():
        shared = found.get((response_len, "prompt"))
        if name == "none" and shared is not None:
            yield f"FLOPs, response {response_len}", flat["flops"] / shared["flops"]
            yield f"peak, response {response_len}", flat["peak_bytes"] / shared["peak_bytes"]
            times = [statistics.median(record["cpu_s"]) for record in (flat, shared)]
            yield f"time, response {response_len}", times[0] / times[1]


def of_memory(path: Path) -> Headlines:
    """Yield the peak of whole trees over that of flat rows, with gradient checkpointing."""
    for (key, kind), paths in measured_peaks(read_records(path)).items():
        if kind == "checkpointed memory":
            yield f"{key.trees}, POR {key.por}", paths["tree"]["peak_bytes"] / flat_of(paths)["peak_bytes"]


def of_scoring(path: Path) -> Headlines:
    """Yield one by one / `score`."""
    for record in read_records(path):
        yield record["case"], record["score_faster"]


def of_fine_tuning(path: Path) -> Headlines:
    """Yield verl's engine / trees."""
    for record in read_records(path):
        yield f"POR {record['por']:.2f}", record["speed_up"]


def of_parity(path: Path) -> Headlines:
    """Yield the largest relative difference of every curve."""
    for curve in json.loads(path.read_text())["worst"]:
        yield curve["metric"], curve["relative difference"]


def of_rows(path: Path) -> Headlines:
    """Yield the last validation of each kind of run."""
    for table in json.loads(path.read_text())["summary"]:
        last = [row for row in table if row.get("validation reward")][-1:]
        for row in last:
            yield f"rows={row['rows']}, step {row['step']}", float(row["validation reward"])


def of_packing(path: Path) -> Headlines:
    """Yield the mean gap of every method on small forests."""
    rows = json.loads(path.read_text())["optimum"]["rows"]
    for method in rows[0]["tokens"]:
        yield method, statistics.mean(row["tokens"][method] / row["optimum"] - 1 for row in rows)


FILES: dict[str, tuple[str, Callable[[Path], Headlines]]] = {
    "por_cpu.jsonl": ("figure 8, share of the bound", of_figure_8),
    "por_shapes.jsonl": ("agents' shapes, share of the bound", of_figure_8),
    "prefix_grouper.jsonl": ("one prompt, repeated / shared", of_prompts),
    "por_memory.jsonl": ("peak memory, tree / flat", of_memory),
    "scoring.jsonl": ("scoring, times faster", of_scoring),
    "sft.jsonl": ("fine-tuning, times faster", of_fine_tuning),
    "parity.json": ("parity, largest difference", of_parity),
    "rows.json": ("validation reward", of_rows),
    "packing.json": ("packing, mean gap", of_packing),
}


def main() -> None:
    """Print the table of the two folders that the command line names."""
    committed, measured = map(Path, sys.argv[1:3])
    rows = []
    for name, (title, headlines) in FILES.items():
        if not (measured / name).exists():
            continue
        before = dict(headlines(committed / name))
        for case, value in headlines(measured / name):
            known = f"{before[case]:.4g}" if case in before else "-"
            rows.append({"experiment": title, "case": case, "committed": known, "now": f"{value:.4g}"})
    if not rows:
        sys.exit(f"{measured} has none of {', '.join(FILES)}; give a folder that benchmarks/reproduce.sh wrote")
    print_table(rows)


if __name__ == "__main__":
    main()
