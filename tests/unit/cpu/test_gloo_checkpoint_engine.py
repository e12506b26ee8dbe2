"""The engine `gloo`: what leaves actor rank 0 arrives in other processes, bit for bit, or an error says why not."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import active_count
from typing import Any

import pytest
import torch
from rank_scripts import CONTEXT
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_tree.cpu.gloo_checkpoint_engine import BACKEND, GlooCheckpointEngine, StoreAddress

BUCKET_SIZE = 8
"""Bytes; most tensors are larger."""

NUM_RECEIVERS = 2
TIMEOUT_S = 60.0

Sent = tuple[str, torch.Size, torch.dtype, bytes]


def draw_weights(update: int) -> dict[str, torch.Tensor]:
    """Return weights of several types and shapes; every update has its own values, names and order."""
    matrix = torch.randn(257, 65, generator=torch.Generator().manual_seed(update))
    weights = {
        f"update{update}.matrix": torch.nn.Parameter(matrix),
        "transposed": matrix[:, ::2].T,
        "bfloat16": matrix.to(torch.bfloat16),
        "half": matrix[0].to(torch.float16),
        "double": matrix[1].double() / 3,
        "integers": torch.arange(-3, 5 + update),
        "flags": matrix[2] > 0,
        "scalar": torch.tensor(float(update)),
        "empty": torch.zeros(0, 4),
        "special": torch.tensor([float("nan"), float("-inf"), -0.0]),
    }
    names = list(weights)
    return {name: weights[name] for name in names[update:] + names[:update]}


def as_bytes(name: str, tensor: torch.Tensor) -> Sent:
    return name, tensor.shape, tensor.dtype, tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def serve_receiver(connection: Connection) -> None:
    """Take part in the updates that the test process asks for, and answer with the weights or the error's text."""

    async def receive(engine: GlooCheckpointEngine, num_tensors: int | None) -> list[Sent]:
        received: list[Sent] = []
        async for name, tensor in engine.receive_weights():
            received.append(as_bytes(name, tensor))
            if len(received) == num_tensors:
                break
        return received

    engine = CheckpointEngineRegistry.new(BACKEND, bucket_size=BUCKET_SIZE, timeout_s=TIMEOUT_S)
    assert isinstance(engine, GlooCheckpointEngine)
    connection.send("ready")
    while True:
        num_tensors, arguments = connection.recv()
        try:
            engine.init_process_group(**arguments)
            connection.send(asyncio.run(receive(engine, num_tensors)))
        except RuntimeError as error:
            connection.send(str(error))
        engine.finalize()


@pytest.fixture(scope="module")
def receivers() -> Iterator[list[Connection]]:
    """Start the processes that stand for the rollout workers."""
    pipes = [CONTEXT.Pipe() for _ in range(NUM_RECEIVERS)]
    processes = [CONTEXT.Process(target=serve_receiver, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in processes:
        process.start()
    for ours, _ in pipes:
        assert ours.recv() == "ready"  # on a busy machine the imports alone take a while
    yield [ours for ours, _ in pipes]
    for process in processes:
        process.kill()
        process.join()


def join_group(
    actors: list[GlooCheckpointEngine], receivers: list[Connection], *, num_tensors: int | None = None
) -> None:
    """Let everybody join the group of the next update, as verl's manager does; receivers leave after `num_tensors`."""
    metadata: list[Any] = [actor.prepare() for actor in actors] + [None] * len(receivers)
    ours, theirs = GlooCheckpointEngine.build_topology(len(actors), len(receivers), metadata)
    for index, connection in enumerate(receivers):
        connection.send((num_tensors, {name: values[index] for name, values in theirs.items()}))
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(actor.init_process_group, **{name: values[index] for name, values in ours.items()})
            for index, actor in enumerate(actors)
        ]
        for call in calls:
            call.result()


def test_topology_by_hand() -> None:
    address = StoreAddress("here", 7)
    actor, rollout = GlooCheckpointEngine.build_topology(3, 2, [address, None, None, None, None])
    assert actor == {"rank": [0, -1, -1], "num_ranks": [3, 3, 3], "address": [address] * 3}
    assert rollout == {"rank": [1, 2], "num_ranks": [3, 3], "address": [address] * 2}


def test_weights_arrive_bit_for_bit(receivers: list[Connection]) -> None:
    """Three updates, each with a group of its own, two receivers, and an actor rank that stays outside."""
    actors = [
        GlooCheckpointEngine(BUCKET_SIZE, is_master=is_master, timeout_s=TIMEOUT_S) for is_master in (True, False)
    ]
    num_threads = []
    for update in range(3):
        weights = draw_weights(update)
        join_group(actors, receivers)
        asyncio.run(actors[0].send_weights(iter(weights.items()), global_steps=update))
        walked = iter(weights.items())
        asyncio.run(actors[1].send_weights(walked))
        assert list(walked) == [], "gathering a weight takes all ranks of the actor"
        for connection in receivers:
            assert connection.recv() == [as_bytes(name, tensor) for name, tensor in weights.items()]
        for actor in actors:
            actor.finalize()
        num_threads.append(active_count())
    assert num_threads[0] == num_threads[-1]


def test_a_sender_that_stops_is_reported(receivers: list[Connection]) -> None:
    actor = GlooCheckpointEngine(BUCKET_SIZE, is_master=True, timeout_s=TIMEOUT_S)
    join_group([actor], receivers)

    def stopping() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(3)
        raise ValueError("out of weights")

    with pytest.raises(ValueError, match="out of weights"):
        asyncio.run(actor.send_weights(stopping()))
    actor.finalize()  # as if its process had ended
    for rank, connection in enumerate(receivers, start=1):
        answer = connection.recv()
        assert f"rank {rank} of 3 got no tensor" in answer
        assert "raise actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.gloo.timeout_s (now 60)" in answer


def test_receivers_that_leave_are_reported(receivers: list[Connection]) -> None:
    actor = GlooCheckpointEngine(BUCKET_SIZE, is_master=True, timeout_s=TIMEOUT_S)
    join_group([actor], receivers, num_tensors=1)

    def leaving() -> Iterator[tuple[str, torch.Tensor]]:
        yield "first", torch.ones(3)
        assert [len(connection.recv()) for connection in receivers] == [1, 1]
        yield "second", torch.ones(1 << 20)

    with pytest.raises(RuntimeError, match=r"rank 0 of 3 broke off within a tensor .*its log has the cause"):
        asyncio.run(actor.send_weights(leaving()))


def test_a_missing_process_is_reported() -> None:
    actor = GlooCheckpointEngine(BUCKET_SIZE, is_master=True, timeout_s=1.0)
    address = actor.prepare()
    assert address is not None
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 did not find the others .*timeout_s \(now 1\)"):
        actor.init_process_group(rank=0, num_ranks=2, address=address)
