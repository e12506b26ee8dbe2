"""A checkpoint engine for machines without an accelerator: verl's `CheckpointEngine` (0.9.1) on gloo.

With `trainer_mode=separate_async` the rollouts are processes of their own, and actor rank 0 sends them the weights.
verl's own engines for that need an accelerator or RDMA. The profile `cpu` names this module in
`rollout.checkpoint_engine.custom_backend_module`, and verl imports it wherever it makes an engine.

Every update has a process group of its own, beside the default groups, so rollouts may come and go between updates.
Tensors travel one by one, as bytes; gloo reads and writes them in place, so there are no buckets. A tensor's name,
shape and type go ahead of it through the store on which the group was built, in one queue per receiver.
"""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from typing_extensions import override
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_tree.cpu.weight_socket import register_sender

BACKEND = "gloo"
"""The engine's name in verl's registry."""

END = pickle.dumps(None)
"""What a queue has after the last tensor of an update."""

# A separate rollout imports this module, then makes the sender that hands what it receives to vLLM.
register_sender()


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Where actor rank 0 serves the store of the next update."""

    host: str
    port: int


@CheckpointEngineRegistry.register(BACKEND)  # type: ignore[arg-type] - verl forgot to make it static
class GlooCheckpointEngine(CheckpointEngine):
    """verl's engine `gloo`: weights from actor rank 0 to every rollout worker.

    Args:
        bucket_size: Ignored: no tensor is copied on its way.
        is_master: Whether this process is actor rank 0.
        timeout_s: Longest wait for the other processes, and for one tensor.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout_s: float = 600.0) -> None:  # noqa: ARG002
        self._is_master = is_master
        self._timeout = timedelta(seconds=timeout_s)
        self._rank = -1
        self._num_ranks = 0
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    @override
    def prepare(self) -> StoreAddress | None:  # type: ignore[override] - only build_topology reads it
        """Serve the store of the next update on actor rank 0 and return its address; None elsewhere."""
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False)
        return StoreAddress(host, self._store.port)

    @classmethod
    @override
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for the ranks of the actor and for the rollout workers.

        Actor rank 0 is the group's rank 0, and the rollout workers follow. The actor's other ranks stay outside (-1).
        """
        num_ranks = 1 + rollout_world_size

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {"rank": ranks, "num_ranks": [num_ranks] * len(ranks), "address": metadata[:1] * len(ranks)}

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, num_ranks)))

    @override
    def init_process_group(self, rank: int, num_ranks: int, address: StoreAddress) -> None:  # type: ignore[override]
        """Join the group of the next update; a rank of -1 stays outside.

        Raises:
            RuntimeError: Not all processes came in time.
        """
        self._rank, self._num_ranks = rank, num_ranks
        if rank < 0:
            return
        with self._explain("did not find the others"):
            if rank > 0:
                self._store = TCPStore(address.host, address.port, is_master=False, timeout=self._timeout)
            assert self._store is not None, "prepare comes first"
            self._group = ProcessGroupGloo(self._store, rank, num_ranks, self._timeout)

    @override
    def finalize(self) -> None:
        """Leave the group of the update that has ended."""
        self._group = self._store = None

    @override
    async def send_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],  # type: ignore[override] - verl names the generator that it passes
        global_steps: int | None = None,
    ) -> None:
        """Send all weights from rank 0.

        Raises:
            RuntimeError: A receiver is gone, or did not take a tensor in time.
        """
        for name, weight in weights:
            # Weights are gathered from all ranks of the actor, so those outside the group walk the iterator, too.
            if self._rank == 0:
                await asyncio.to_thread(self._send, pickle.dumps((name, weight.shape, weight.dtype)), weight)
        if self._rank == 0:
            await asyncio.to_thread(self._announce, END)

    @override
    async def receive_weights(  # type: ignore[override] - verl annotates the coroutine's generator
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the name and the tensor of every weight, in the order in which rank 0 sends them.

        Raises:
            RuntimeError: The sender is gone, or sent nothing in time.
        """
        while (received := await asyncio.to_thread(self._receive)) is not None:
            yield received

    @torch.no_grad()
    def _send(self, announced: bytes, weight: torch.Tensor) -> None:
        self._announce(announced)
        self._broadcast(weight.detach().cpu().contiguous())

    def _announce(self, announced: bytes) -> None:
        assert self._store is not None, "init_process_group comes first"
        with self._explain("could not announce a tensor"):
            for receiver in range(1, self._num_ranks):
                self._store.queue_push(str(receiver), announced)

    def _receive(self) -> tuple[str, torch.Tensor] | None:
        assert self._store is not None, "init_process_group comes first"
        with self._explain("got no tensor"):
            announced = self._store.queue_pop(str(self._rank))
        if announced == END:
            return None
        name, shape, dtype = pickle.loads(announced)
        weight = torch.empty(shape, dtype=dtype)
        self._broadcast(weight)
        return name, weight

    def _broadcast(self, weight: torch.Tensor) -> None:
        """Send a contiguous tensor from rank 0, or fill it elsewhere."""
        assert self._group is not None, "init_process_group comes first"
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        with self._explain("broke off within a tensor"):
            self._group.broadcast([weight.view(-1).view(torch.uint8)], options).wait()  # type: ignore[attr-defined]

    @contextmanager
    def _explain(self, failure: str) -> Iterator[None]:
        """Say what the failure of a collective inside the context means, and what to do."""
        try:
            yield
        except RuntimeError as error:  # gloo's and the store's errors, timeouts included
            raise RuntimeError(
                f"weight update over gloo: rank {self._rank} of {self._num_ranks} {failure} ({error}). Either another "
                "process died, then its log has the cause; or the machine is slow, then raise "
                "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.timeout_s (now "
                f"{self._timeout.total_seconds():g})"
            ) from error
