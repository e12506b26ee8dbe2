"""Runs a script of this folder on several ranks, as torchrun would, in processes that have imported verl already.

Importing verl takes longer than most cases. So the ranks are forked from one process that has done nothing else.
"""

import faulthandler
import gc
import json
import multiprocessing
import os
import runpy
import signal
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
LIMIT_S = 1200.0
"""Only ranks that wait for each other take so long: the slowest script takes two minutes."""


def run_script(name: str, *options: str, num_ranks: int, out: Path) -> Any:
    """Run a script in a process per rank and return the JSON that it writes to `out`.

    Raises:
        AssertionError: A rank failed or was not done in `LIMIT_S`. The others are killed; the message says which rank
            it was and has what they printed, with the stacks of those that were not done. What has failed for an `out`
            is not repeated: it fails with the same message.
    """
    failure = out.with_suffix(".failure")
    assert not failure.exists(), failure.read_text()
    port = free_port()
    script, log = str(FOLDER / name), out.with_suffix(".log")
    ranks = [
        CONTEXT.Process(target=_run, args=(script, (f"--out={out}", *options), rank, num_ranks, port, str(log)))
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    try:
        fault = _wait_for_all(ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    if fault is not None:
        failure.write_text(f"{fault}:\n{log.read_text()[-12000:]}")
        raise AssertionError(failure.read_text())
    return json.loads(out.read_text())


def _wait_for_all(ranks: Sequence[ForkServerProcess]) -> str | None:
    """Wait until all have ended or one has failed; return what went wrong."""
    deadline = time.monotonic() + LIMIT_S
    while waited := [rank for rank in ranks if rank.exitcode is None]:
        if not wait([rank.sentinel for rank in waited], timeout=max(0.0, deadline - time.monotonic())):
            for rank in waited:
                os.kill(rank.pid, signal.SIGUSR1)
            time.sleep(1.0)  # for the stacks
            return f"ranks {[ranks.index(rank) for rank in waited]} are not done after {LIMIT_S:g} s"
        if failed := {number: rank.exitcode for number, rank in enumerate(ranks) if rank.exitcode not in (None, 0)}:
            return f"exit codes of ranks: {failed}"
    return None


def _run(script: str, options: Sequence[str], rank: int, num_ranks: int, port: int, log: str) -> None:
    """Be one rank: set what torchrun sets, and run the script as the main program.

    Nothing is torn down at its end: a rank once hung there for minutes, behind its last result.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(num_ranks)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = [script, *options]
    faulthandler.enable()  # a crash in native code says where
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    gc.freeze()  # The collector need not look through what is shared.
    runpy.run_path(script, run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
