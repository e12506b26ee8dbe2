"""One line about an error, for reports, logs and failed branches."""

from rollout_hooks.capture.outputs import SessionFailed


def describe_error(error: BaseException) -> str:
    """Return the type and message of an error; for an exception group, those of the errors inside it."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(describe_error(inner) for inner in error.exceptions)
    if isinstance(error, SessionFailed):
        return str(error)
    # An error from a Ray actor has the remote traceback as its message, whose end says what happened.
    return f"{type(error).__name__}: {error}".strip()[-2000:]
