"""Compiles the Triton kernels for compute capability 9.0 and prints what their machine code is like. Needs no GPU.

One line per kernel, head dim and set of options: tiles, warps and stages; registers and bytes of stack of a thread;
advisories C75xx, with which ptxas says that it runs one wgmma after the other; and how many groups of copies are
in flight, at least, where the loops over full and over partial tiles wait. 0 means that nothing is copied while the
products of a tile run.

    PYTHONPATH=tests/support python benchmarks/machine_code.py [--head-dims 64 128 256] [--plain] [--out FILE]

Kernels of another revision, or another Triton, are those that PYTHONPATH finds first:

    git worktree add ../before REVISION
    PYTHONPATH=../before:tests/support python benchmarks/machine_code.py
    pip install --target ../triton --no-deps triton==3.7.1
    PYTHONPATH=../triton:tests/support python benchmarks/machine_code.py
"""

import tempfile
from pathlib import Path

import triton
from harness import environment, new_parser, print_table, write_json
from kernel_cases import ADDED, TABLE_DIMS, compiled, hopper_cases


def main() -> None:
    """Compile, print the table and write the JSON."""
    parser = new_parser(__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(TABLE_DIMS))
    parser.add_argument("--plain", action="store_true", help="without windows and sinks")
    options = parser.parse_args()
    cases = hopper_cases(head_dims=tuple(options.head_dims), added=((),) if options.plain else ADDED)
    with tempfile.TemporaryDirectory() as folder:
        records = compiled(cases, Path(folder))
    print(f"triton {triton.__version__}")
    print_table([_row(record) for record in records])
    write_json({"environment": environment(options), "records": records}, options.out)


def _row(record: dict) -> dict[str, object]:
    tile = [str(record[key]) for key in ("query_block", "key_block", "num_warps", "num_stages")]
    return {
        "kernel": record["kernel"],
        "D": record["head_dim"],
        "options": "+".join(record["options"]) or "-",
        "tile, warps, stages": " x ".join(tile[:2]) + ", " + ", ".join(tile[2:]),
        "registers": record["registers"],
        "stack": record["stack_bytes"],
        "C75xx": " ".join(record["advisories"]) or "-",
        "in flight": ", ".join(str(min(waits)) for waits in record["loop_waits"]),
        "shared KB": f"{record['shared_bytes'] / 1024:.0f}",
    }


if __name__ == "__main__":
    main()
