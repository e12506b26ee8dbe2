"""Every LLM call of one session, recorded as a path in a token tree, and the leaves that the calls make.

    call 0   prompt P         generates A
    call 1   prompt P A t     generates B      continuation: its prompt begins with a whole recorded path
    call 2   prompt P A u     generates C      fork: another answer of the environment, u instead of t

    P ── A ──┬── t ── B        leaf of the calls (0, 1):  P A t B
             └── u ── C        leaf of the calls (0, 2):  P A u C

A token is *generated* on a path if a call that had finished before sampled it there, after exactly the same tokens; so
A is a trained token, with its rollout log-prob, on both leaves. A changed copy of it would not be: it is text that the
model read. Numpy only: tokens are compared as arrays, no per-token objects, no verl.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from rollout_hooks.call_kinds import CallKind, Recorded, classify, common_prefix_len


class CallStatus(StrEnum):
    """How far a call got."""

    RUNNING = "running"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call to the LLM.

    Attributes:
        index: Place in the order in which the calls were sent.
        kind: How its prompt relates to what had been recorded when it was sent.
        num_shared: Length of the longest common prefix of its prompt and any recorded path, in tokens.
        num_prompt, num_output: Tokens it read and generated.
        status, stop_reason: How it ended; `stop_reason` is the server's own word.
        cause: Why it failed or was aborted, or None.
        min_global_steps, max_global_steps: First and last version of the weights that generated it, None if unknown.
    """

    index: int
    kind: CallKind
    num_shared: int
    num_prompt: int
    num_output: int = 0
    status: CallStatus = CallStatus.RUNNING
    stop_reason: str | None = None
    cause: str | None = None
    min_global_steps: int | None = None
    max_global_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """A token sequence from the root of the tree, with what is known of each of its N tokens.

    Attributes:
        token_ids: (N,) int64.
        source: (N,) int32, the index of the call that generated the token, -1 for a token that was only read.
        log_probs: (N,) float64, rollout log-prob of a generated token (NaN if the server gave none), 0 otherwise.
    """

    token_ids: np.ndarray
    source: np.ndarray
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


