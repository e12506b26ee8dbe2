"""What a worker knows of the prompts and sessions that it runs now."""

import time
from collections import Counter
from dataclasses import dataclass, field

from rollout_hooks.capture.leaf_shapes import WrittenRow
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import SessionRows


@dataclass(slots=True)
class PromptProgress:
    """The number of a prompt's sessions, the causes of those that failed without a row, and what the others wrote."""

    num_sessions: int
    causes: list[str]
    num_ended: int = 0  # sessions
    rows: dict[tuple[int, int], WrittenRow] = field(default_factory=dict)  # of training prompts, by session and leaf


@dataclass(slots=True)
class Session:
    """A running session: who it is, its recorder, and the rows it has written."""

    uid: str
    session_id: int
    partition: str
    client: RecordingClient
    wants_log_probs: bool
    agent_name: str
    rows: SessionRows | None = None
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id} of loop {self.agent_name}"


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The sessions that a worker waits for, told to another process."""

    num: int
    oldest: str = ""  # its uid, number and loop
    oldest_s: float = 0.0  # since it began
    places: Counter[str] = field(default_factory=Counter)  # number of tasks by the user's `file:line` where they wait
