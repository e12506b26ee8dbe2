"""The contract of environments that fork, for each adapter, and what is left of them when a process dies."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollout_hooks.environments import CopiedEnvironment, Environment, FolderEnvironment, ProcessEnvironment
from rollout_hooks.environments.folder import process_folder


class Notes:
    """An object with a state."""

    def __init__(self, *notes: str) -> None:
        self.notes = list(notes)

    def write(self, note: str) -> None:
        self.notes.append(note)

    def read(self) -> str:
        return "".join(self.notes)

    def fail(self) -> None:
        raise LookupError("no such note")

    def hang(self) -> None:
        signal.pause()

    def open_self(self) -> object:
        return open(__file__)  # cannot be pickled


@dataclass
class Adapter:
    """How a test acts on an environment, looks at it, and counts what is kept."""

    make: Callable[[], CopiedEnvironment]
    write: Callable[[Any, str], Any]
    read: Callable[[Any], Any]
    num_kept: Callable[[], int]


def folder_adapter(tmp_path: Path) -> Adapter:
    (tmp_path / "source" / "inner").mkdir(parents=True)
    (tmp_path / "source" / "inner" / "notes").write_text("a")

    async def write(environment: FolderEnvironment, note: str) -> None:
        with (environment.state / "inner" / "notes").open("r+") as file:  # in place: a hard link would see it
            file.seek(0, os.SEEK_END)
            file.write(note)

    async def read(environment: FolderEnvironment) -> str:
        return (environment.state / "inner" / "notes").read_text()

    root = tmp_path / "root"
    return Adapter(
        lambda: FolderEnvironment(tmp_path / "source", root=root), write, read, lambda: len(list(root.glob("*/*")))
    )


def process_adapter(_: Path) -> Adapter:
    running: list[int] = []

    async def write(environment: ProcessEnvironment, note: str) -> None:
        await environment.call("write", note)

    async def read(environment: ProcessEnvironment) -> str:
        return await environment.call("read")

    def make() -> ProcessEnvironment:
        environment = ProcessEnvironment(Notes, "a")
        running.append(session_of(environment))
        return environment

    return Adapter(make, write, read, lambda: sum(len(processes_of(each)) for each in running))


def copied_adapter(_: Path) -> Adapter:
    freed: list[Notes] = []
    made: list[Notes] = []

    def copy(notes: Notes) -> Notes:
        made.append(Notes(*notes.notes))
        return made[-1]

    async def write(environment: CopiedEnvironment[Notes], note: str) -> None:
        environment.state.write(note)

    async def read(environment: CopiedEnvironment[Notes]) -> str:
        return environment.state.read()

    def make() -> CopiedEnvironment[Notes]:
        return CopiedEnvironment(copy(Notes("a")), copy=copy, free=freed.append)

    return Adapter(make, write, read, lambda: len(made) - len(freed))


def session_of(environment: ProcessEnvironment) -> int:
    """Return the number of the process group of an environment, which all of its forks are in."""
    info = Path(f"/proc/self/fdinfo/{environment.state.process}").read_text()
    return os.getpgid(int(next(line for line in info.splitlines() if line.startswith("Pid:")).split()[1]))


def processes_of(group: int) -> list[int]:
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


async def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether something comes to hold, which the kernel does in its own time."""
    for _ in range(500):
        if holds():
            return True
        await asyncio.sleep(0.01)
    return False


ADAPTERS = {"folder": folder_adapter, "process": process_adapter, "copied": copied_adapter}


@pytest.mark.parametrize("name", ADAPTERS)
def test_what_is_written_after_a_fork_is_seen_nowhere_else_and_released_ids_are_refused(
    name: str, tmp_path: Path
) -> None:
    """A ──snapshot 1── b ──snapshot 2 (of the fork)── c; every environment and snapshot has what its path wrote."""
    adapter = ADAPTERS[name](tmp_path)

    async def run() -> None:
        root = adapter.make()
        first = await root.snapshot()
        await adapter.write(root, "r")
        left, right = await root.fork(first), await root.fork(first)
        await adapter.write(left, "l")
        second = await left.snapshot()
        await adapter.write(left, "L")
        inner = await right.fork(second)  # any of a family forks what one of them has kept
        await adapter.write(inner, "i")
        again = await inner.fork(first)
        environments = (root, left, right, inner, again)
        assert [await adapter.read(each) for each in environments] == ["ar", "alL", "a", "ali", "a"]

        assert adapter.num_kept() == 7
        await root.release(first)
        assert await eventually(lambda: adapter.num_kept() == 6)
        for use in (root.fork, root.release):
            with pytest.raises(ValueError, match=rf"snapshot {first}: released, or.*fork before you release it"):
                await use(first)
        await left.release()
        assert await eventually(lambda: adapter.num_kept() == 5)
        assert await adapter.read(await left.fork(second)) == "al"  # what it had kept is still there
        assert [await adapter.read(each) for each in (root, right, inner)] == ["ar", "a", "ali"]

    asyncio.run(run())


