"""A program that compiles attention kernels ahead of time, without a GPU, and prints the results as JSON lines.

    python tests/support/compile_kernels.py '[{"kernel": "forward", "capability": 90, "dtype": "bf16", "head_dim": 128,
        "query_block": 128, "key_block": 64, "num_warps": 8, "num_stages": 3, "num_groups": 4, "options": ["window"]}]'

It is a program because TRITON_INTERPRET must not be set. Arguments are specialised as in a launch on contiguous
(T, H, D) tensors. The numbers are read off Triton's code (TTGIR), the PTX, and the log of `ptxas -v`. Triton prints
that log when it compiles, but not when it finds the kernel in its cache: TRITON_CACHE_DIR must be an empty folder.
"""

import io
import json
import re
import sys
from contextlib import redirect_stdout

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from verl_tree.attention import triton_kernels, triton_key_kernels
from verl_tree.attention.triton_configs import padded_dim

MODULES = (triton_kernels, triton_key_kernels)
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "grad_out", "dq", "dk", "dv"), "input"),
    **dict.fromkeys(("subtree_end", "rows", "indices", "cuts", "positions"), "i32"),
    **dict.fromkeys(("lse", "delta", "sinks", "parts"), "fp32"),
}
OPTIONS = {"window": ("positions", "window"), "softcap": ("scale_tanh",), "sinks": ("sinks",)}
"""Arguments that are None, and so no arguments of the compiled kernel, where a layer does not ask for the option."""

INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "mma": "mma.sync",
    "async_copies": "cp.async.c",
}

STREAM_BLOCKS = {"delta": 64, "add_parts": 16}
"""Rows of a program of the kernels without products: `DELTA_BLOCK` and `ADDED_KEYS` of `triton_ops.py`."""


def compile_one(case: dict) -> dict:
    """Compile one kernel for one target and measure the result."""
    name = case["kernel"] + "_kernel"
    kernel = next(vars(module)[name] for module in MODULES if name in vars(module))
    constants = {"DIM": case["head_dim"], "PADDED_DIM": padded_dim(case["head_dim"]), "PRECISION": "ieee"}
    constants |= {"QUERY_BLOCK": case.get("query_block"), "KEY_BLOCK": case.get("key_block")}
    constants["BLOCK"] = STREAM_BLOCKS.get(case["kernel"])
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    absent = {name for option, names in OPTIONS.items() if option not in case["options"] for name in names}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in absent:
            signature[name], constants[name] = "constexpr", None
        elif name in POINTERS:
            signature[name] = "*" + POINTERS[name].replace("input", case["dtype"])
        elif name in constants:
            signature[name] = "constexpr"
        elif name in ("stride_qd", "stride_kd", "stride_vd", "stride_od") or (name, case["num_groups"]) == (
            "num_groups",
            1,
        ):
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
        if name not in constants and (name in POINTERS or name.startswith("stride")):
            attributes[position,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": case["num_warps"], "num_stages": case["num_stages"]}
    measured, ttgir = compile_and_measure(source, capability=case["capability"], options=options)
    return case | measured | {"loop_waits": loop_waits(ttgir)}


def compile_and_measure(source: ASTSource, *, capability: int, options: dict[str, int]) -> tuple[dict, str]:
    """Compile a kernel for a GPU; return its shared memory, what ptxas says, instructions counted, and the TTGIR."""
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    measured = {"shared_bytes": compiled.metadata.shared, **ptxas_numbers(log.getvalue())}
    measured |= {name: ptx.count(instruction) for name, instruction in INSTRUCTIONS.items()}
    return measured, compiled.asm["ttgir"]


def loop_waits(ttgir: str) -> list[list[int]]:
    """Return, for each loop without a loop inside, how many groups of copies may be in flight where it waits."""
    loops: list[tuple[int, list[int]]] = []  # indentation and waits of the open loops
    innermost, holds_loop = [], False
    for line in ttgir.splitlines():
        indentation = len(line) - len(line.lstrip())
        if re.search(r"= scf\.for |^ *scf\.for ", line):
            loops.append((indentation, []))
            holds_loop = False
        elif loops and (wait := re.search(r"async_wait .*num = (\d+)", line)):
            loops[-1][1].append(int(wait[1]))
        elif loops and indentation == loops[-1][0] and line.lstrip().startswith("}"):
            _, waits = loops.pop()
            innermost += [] if holds_loop else [waits]
            holds_loop = True
    assert not loops
    return innermost


def ptxas_numbers(log: str) -> dict:
    """Return what `ptxas -v` says: advisories on wgmma, registers of a thread, bytes of its stack and spilled bytes."""
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    assert stack is not None, log
    assert registers is not None, log
    frame, stores, loads = map(int, stack.groups())
    return {
        "advisories": sorted(set(re.findall(r"\bC75\d\d\b", log))),
        "registers": int(registers[1]),
        "stack_bytes": frame,
        "spilled_bytes": [stores, loads],
    }


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(compile_one(case)), flush=True)
