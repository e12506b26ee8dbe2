"""One line about an error, for reports, logs and failed branches."""

from ray.exceptions import RayTaskError

from rollout_hooks.capture.outputs import SessionFailed


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error; for an exception group, those of the errors inside it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    if isinstance(error, SessionFailed):
        return str(error)
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        # Its message is the traceback in the actor, with pid and address.
        return describe_error(error.cause)
    # What cannot travel, such as an error of a class that only the actor knows, has its traceback as its message.
    return f"{type(error).__name__}: {error}".strip()[-2000:]
