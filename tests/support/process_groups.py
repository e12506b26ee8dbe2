"""Process groups of one rank, for code that asks torch.distributed, of all ranks of a script, and free ports."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a group of its own while active."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def join_ranks() -> Path:
    """Join the ranks of a script (`rank_scripts.py`); return an empty folder that all share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shared = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    return Path(str(shared[0]))


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
