"""Tables of what scripts/gpu_check.sh found: jobs, correctness by backend, times by shape, recurrence.

    python benchmarks/report_gpu.py gpu_check

Reads the folder as it is, also while the stages run or after they were killed. For the models it names the call of
`report_por.py`.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from harness import print_table, read_records

Record = dict[str, Any]

CUT_SHORT = {"died": "died", "out of time": "ran out of time"}
"""Statuses of jobs that wrote some of their records only, in words."""


def jobs_table(folder: Path) -> list[Record]:
    """Return a row for every job that did not pass, or one that says that all did."""
    jobs = [
        {"stage": stage.parent.name, **record}
        for stage in sorted(folder.glob("*/jobs.jsonl"))
        for record in read_records(stage)
    ]
    names = ("stage", "job", "status", "exit_status", "seconds", "num_records")
    left = [{name: job.get(name, "-") for name in names} for job in jobs if job["status"] != "passed"]
    return left or [{"jobs": f"all {len(jobs)} passed"}]


def cases_table(records: list[Record]) -> list[Record]:
    """Return a row for every backend and dtype: cases passed, refused, the worst error in parts of its limit."""
    of_kind: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] == "case" and record["backend"] != "oracle":
            of_kind[record["backend"], record["dtype"]].append(record)
    rows = []
    for (backend, dtype), cases in of_kind.items():
        run = [case for case in cases if "errors" in case]
        shares = [case["errors"][name] / case["limits"][name] for case in run for name in case["errors"]]
        rows.append(
            {
                "backend": backend,
                "dtype": dtype,
                "passed": sum(case["passed"] for case in run),
                "run": len(run),
                "raised": sum("error" in case for case in cases),
                "refused": sum("refused" in case for case in cases),
                "repeat": sum(case["repeats"] for case in run),
                "worst error / limit": f"{max(shares):.2f}" if shares else "-",
                "median": f"{statistics.median(shares):.2f}" if shares else "-",
            }
        )
    return rows


def rules_table(records: list[Record]) -> list[Record]:
    """Return a row for every forest on which the rule of recurrent layers was checked."""
    rows = []
    for case in records:
        if case["kind"] != "rule" or "refused" in case:
            continue
        shares = [case["errors"][name] / case["limits"][name] for name in case.get("errors", {})]
        row = {name: case[name] for name in ("backend", "dtype", "heads", "forest", "passed")}
        row["worst error / limit"] = f"{max(shares):.2f}" if shares else "-"
        rows.append({**row, "error": case.get("error", "-")})
    return rows


def rule_times_table(records: list[Record]) -> list[Record]:
    """Return a row for every shape and backend of the rule of recurrent layers."""
    rows = []
    for case in records:
        if case["kind"] != "rule_time" or "forward_ms" not in case:
            continue
        row = {name: case[name] for name in ("shape", "backend", "rows", "tokens", "nodes", "calls")}
        row |= {name: f"{case[name]:.2f}" for name in ("forward_ms", "backward_ms")}
        peak = case["peak_bytes"]
        rows.append({**row, "peak GB": "-" if peak is None else f"{peak / 1e9:.2f}"})
    return rows


def engines_table(records: list[Record]) -> list[Record]:
    """Return a row for each engine that was asked for: what it lacks, or how far it is from verl's own."""
    rows = []
    for record in records:
        if record["kind"] == "engine":
            differences = {name: f"{value:.1e}" for name, value in record.get("differences", {}).items()}
            told = {name: record.get(name, "-") for name in ("engine", "passed", "ranks", "skipped")}
            rows.append(told | {name: differences.get(name, "-") for name in ("log_probs", "control", "grad_norm")})
    return rows


def failed_cases(records: list[Record]) -> list[str]:
    """Return a line for every case that failed, with what it exceeded."""
    lines = []
    for case in records:
        if case["kind"] != "case" or case.get("passed", True):
            continue
        over = {
            name: f"{error:.1e} > {case['limits'][name]:.1e}"
            for name, error in case.get("errors", {}).items()
            if not error <= case["limits"][name]
        }
        why = [case["error"]] if "error" in case else [str(over)] if over else []
        why += ["does not repeat itself"] if case.get("must_repeat") and not case["repeats"] else []
        why += ["other queries have a gradient"] if not case.get("others_are_zero", True) else []
        layer = f"{case['dtype']} D {case['head_dim']} heads {tuple(case['heads'])}"
        asked = [f"{name} {case[name]}" for name in ("window", "softcap", "sinks", "deterministic") if case[name]]
        lines.append(f"{case['backend']}: {', '.join([layer, *asked])}, {case['forest']}: {'; '.join(why)}")
    return lines


