"""The error of a step in which every session failed; `launch.run.ending` ends the run with its message."""


class NoTrajectoryError(RuntimeError):
    """A step, or a validation, got no trajectory, because all sessions failed; the message has the causes."""
