"""A program that compiles attention kernels ahead of time, without a GPU, and prints the results as JSON lines.

    python tests/support/compile_kernels.py '[{"kernel": "forward", "capability": 90, "dtype": "bf16", "head_dim": 128,
        "query_block": 128, "key_block": 64, "num_warps": 8, "num_stages": 3, "num_groups": 4, "options": ["window"]}]'

It is a program because TRITON_INTERPRET must not be set. Arguments are specialised as in a launch on contiguous
(T, H, D) tensors. The numbers are read off the machine code: `cuobjdump --dump-resource-usage` and `-sass`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia_compiler
from triton.compiler import ASTSource

from verl_tree.attention import triton_kernels
from verl_tree.attention.triton_backend import DELTA_BLOCK
from verl_tree.attention.triton_configs import padded_dim

CUOBJDUMP = Path(nvidia_compiler.__file__).parent / "bin" / "cuobjdump"
POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "grad_out", "dq", "dk", "dv"), "input"),
    **dict.fromkeys(("subtree_end", "rows", "indices", "positions"), "i32"),
    **dict.fromkeys(("lse", "delta", "sinks"), "fp32"),
}
OPTIONS = {"window": ("positions", "window"), "softcap": ("scale_tanh",), "sinks": ("sinks",)}
"""Arguments that are None, and so no arguments of the compiled kernel, where a layer does not ask for the option."""


def compile_one(case: dict) -> dict:
    """Compile one kernel for one target and measure the result."""
    kernel = getattr(triton_kernels, case["kernel"] + "_kernel")
    constants = {"DIM": case["head_dim"], "PADDED_DIM": padded_dim(case["head_dim"])}
    if case["kernel"] == "delta":
        constants["BLOCK"] = DELTA_BLOCK
    else:
        constants |= {"QUERY_BLOCK": case["query_block"], "KEY_BLOCK": case["key_block"], "PRECISION": "ieee"}
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
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", case["capability"], 32),
        options={"num_warps": case["num_warps"], "num_stages": case["num_stages"]},
    )
    return case | {"shared_bytes": compiled.metadata.shared} | measure(compiled.asm["cubin"])


def measure(cubin: bytes) -> dict:
    """Return the registers of a thread, the bytes that it spills, and the number of matrix unit instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([CUOBJDUMP, flag, file.name], check=True, capture_output=True, text=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local_loads": len(re.findall(r"\bLDL\b", sass)),
        "local_stores": len(re.findall(r"\bSTL\b", sass)),
        "hgmma": len(re.findall(r"\bHGMMA\b", sass)),
        "hmma": len(re.findall(r"\bHMMA\b", sass)),
        "async_copies": len(re.findall(r"\bLDGSTS\b", sass)),
    }


if __name__ == "__main__":
    for case in json.loads(sys.argv[1]):
        print(json.dumps(compile_one(case)), flush=True)
