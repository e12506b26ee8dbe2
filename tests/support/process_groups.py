"""Process groups of one rank, for code that asks torch.distributed, and free ports."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def group_of_one() -> Iterator[None]:
    """Make this process a group of its own while active."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
