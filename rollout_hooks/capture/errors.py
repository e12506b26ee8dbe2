"""One line about an error, for reports, logs and failed branches."""

from ray.exceptions import RayActorError, RayTaskError

from rollout_hooks.capture.outputs import SessionFailed

ENGINE_DEAD = "EngineDeadError"
"""The class of vLLM's error after the engine behind a server has died; to import it takes seconds."""


def is_of_dead_server(error: BaseException) -> bool:
    """Return whether a call failed because what generates is gone: the server's process, or vLLM's engine behind it.

    A server that cannot be reached counts as gone: Ray says no more at first when a node is lost.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(error, RayActorError) or type(cause).__name__ == ENGINE_DEAD


def errors_inside(group: BaseExceptionGroup) -> list[BaseException]:
    """Return the errors of an exception group, and of the groups in it, that are no groups."""
    inside: list[BaseException] = []
    for inner in group.exceptions:
        inside += errors_inside(inner) if isinstance(inner, BaseExceptionGroup) else [inner]
    return inside


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error; for an exception group, those of the errors inside it, each once.

    Which of a group's errors came first is chance, so they are sorted: sessions that failed alike say the same. An
    error may hold text of the model. So ends of lines and control characters are escaped, and it can neither command a
    terminal nor look like a line of the log.
    """
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(sorted({describe_error(inner) for inner in errors_inside(error)}))
    if isinstance(error, SessionFailed):
        return escaped(str(error))
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        # Its message is the traceback in the actor, with pid and address.
        return describe_error(error.cause)
    # What cannot travel, such as an error of a class that only the actor knows, has its traceback as its message.
    return escaped(f"{type(error).__name__}: {error}".strip())[-2000:]


def escaped(text: str) -> str:
    """Return a text with its ends of lines and control characters as Python writes them in a string."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
