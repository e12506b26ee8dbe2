"""The error of a step in which every session failed; `launch.endings` makes its message the last lines of the run."""


class NoTrajectoryError(RuntimeError):
    """A step, or a validation, got no trajectory, because all sessions failed; the message has the causes."""
