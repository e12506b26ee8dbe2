"""A process as an environment: it holds an object, and is forked with all its memory, which the kernel copies on write.

    worker ── socket ── process with the object ──os.fork── process with the object as it was ── socket ── worker

For a simulator, an interpreter, or a game whose state cannot be copied otherwise. A process ends when its socket does,
so it outlives no worker.
"""

import asyncio
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from rollout_hooks.environments.base import CopiedEnvironment

_FORK = b"fork"


@dataclass(frozen=True, slots=True)
class ServedObject:
    """An object in a process of its own; `process` is a descriptor, which never names another process."""

    connection: Connection
    process: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, request: bytes, *, then: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """Return what the process answers, or raise what was raised there; `then` is called before the next request."""
        with self.lock:
            try:
                self.connection.send_bytes(request)
                is_error, answer = self.connection.recv()
            except (EOFError, OSError) as error:
                raise ValueError(f"the process of the environment has ended: {error!r}") from error
            if is_error:
                raise answer
            return then(answer)

    def fork(self) -> "ServedObject":
        """Return the object in another process."""
        # Until it is asked again, a process waits for none of its children: the number is that of this one.
        return self.ask(
            _FORK, then=lambda pid: ServedObject(Connection(recv_handle(self.connection)), os.pidfd_open(pid))
        )

    def kill(self) -> None:
        """End the process, also in a call that never returns."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        """End the process and free the connection."""
        self.kill()
        os.close(self.process)
        self.connection.close()


class ProcessEnvironment(CopiedEnvironment[ServedObject]):
    """An object in a process of its own; `await call("step", 3)` calls a method of it.

    The object must have no threads, as a fork has none of them. Forks draw the same random numbers.

    Args:
        make: Makes the object, in the process: an importable function or class. What methods take and return is
            pickled, too.
        args: Its arguments.
    """

    def __init__(self, make: Callable[..., object], *args: Any) -> None:
        ours, theirs = socket.socketpair()
        program = f"from rollout_hooks.environments.process import serve; serve({theirs.fileno()})"
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **paths},
                start_new_session=True,  # Ctrl-C is the worker's
            )
        state = ServedObject(Connection(ours.detach()), os.pidfd_open(server.pid))
        threading.Thread(target=server.wait, daemon=True).start()  # so that it leaves no zombie
        super().__init__(state, copy=ServedObject.fork, free=ServedObject.close)
        state.ask(pickle.dumps((make, args)))

    async def call(self, method: str, *args: Any) -> Any:
        """Return what a method of the object returns, or raise what it raises. Calls wait for each other.

        A call that is no longer waited for ends the process: what it has changed is not known.
        """
        asking = asyncio.ensure_future(asyncio.to_thread(self.state.ask, pickle.dumps((method, args))))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self.state.kill()
            await asyncio.gather(asking, return_exceptions=True)
            raise


def serve(descriptor: int) -> None:
    """Serve an object on a socket until it ends. A fork goes on here, too, with a socket of its own."""
    connection, target, children = Connection(descriptor), None, []
    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):  # whoever asked is gone
            os._exit(0)
        if data == _FORK:
            children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
            ours, theirs = socket.socketpair()
            with ours, theirs:
                child = os.fork()
                if child == 0:
                    connection.close()
                    connection, children = Connection(theirs.detach()), []
                    continue
                children.append(child)
                connection.send((False, child))
                send_handle(connection, ours.fileno(), None)
            continue
        try:
            named, args = pickle.loads(data)
            if target is None:
                target, answer = named(*args), (False, None)
            else:
                answer = (False, getattr(target, named)(*args))
        except Exception as error:  # noqa: BLE001  # it is raised where the call was made
            answer = (True, error)
        connection.send(answer)
