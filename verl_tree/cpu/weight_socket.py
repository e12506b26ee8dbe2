"""Sockets of weight updates on a CPU, with names that no other Ray cluster of this machine uses.

verl names a socket by Ray's job id, and the first job of every cluster has the same id. So two training runs on one
machine, each with a cluster of its own, could take each other's socket and wait for ever. Here the name also has the
process id of the node's raylet, which both ends find in their environment: Ray gives it to the processes it starts.
The ends are the classes of `verl_tree.cpu.vllm_reload`.
"""

import os

from verl.workers.rollout import base

SENDER = "verl_tree.cpu.vllm_reload.CpuServerAdapter"
"""The class, by name: it imports vLLM, which only processes that send weights need."""


def of_this_cluster(handle: str) -> str:
    """Add the raylet's process id to a handle of verl's, `ipc://PATH.sock`. To be called in a process of Ray's."""
    path, extension = handle.rsplit(".", 1)
    return f"{path}-raylet-{os.environ['RAY_RAYLET_PID']}.{extension}"


def register_sender() -> None:
    """Make verl build `SENDER` for rollouts of vLLM in this process; may be called again."""
    base._ROLLOUT_REGISTRY["vllm", "async"] = SENDER
