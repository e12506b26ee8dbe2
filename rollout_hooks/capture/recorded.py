"""Records of a session tree: its calls, its paths, an example of drift."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rollout_hooks.capture.call_kinds import CallKind


@dataclass(frozen=True, slots=True)
class DriftExample:
    """A place where a prompt had other tokens than the recorded path and the same text."""

    text: str  # of the recorded tokens, from a few tokens before the place on
    recorded_ids: tuple[int, ...]  # from the place on, as are `given_ids`
    given_ids: tuple[int, ...]
    is_healed: bool  # whether the recorded tokens were sent


class CallStatus(StrEnum):
    """How far a call got."""

    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class LeftOut(StrEnum):
    """Why what a call sampled is trained only where the agent went on from it."""

    ABANDONED = "abandoned"  # the agent went away before it had read the answer
    DROPPED = "dropped"  # the agent said so


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call to the LLM."""

    index: int  # in the order in which the calls were sent
    kind: CallKind
    num_shared: int  # tokens of the longest prefix that its prompt shares with a recorded path
    num_prompt: int
    num_output: int = 0
    num_splices: int = 0  # places of its prompt that were healed
    status: CallStatus = CallStatus.RUNNING
    stop_reason: str | None = None  # the server's word for how it ended
    cause: str | None = None  # why it failed or was aborted
    left_out: LeftOut | None = None
    role: str | None = None  # of the leaf that it ends, if any
    state: str | None = None  # the agent's key of the environment's state that it was sampled from
    min_global_steps: int | None = None  # first and last version of the weights that generated it
    max_global_steps: int | None = None
    num_cached: int | None = None  # tokens of its prompt in the server's prefix cache; None: the server does not say


@dataclass(frozen=True, slots=True)
class TokenPath:
    """N tokens from the root of the tree, and what is known about each."""

    token_ids: np.ndarray  # (N,) int64
    keys: np.ndarray  # (N,) int32, what tells paths apart: `session_images`
    source: np.ndarray  # (N,) int32, the index of the call that generated the token; -1 if it was only read
    # (N,) float64, rollout log-prob of a generated token (NaN if the server gave none), 0 otherwise.
    log_probs: np.ndarray

    @property
    def is_generated(self) -> np.ndarray:
        """(N,) bool: the tokens that the model sampled."""
        return self.source >= 0

    @property
    def calls(self) -> tuple[int, ...]:
        """Indices of the calls that generated tokens of this path, in the order in which they were sent."""
        return tuple(int(call) for call in np.unique(self.source[self.source >= 0]))

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first generated one; all of them if there is none."""
        generated = np.flatnonzero(self.is_generated)
        return int(generated[0]) if generated.size else len(self.token_ids)
