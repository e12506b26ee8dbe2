"""The kernels that the Triton backend ships, as `compile_kernels.py` takes them, and their compilation."""

import json
import os
import subprocess
import sys
from pathlib import Path

from verl_tree.attention.triton_configs import HOPPER_CAPPED_CONFIGS, HOPPER_CONFIGS, KernelConfigs, padded_dim

COMPILE = Path(__file__).with_name("compile_kernels.py")
HOPPER_TABLES = ((HOPPER_CONFIGS, ()), (HOPPER_CAPPED_CONFIGS, ("softcap",)))
"""Tables of configurations, with the options that a layer has which uses them."""

ADDED = ((), ("window",), ("sinks",), ("window", "sinks"))
"""What any layer may ask for besides."""

TABLE_DIMS = (64, 128, 256)
"""The head dims of the tables; the others are padded to one of them."""

NUM_PROCESSES = 2


def cases(
    table: dict[int, KernelConfigs],
    *,
    head_dims: tuple[int, ...],
    capability: int = 90,
    dtype: str = "bf16",
    num_groups: int = 4,
    options: tuple[str, ...] = (),
) -> list[dict]:
    """Return the three kernels for each head dim. Sinks are an option of `forward` only."""
    target = {"capability": capability, "dtype": dtype, "num_groups": num_groups}
    return [
        {"kernel": kernel, "head_dim": head_dim}
        | target
        | config._asdict()
        | {"options": [option for option in options if option != "sinks" or kernel == "forward"]}
        for head_dim in head_dims
        for configs in [table[padded_dim(head_dim)]]
        for kernel, config in (("forward", configs.forward), ("dkv", configs.dkv), ("dq", configs.dq))
    ]


def hopper_cases(*, head_dims: tuple[int, ...], dtype: str = "bf16", added: tuple[tuple[str, ...], ...] = ADDED):
    """Return the kernels for compute capability 9.0 with every set of options of `added`, each once."""
    found = [
        case
        for table, options in HOPPER_TABLES
        for more in added
        for case in cases(table, head_dims=head_dims, dtype=dtype, options=options + more)
    ]
    return [case for position, case in enumerate(found) if case not in found[:position]]


def compiled(cases: list[dict], folder: Path) -> list[dict]:
    """Return what the compilers say of each case, from processes in which triton does not interpret.

    `folder` is empty and serves as Triton's cache.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, COMPILE, json.dumps(cases[number::NUM_PROCESSES])],
            env=environment | {"TRITON_CACHE_DIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(NUM_PROCESSES)
    ]
    measured: list[dict] = [{}] * len(cases)
    for number, process in enumerate(processes):
        output, _ = process.communicate()
        assert process.returncode == 0, f"{COMPILE.name} failed; its errors are above"
        measured[number::NUM_PROCESSES] = map(json.loads, output.splitlines())
    return measured
