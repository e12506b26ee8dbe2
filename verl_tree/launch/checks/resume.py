"""Checks of what earlier starts left: checkpoints to go on from, trees of another run, processes of a dead one."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil
from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import Check, Finding, Findings, has_scheme, refusal_here, value_of
from verl_tree.trainer.starts.checkpoints import choose_start, folder_of, list_checkpoints, look_at
from verl_tree.trainer.starts.tree_folder import other_owner

PATH_KEY = "trainer.resume_from_path"
ENDING_S = 5.0
"""Ray's processes end by themselves in this time, most of them at once."""
SHARED_MEMORY = Path("/dev/shm")


def check_checkpoints(config: DictConfig) -> Findings:
    """Find checkpoints that no run can go on from, and say which is taken instead (`trainer.resume_mode=auto`)."""
    folder = config.trainer.default_local_dir
    if config.trainer.resume_mode != "auto" or not isinstance(folder, str) or has_scheme(folder):
        return
    try:
        start = choose_start(folder_of(config))
    except ValueError as error:
        yield refusal_here(config, "trainer.default_local_dir", str(error))
        return
    for line in start.skipped:
        yield Finding(line, is_warning=True)
    if start.checkpoint is None:
        return
    if start.skipped:
        yield Finding(f"the run goes on from {start.checkpoint.folder}", is_warning=True)
    if not start.checkpoint.is_marked:
        unknown = "it has no complete.json, so whether all its files are whole is not known"
        yield Finding(f"the run goes on from {start.checkpoint.folder}: {unknown}", is_warning=True)


def check_chosen_checkpoint(config: DictConfig) -> Findings:
    """Find a checkpoint that is not there or not whole (`trainer.resume_mode=resume_path`)."""
    if config.trainer.resume_mode != "resume_path":
        return
    name = value_of(config, PATH_KEY)
    if not isinstance(name, str):
        yield refusal_here(config, PATH_KEY, "trainer.resume_mode=resume_path needs the folder of a checkpoint")
        return
    if has_scheme(name):
        return
    folder = Path(name).absolute()
    step = folder.name.removeprefix("global_step_")
    if name.endswith("/") or step == folder.name or not step.isdecimal():
        yield refusal_here(config, PATH_KEY, "give a folder global_step_N, without a / at its end")
    elif not folder.is_dir():
        there = ", ".join(each.folder.name for each in list_checkpoints(folder.parent)) or "none"
        yield refusal_here(config, PATH_KEY, f"no such folder; checkpoints in {folder.parent}: {there}")
    elif (fault := look_at(folder, among_marked=False).fault) is not None:
        yield refusal_here(config, PATH_KEY, f"{fault}; give a checkpoint that is whole")


def check_owner_of_trees(config: DictConfig) -> Findings:
    """Find a folder of trees into which another run writes: their steps would mix."""
    folder = config.tree.dump_dir
    if not isinstance(folder, str) or has_scheme(folder):
        return
    owner = other_owner(Path(folder), config=config)
    if owner is not None:
        names = ", ".join(f"{key} {value}" for key, value in owner.items())
        yield refusal_here(config, "tree.dump_dir", f"another run writes there ({names}); give a folder of its own")


def find_leftovers() -> Findings:
    """Find what a driver that was killed could not end or free: processes without a cluster, and shared memory."""
    yield from _find_processes()
    yield from _find_memory()


def _find_processes() -> Findings:
    # Those of a run that is just ending are given the time to do so.
    processes = list(psutil.process_iter())
    deadline = time.monotonic() + ENDING_S
    while left := {each: title for each in processes if (title := _title_of_orphan(each)) is not None}:
        if time.monotonic() > deadline:
            break
        processes = list(left)
        time.sleep(0.2)
    if left:
        names = ", ".join(f"{title} (pid {each.pid})" for each, title in left.items())
        command = " ".join(["kill", *(str(each.pid) for each in left)])
        message = f"processes of a cluster of Ray's that is gone are left: {names}; end them with: {command}"
        yield Finding(message, is_warning=True)


def _find_memory() -> Findings:
    """Find segments for new weights that no process has mapped. While a training run lives, one of its workers has."""
    sizes = {}
    for path in SHARED_MEMORY.glob("verl_weights_*"):
        # A living training run may free its own meanwhile.
        with suppress(FileNotFoundError):
            status = path.stat()
            if status.st_uid == os.getuid():
                sizes[path] = status.st_blocks * 512
    mapped = _mapped_by_me() if sizes else ""
    left = [path for path in sizes if str(path) not in mapped and path.exists()]
    if left:
        mib = sum(sizes[path] for path in left) / 2**20
        names = " ".join(map(str, left))
        yield Finding(f"shared memory of a training run that was killed, {mib:.0f} MiB: rm {names}", is_warning=True)


def _mapped_by_me() -> str:
    """Return the memory maps of this user's processes, as the kernel writes them."""
    maps = []
    for process in psutil.process_iter():
        # Of other users' processes it cannot be read, and they cannot map this user's segments.
        with suppress(OSError):
            maps.append(Path("/proc", str(process.pid), "maps").read_text())
    return "".join(maps)


def _title_of_orphan(process: psutil.Process) -> str | None:
    """Return the title of this user's process that Ray started and whose raylet is gone; else None."""
    try:
        title = " ".join(process.cmdline()).strip()
        if not title.startswith("ray::") or process.uids().real != os.getuid():
            return None
        parent = process.parent()
        # Ray's processes start some of their own.
        is_kept = parent is not None and (parent.name() == "raylet" or " ".join(parent.cmdline()).startswith("ray::"))
    except psutil.Error:
        return None
    return None if is_kept else title.split()[0]


CHECKS: tuple[Check, ...] = (check_checkpoints, check_chosen_checkpoint, check_owner_of_trees)