def refusals(records: list[Record]) -> list[str]:
    """Return every reason that a backend or contender gave, once."""
    reasons = set()
    for record in records:
        if "refused" in record:
            said = record["refused"]
            name = record.get("backend") or record["contender"]
            reasons.add(f"{name}: {said if isinstance(said, str) else '; '.join(said)}")
    return sorted(reasons)


def layers_table(records: list[Record]) -> list[Record]:
    """Return a row for every shape and contender, with its time beside that of the fastest flat contender."""
    # The stage of correctness times some, too: what comes last counts.
    last = {
        (record["shape"], record["contender"]): record
        for record in records
        if record["kind"] == "layer" and "forward_ms" in record
    }
    measured, rows = list(last.values()), []
    for shape in dict.fromkeys(record["shape"] for record in measured):
        mine = [record for record in measured if record["shape"] == shape]
        flat_ms = min((_total_ms(each) for each in mine if each["contender"].endswith(" flat")), default=None)
        for each in sorted(mine, key=lambda record: (record["queries"], record["contender"])):
            peak = each["peak_bytes"]
            is_part = ", " in each["contender"]  # a section, or its pack
            rows.append(
                {
                    "shape": shape,
                    "contender": each["contender"],
                    "queries": each["queries"],
                    "forward ms": f"{each['forward_ms']:.2f}",
                    "TFLOP/s": f"{each['forward_tflops']:.0f}",
                    "backward ms": f"{each['backward_ms']:.2f}",
                    "TFLOP/s backward": f"{each['backward_tflops']:.0f}",
                    "visible": f"{each['visible_pairs'] / each['visited_pairs']:.0%}",
                    "peak GB": "-" if peak is None else f"{peak / 1e9:.2f}",
                    "flat / this": "-" if flat_ms is None or is_part else f"{flat_ms / _total_ms(each):.2f}",
                }
            )
    return rows


def _total_ms(record: Record) -> float:
    return record["forward_ms"] + record["backward_ms"]


def report(folder: Path) -> None:
    """Print all tables of a folder of results."""
    records = [
        record
        for path in sorted(folder.glob("*/*.jsonl"))
        if path.name != "jobs.jsonl" and not path.name.startswith(("compile-", "model-"))
        for record in read_records(path)
    ]
    machines = [record for record in records if record["kind"] == "machine"]
    if any(machine["rehearsal"] for machine in machines):
        print("REHEARSAL ON A CPU: these numbers are no result\n")
    for machine in machines:
        where = machine.get("device", machine["processor"])
        fa4 = f"; fa4: {machine['fa4']}" if "fa4" in machine else ""
        print(f"{machine['stage']}: {machine['date']}, {where}, torch {machine['torch']}{fa4}")
    print("\nJobs\n")
    jobs = jobs_table(folder)
    print_table(jobs)
    sections = {
        "Cases": cases_table(records),
        "Layers": layers_table(records),
        "Recurrence": rules_table(records),
        "Recurrence, times": rule_times_table(records),
        "Engines": engines_table(records),
    }
    for title, rows in sections.items():
        if rows:
            print(f"\n{title}\n")
            print_table(rows)
    for title, lines in {"Failed": failed_cases(records), "Refused": refusals(records)}.items():
        if lines:
            print(f"\n{title}\n")
            print("\n".join(lines))
    models = sorted(folder.glob("*/model-*.jsonl"))
    if models:
        print("\nModels\n")
        print("\n".join(f"python benchmarks/report_por.py {path}" for path in models))
    num_not_run = sum(record["num_not_run"] for record in records if record["kind"] == "end")
    print(f"\n{num_not_run} cases and measurements did not fit into the time")
    if any(job.get("status") in CUT_SHORT for job in jobs):
        print(f"What jobs that {' or '.join(CUT_SHORT.values())} had not reached is not among them.")


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what gpu_check.sh wrote")
    report(parser.parse_args().folder)


if __name__ == "__main__":
    main()
