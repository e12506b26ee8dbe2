"""Runs a script of this folder on several ranks, as torchrun would, in processes that have imported verl already.

Importing verl takes longer than most cases. So the ranks are forked from one process that has done nothing else.
"""

import gc
import json
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from process_groups import free_port

FOLDER = Path(__file__).parent
CONTEXT = multiprocessing.get_context("forkserver")
"""Its processes are forked from the one that has imported verl."""
CONTEXT.set_forkserver_preload(["verl_tree.testing.local_worker"])


def run_script(name: str, *options: str, num_ranks: int, out: Path, timeout_s: float) -> Any:
    """Run a script in a process per rank and return the JSON that it writes to `out`.

    Raises:
        AssertionError: A rank failed or was not done in time. The others are killed; the message has what they printed.
    """
    port = free_port()
    script, log = str(FOLDER / name), out.with_suffix(".log")
    ranks = [
        CONTEXT.Process(target=_run, args=(script, (f"--out={out}", *options), rank, num_ranks, port, str(log)))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        is_right = _wait_for_all(ranks, timeout_s=timeout_s)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert is_right, log.read_text()[-12000:]
    return json.loads(out.read_text())


def _wait_for_all(ranks: Sequence[ForkServerProcess], *, timeout_s: float) -> bool:
    """Wait until all have ended or one has failed; return whether all were right."""
    deadline = time.monotonic() + timeout_s
    while any(rank.exitcode is None for rank in ranks):
        sentinels = [rank.sentinel for rank in ranks if rank.exitcode is None]
        if not wait(sentinels, timeout=max(0.0, deadline - time.monotonic())):
            return False
        if any(rank.exitcode not in (None, 0) for rank in ranks):
            return False
    return all(rank.exitcode == 0 for rank in ranks)


def _run(script: str, options: Sequence[str], rank: int, num_ranks: int, port: int, log: str) -> None:
    """Be one rank: set what torchrun sets, and run the script as the main program."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(num_ranks)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *options]
    gc.freeze()  # The collector need not look through what is shared.
    runpy.run_path(script, run_name="__main__")