def test_a_folder_holds_no_more_bytes_than_it_may_and_keeps_modes_links_and_read_only_folders(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "locked").mkdir(parents=True)
    (source / "run.sh").write_text("12345")
    (source / "run.sh").chmod(0o750)
    (source / "link").symlink_to("run.sh")
    (source / "locked").chmod(0o500)
    size = 5 + len("run.sh")

    async def run() -> None:
        environment = FolderEnvironment(source, max_bytes=2 * size, root=tmp_path / "root")
        assert (environment.state / "run.sh").stat().st_mode & 0o777 == 0o750
        assert (environment.state / "link").readlink() == Path("run.sh")
        snapshot = await environment.snapshot()
        with pytest.raises(ValueError, match=rf"max_bytes={2 * size}: copies of {2 * size} bytes.*raise max_bytes"):
            await environment.fork(snapshot)
        await environment.release(snapshot)
        await environment.snapshot()  # there is room again

    asyncio.run(run())
    with pytest.raises(ValueError, match=r"none: it cannot be copied.*No such file"):
        FolderEnvironment(tmp_path / "none", root=tmp_path / "root")


def test_forks_at_the_same_time_are_as_many_folders_and_all_are_freed(tmp_path: Path) -> None:
    """`benchmarks/environments.py` says how many a minute."""
    adapter = folder_adapter(tmp_path)

    async def run() -> None:
        first = adapter.make()
        snapshot = await first.snapshot()
        forks = await asyncio.gather(*(first.fork(snapshot) for _ in range(50)))
        for number, fork in enumerate(forks):
            await adapter.write(fork, str(number))
        assert [await adapter.read(fork) for fork in forks] == [f"a{number}" for number in range(50)]
        assert adapter.num_kept() == 52
        await asyncio.gather(*(fork.release() for fork in forks))
        assert adapter.num_kept() == 2

    asyncio.run(run())


def test_a_process_hands_on_errors_and_ends_with_a_call_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        environment = ProcessEnvironment(Notes, "a")
        group = session_of(environment)
        with pytest.raises(LookupError, match="no such note"):
            await environment.call("fail")
        fork = await environment.fork(await environment.snapshot())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fork.call("hang"), 0.1)
        with pytest.raises(ValueError, match="the process of the environment has ended"):
            await fork.call("read")
        assert await environment.call("read") == "a"
        assert await eventually(lambda: len(processes_of(group)) == 2)

    asyncio.run(run())
    with pytest.raises(TypeError, match="at most 1 argument"):
        ProcessEnvironment(dict, 1, 2, 3)
    monkeypatch.setattr(Notes, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Notes", Notes, raising=False)
    with pytest.raises(AttributeError, match="'Notes' on <module '__main__'"):
        ProcessEnvironment(Notes)  # what a program defines itself cannot be imported elsewhere


def test_a_copy_that_nobody_waits_for_is_freed() -> None:
    copied, freed = [], []

    def slow(state: str) -> str:
        signal.sigtimedwait((), 0.2)
        copied.append(state)
        return "copy"

    async def run() -> None:
        environment: Environment = CopiedEnvironment("state", copy=slow, free=freed.append)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.snapshot(), 0.05)

    asyncio.run(run())
    assert (copied, freed) == (["state"], ["copy"])


WORKER = """
import asyncio, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from test_environments import Notes, session_of
from rollout_hooks.environments import FolderEnvironment, ProcessEnvironment

async def run():
    folder = FolderEnvironment(Path(sys.argv[1]), root=Path(sys.argv[2]))
    await folder.fork(await folder.snapshot())
    process = ProcessEnvironment(Notes, "a")
    fork = await process.fork(await process.snapshot())
    print(session_of(process), flush=True)
    await asyncio.sleep(600)

asyncio.run(run())
"""


def test_nothing_is_left_of_a_killed_worker_once_another_starts(tmp_path: Path) -> None:
    """Two workers of one machine; one is killed, the other's folders stay."""
    source, root = tmp_path / "source", tmp_path / "root"
    source.mkdir()
    command = [sys.executable, "-c", WORKER, str(source), str(root), str(Path(__file__).parent)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        groups = [int(worker.stdout.readline()) for worker in workers if worker.stdout]
        assert [len(processes_of(group)) for group in groups] == [3, 3]
        assert len(list(root.glob("*/*"))) == 6
        workers[0].kill()
        workers[0].wait()
        # The kernel ends its processes; its folders are there until a process starts.
        assert asyncio.run(eventually(lambda: not processes_of(groups[0])))
        assert len(list(root.glob("*/*"))) == 6
        mine = process_folder(root)
        assert len(list(root.glob("*/*"))) == 3
        assert len(list(root.iterdir())) == 2
        assert mine.is_dir()
        assert len(processes_of(groups[1])) == 3
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stdout:
                worker.stdout.close()