class SessionTree:
    """The calls of one session and the paths that they make.

    `begin` is called when a call is sent and `complete` or `fail` when it ends, so that concurrent calls get their
    index, and thereby their place among the leaves, in the order in which the loop sent them.

    Args:
        decode: Token ids to text, to tell retokenisation drift from other changes; without it no drift is reported.
    """

    def __init__(self, *, decode: Callable[[list[int]], str] | None = None) -> None:
        self._decode = decode
        self._calls: list[RecordedCall] = []
        # Running and completed calls by index: a failed call leaves no path.
        self._recorded: dict[int, Recorded] = {}
        self._paths: dict[int, Path] = {}

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """All calls in the order in which they were sent."""
        return tuple(self._calls)

    def begin(self, prompt_ids: Sequence[int]) -> int:
        """Record that a call is sent.

        Args:
            prompt_ids: The tokens that the model will read, at least one.

        Returns:
            The index of the call.

        Raises:
            ValueError: If the prompt is empty.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int64)
        if prompt.ndim != 1 or not prompt.size:
            raise ValueError(f"prompt_ids of shape {prompt.shape}: a call needs a prompt of at least one token")
        index = len(self._calls)
        kind, num_shared = classify(prompt, list(self._recorded.values()), decode=self._decode)
        boundaries = {b for other in self._sharing(prompt, num_shared) for b in other.boundaries if b <= num_shared}
        self._paths[index] = self.locate(prompt)
        self._recorded[index] = Recorded(
            token_ids=prompt,
            is_generated=self._paths[index].is_generated,
            boundaries=tuple(sorted(boundaries | {len(prompt)})),
            is_completed=False,
        )
        self._calls.append(RecordedCall(index, kind, num_shared, len(prompt)))
        return index

    def complete(
        self,
        call: int,
        output_ids: Sequence[int],
        *,
        log_probs: Sequence[float] | None = None,
        is_aborted: bool = False,
        stop_reason: str | None = None,
        min_global_steps: int | None = None,
        max_global_steps: int | None = None,
    ) -> None:
        """Record what a call generated.

        Args:
            call: Its index, from `begin`.
            output_ids: Generated tokens, the stop token included; may be empty.
            log_probs: One per generated token, or None.
            is_aborted: Whether the server gave the call up; the tokens it got until then count.
            stop_reason: The server's word for how it ended.
            min_global_steps, max_global_steps: Versions of the weights.

        Raises:
            ValueError: If the number of log-probs is not the number of tokens.
        """
        output = np.asarray(output_ids, dtype=np.int64)
        if log_probs is not None and len(log_probs) != len(output):
            raise ValueError(
                f"{len(log_probs)} log_probs for {len(output)} generated tokens: give one per token, or None"
            )
        assert self._calls[call].status is CallStatus.RUNNING
        self._calls[call] = replace(
            self._calls[call],
            num_output=len(output),
            status=CallStatus.ABORTED if is_aborted else CallStatus.COMPLETED,
            stop_reason=stop_reason,
            cause=f"aborted after {len(output)} tokens" if is_aborted else None,
            min_global_steps=min_global_steps,
            max_global_steps=max_global_steps,
        )
        if not len(output):
            # Nothing was generated, so the call adds no path: the one it would have continued stays as it is.
            del self._recorded[call], self._paths[call]
            return
        prompt, values = self._paths[call], np.full(len(output), np.nan) if log_probs is None else log_probs
        path = Path(
            token_ids=np.concatenate([prompt.token_ids, output]),
            source=np.concatenate([prompt.source, np.full(len(output), call, dtype=np.int32)]),
            log_probs=np.concatenate([prompt.log_probs, np.asarray(values, dtype=np.float64)]),
        )
        self._paths[call] = path
        self._recorded[call] = Recorded(
            token_ids=path.token_ids,
            is_generated=path.is_generated,
            boundaries=(*self._recorded[call].boundaries, len(path.token_ids)),
            is_completed=True,
        )

    def fail(self, call: int, cause: str) -> None:
        """Record that a call ended with an error: it leaves no path, only its cause."""
        assert self._calls[call].status is CallStatus.RUNNING
        self._calls[call] = replace(self._calls[call], status=CallStatus.FAILED, cause=cause)
        del self._recorded[call], self._paths[call]

    def leaves(self) -> list[Path]:
        """The maximal paths: those of completed calls that no other path extends.

        Returns:
            In the order of their calls, compared call by call from the root: of two leaves that part after a common
            call, the one whose next call was sent first comes first. Equal paths of different calls are different
            samples: all of them are leaves.
        """
        ends = [self._paths[index] for index, other in self._recorded.items() if other.is_completed]
        maximal = [path for path in ends if not any(_is_strict_prefix(path, other) for other in ends)]
        return sorted(maximal, key=lambda path: path.calls)

    def locate(self, token_ids: Sequence[int]) -> Path:
        """What the finished calls say about a token sequence: which of its tokens they generated, with log-probs.

        Args:
            token_ids: N tokens from the root.

        Returns:
            A path of these N tokens; behind the longest prefix shared with a recorded path nothing is generated.
        """
        tokens = np.asarray(token_ids, dtype=np.int64)
        source, log_probs = np.full(len(tokens), -1, dtype=np.int32), np.zeros(len(tokens))
        for index, path in self._paths.items():
            if not self._recorded[index].is_completed:
                continue
            num_shared = common_prefix_len(tokens, path.token_ids)
            # The first call that generated a token counts, should several have sampled the same.
            is_news = (path.source[:num_shared] >= 0) & (source[:num_shared] < 0)
            source[:num_shared][is_news] = path.source[:num_shared][is_news]
            log_probs[:num_shared][is_news] = path.log_probs[:num_shared][is_news]
        return Path(tokens, source, log_probs)

    def count_kinds(self) -> Counter[CallKind]:
        """Number of calls of each kind, failed ones included: the kind says what the loop asked for."""
        return Counter(call.kind for call in self._calls)

    def _sharing(self, prompt: np.ndarray, num_shared: int) -> list[Recorded]:
        return [r for r in self._recorded.values() if common_prefix_len(prompt, r.token_ids) == num_shared]


def _is_strict_prefix(path: Path, other: Path) -> bool:
    num_tokens = len(path.token_ids)
    return num_tokens < len(other.token_ids) and bool((path.token_ids == other.token_ids[:num_tokens]).all())
