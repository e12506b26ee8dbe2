"""A process as an environment: it holds an object, and is forked with all its memory, which the kernel copies on write.

    worker ── socket ── process with the object ──os.fork── process with the object as it was ── socket ── worker

For a simulator, an interpreter, or a game whose state cannot be copied otherwise. A process ends when its socket does,
so it outlives no worker.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from typing_extensions import override

from rollout_hooks.environments.base import AdaptedEnvironment

_FORK = None


@dataclass(frozen=True, slots=True)
class ServedObject:
    """An object in a process of its own; `process` is a descriptor, which never names another process."""

    connection: Connection
    process: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, request: Any) -> Any:
        """Return what the process answers, or raise what was raised there."""
        with self.lock:
            return self._ask(request)

    def fork(self) -> "ServedObject":
        """Return the object in another process."""
        with self.lock:
            # Until it is asked again, the process waits for none of its children: the number is that of this one.
            process = os.pidfd_open(self._ask(_FORK))
            return ServedObject(Connection(recv_handle(self.connection)), process)

    def kill(self) -> None:
        """End the process, also in a call that never returns."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        """End the process and free the connection."""
        self.kill()
        os.close(self.process)
        self.connection.close()

    def _ask(self, request: Any) -> Any:
        data = pickle.dumps(request)
        try:
            self.connection.send_bytes(data)
            is_error, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise ValueError(f"the process of the environment has ended: {error!r}") from error
        if is_error:
            raise answer
        return answer


class ProcessEnvironment(AdaptedEnvironment[ServedObject]):
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
        super().__init__(ServedObject(Connection(ours.detach()), os.pidfd_open(server.pid)))
        threading.Thread(target=server.wait, daemon=True).start()  # so that it leaves no zombie
        try:
            self.state.ask((make, args))
        except BaseException:
            self.state.close()
            raise

    async def call(self, method: str, *args: Any) -> Any:
        """Return what a method of the object returns, or raise what it raises. Calls wait for each other.

        A call that is no longer waited for ends the process: what it has changed is not known.
        """
        state = self.state
        asking = asyncio.ensure_future(asyncio.to_thread(state.ask, (method, args)))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            state.kill()
            await asyncio.gather(asking, return_exceptions=True)
            raise

    @override
    def copy_state(self, state: ServedObject) -> ServedObject:
        return state.fork()

    @override
    def free_state(self, state: ServedObject) -> None:
        state.close()


def serve(descriptor: int) -> None:
    """Serve an object on a socket until it ends; a fork returns here, too, with a socket of its own."""
    connection, target, children = Connection(descriptor), None, []
    # Whoever asks is gone: EOFError where nothing was said, OSError where it was.
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = connection.recv_bytes()
            ours = None
            try:
                asked = pickle.loads(request)
                if asked is _FORK:
                    children = [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]
                    ours, theirs = socket.socketpair()
                    answer = os.fork()
                    if answer == 0:
                        connection.close()
                        ours.close()
                        connection, children = Connection(theirs.detach()), []
                        continue
                    theirs.close()
                    children.append(answer)
                elif target is None:
                    make, args = asked
                    target, answer = make(*args), None
                else:
                    method, args = asked
                    answer = getattr(target, method)(*args)
                data = pickle.dumps((False, answer))
            except Exception as error:  # noqa: BLE001  # it is raised where the call was made
                data = _pickled_error(error)
            connection.send_bytes(data)
            if ours is not None:
                send_handle(connection, ours.fileno(), None)
                ours.close()
    os._exit(0)


def _pickled_error(error: Exception) -> bytes:
    try:
        pickle.loads(data := pickle.dumps((True, error)))
    except Exception:  # noqa: BLE001  # whatever such a class does
        return pickle.dumps((True, RuntimeError(repr(error))))
    return data
