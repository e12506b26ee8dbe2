"""What a worker knows of the prompts and sessions that it runs now."""

import logging
import re
import time
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

from rollout_hooks.capture.leaf_shapes import WrittenRow
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import SessionRows
from rollout_hooks.capture.wire_columns import PromptColumns


@dataclass(slots=True)
class PromptProgress:
    """The number of a prompt's sessions, the causes of those that failed without a row, and what the others wrote."""

    num_sessions: int
    causes: list[str]
    num_ended: int = 0  # sessions
    rows: dict[tuple[int, int], WrittenRow] = field(default_factory=dict)  # of training prompts, by session and leaf
    columns: PromptColumns = field(default_factory=PromptColumns)


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
    cut_prompts: list[int] = field(default_factory=list)  # lengths of prompts that verl cut to `rollout.prompt_length`
    started_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        return f"{self.uid}_{self.session_id} of loop {self.agent_name}"


CUT_PROMPT = re.compile(r"Prompt of (\d+) tokens exceeds rollout\.prompt_length")
"""How verl's warning begins."""
RUNNING: ContextVar[Session] = ContextVar("the session that a task runs")


def keep_for_the_report(record: logging.LogRecord) -> bool:
    """Take verl's warning of a prompt that it cuts out of the log, and note it in the session: there is one in each."""
    session = RUNNING.get(None)
    cut = CUT_PROMPT.match(record.getMessage())
    if session is None or cut is None:
        return True
    session.cut_prompts.append(int(cut[1]))
    return False


@dataclass(frozen=True, slots=True)
class OpenSessions:
    """The sessions that a worker waits for, told to another process."""

    num: int
    oldest: str = ""  # its uid, number and loop
    oldest_s: float = 0.0  # since it began
    places: Counter[str] = field(default_factory=Counter)  # number of tasks by the user's `file:line` where they wait
