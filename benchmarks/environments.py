"""Measures how fast environments fork: one snapshot, then forks of it, each released. JSON.

A folder has files of 2 KiB. A process holds an object of a hundred MB, all of which its forks share. A game is one of
recipes/textworld, where `scripts/setup.sh --extra textworld` has installed the package.

    PYTHONPATH=. python benchmarks/environments.py --out docs/benchmarks/data/environments.json
"""

import asyncio
import operator
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness import environment, new_parser, print_table, write_json

from recipes.textworld.games import PACKAGES, Play, make_game
from rollout_hooks.environments import CopiedEnvironment, FolderEnvironment, ProcessEnvironment

MEMORY = Path("/dev/shm/rollout_environments_benchmark")


def folder(path: Path, num_files: int, root: Path | None) -> FolderEnvironment:
    for number in range(num_files):
        file = path / str(num_files) / str(number % 10) / str(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 2048)
    return FolderEnvironment(path / str(num_files), root=root)


def cases(path: Path) -> Iterator[tuple[str, int, Callable[[], CopiedEnvironment]]]:
    """Yield the name of each case, how often it forks, and what makes its environment."""
    for place, root in (("in memory", MEMORY), ("on disk", None)):
        for num_files, num_forks in ((10, 1000), (100, 300), (1000, 10)):
            yield f"folder {place}, {num_files} files", num_forks, partial(folder, path, num_files, root)
    yield "process of 100 MB", 300, partial(ProcessEnvironment, operator.mul, b"1", 10**8)
    if PACKAGES.exists():
        make_game(path / "game.z8", seed=1)
        yield "game", 100, lambda: CopiedEnvironment(Play(path / "game.z8"), copy=Play.copy, free=Play.close)


def cpu_seconds() -> float:
    """Return the processor time of this process and of the copies that it has started; not of served processes."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


async def measure(make: Callable[[], CopiedEnvironment], num_forks: int) -> dict[str, Any]:
    first = make()
    snapshot = await first.snapshot()
    started, cpu_started = time.perf_counter(), cpu_seconds()
    for _ in range(num_forks):
        await (await first.fork(snapshot)).release()
    seconds, cpu_s = time.perf_counter() - started, cpu_seconds() - cpu_started
    await first.release(snapshot)
    await first.release()
    return {
        "forks": num_forks,
        "ms_per_fork": round(1000 * seconds / num_forks, 2),
        "forks_per_minute": round(60 * num_forks / seconds),
        "cpu_ms_per_fork": round(1000 * cpu_s / num_forks, 2),
    }


def main() -> None:
    options = new_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as path:
        rows = []
        for name, num_forks, make in cases(Path(path)):
            rows.append({"environment": name, **asyncio.run(measure(make, num_forks))})
            print(rows[-1], flush=True)
    print_table(rows)
    write_json({**environment(options), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
