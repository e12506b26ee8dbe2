"""Every LLM call of one session, recorded as a path in a token tree, and the leaves that the calls make.

    call 0   prompt P         generates A
    call 1   prompt P A t     generates B      continuation: its prompt begins with a whole recorded path
    call 2   prompt P A u     generates C      fork: another answer of the environment, u instead of t

    P ── A ──┬── t ── B        leaf of the calls (0, 1):  P A t B
             └── u ── C        leaf of the calls (0, 2):  P A u C

A token is *generated* on a path if a call that had finished before sampled it there, after exactly the same tokens; so
A is a trained token, with its rollout log-prob, on both leaves. A changed copy of it would not be: it is text that the
model read. A copy that reads the same but has other tokens can be healed before the call is sent (`realign`).

Every token is held once (`token_trie`), as are the log-probs of each call, so memory is bounded by the tokens of the
tree and not by the paths through it. Numpy only, no per-token objects, no verl.
"""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from rollout_hooks.capture.call_kinds import CallKind, classify
from rollout_hooks.capture.realign import MAX_REPLACED_TOKENS, Realignment, heal
from rollout_hooks.capture.recorded import CallStatus, DriftExample, Path, RecordedCall
from rollout_hooks.capture.text_compare import Decode, fewest_equal
from rollout_hooks.capture.token_arrays import token_array
from rollout_hooks.capture.token_trie import TokenTrie

_NEVER = np.iinfo(np.int64).max
_EXAMPLE_LEN = 16
_MAX_COMPARED = 4096
"""Places of drift that a session remembers, at under 1 KB each."""


class SessionTree:
    """The calls of one session and the paths that they make.

    `begin` is called when a call is sent and `complete` or `fail` when it ends, so that concurrent calls get their
    index, and thereby their place among the leaves, in the order in which the loop sent them.

    Args:
        decode: Token ids to text, to tell retokenisation drift from other changes; without it no drift is reported.
        max_replaced: Most tokens that one splice of `realign` replaces; 0 heals nothing.
    """

    def __init__(self, *, decode: Decode | None = None, max_replaced: int = MAX_REPLACED_TOKENS) -> None:
        self._decode = decode
        self._trie = TokenTrie()
        self._heal = None if decode is None or max_replaced < 1 else _healer(decode, max_replaced)
        self._calls: list[RecordedCall] = []
        # Completed calls with an output, and how many tokens each has generated.
        self._num_outputs: dict[int, int] = {}
        # When each call began and finished, counted in such events: what a call had before it is what had finished.
        self._num_events = 0
        self._begun: list[int] = []
        self._finished: list[int] = []
        # Log-probs of all calls one after another. That of a call's token at position p is at p + base.
        self._log_probs = array("d")
        self._log_prob_base: list[int] = []
        self.drift_example: DriftExample | None = None
        """The first drift of the session; None if there was none."""

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """All calls in the order in which they were sent."""
        return tuple(self._calls)

    @property
    def num_tokens(self) -> int:
        """Number of different tokens of all recorded paths, as prefixes: what the tree holds."""
        return sum(node.size for node in self._trie.nodes_behind(self._trie.root))

    def realign(self, token_ids: Sequence[int]) -> Realignment:
        """Heal the drift of a prompt: put recorded tokens where it has others that read the same.

        Changes nothing in the tree. Give the result to `begin`, and send its `token_ids`.

        Args:
            token_ids: The prompt as the loop made it.

        Returns:
            The prompt to send; the given one if there is nothing to heal, or healing is switched off.
        """
        given = token_array(token_ids)
        if self._heal is None or given.ndim != 1:
            return Realignment(given)
        realignment = self._heal(self._trie, given)
        if realignment.splices and self.drift_example is None:
            first = realignment.splices[0]
            self._keep_example(
                realignment.token_ids[: first.end + _EXAMPLE_LEN],
                given[: first.given_end + _EXAMPLE_LEN],
                start=first.start,
                is_healed=True,
            )
        return realignment

    def begin(self, prompt: Sequence[int] | Realignment) -> int:
        """Record that a call is sent.

        Args:
            prompt: The tokens that the model will read, at least one; or a prompt from `realign`.

        Returns:
            The index of the call.

        Raises:
            ValueError: If the prompt is empty.
        """
        splices = prompt.splices if isinstance(prompt, Realignment) else ()
        tokens = prompt.token_ids if isinstance(prompt, Realignment) else token_array(prompt)
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(f"prompt_ids of shape {tokens.shape}: a call needs a prompt of at least one token")
        index = len(self._calls)
        kind, point = classify(self._trie, tokens, num_outputs=self._num_outputs, decode=self._decode)
        if kind is CallKind.DRIFT and self.drift_example is None:
            recorded = next(self._trie.ways_on(point, max_len=_EXAMPLE_LEN))
            before = tokens[: point.position]
            self._keep_example(np.concatenate([before, recorded]), tokens, start=point.position, is_healed=False)
        self._trie.begin(index, point, tokens[point.position :])
        self._calls.append(RecordedCall(index, kind, point.position, len(tokens), num_splices=len(splices)))
        self._begun.append(self._tick())
        self._finished.append(_NEVER)
        self._log_prob_base.append(0)
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
        output = token_array(output_ids)
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
            self._trie.remove(call)
            return
        self._trie.complete(call, output)
        self._num_outputs[call] = len(output)
        self._finished[call] = self._tick()
        self._log_prob_base[call] = len(self._log_probs) - self._calls[call].num_prompt
        values = np.full(len(output), np.nan) if log_probs is None else np.asarray(log_probs, dtype=np.float64)
        self._log_probs.frombytes(values.tobytes())

    def fail(self, call: int, cause: str) -> None:
        """Record that a call ended with an error: it leaves no path, only its cause."""
        assert self._calls[call].status is CallStatus.RUNNING
        self._calls[call] = replace(self._calls[call], status=CallStatus.FAILED, cause=cause)
        self._trie.remove(call)

    def leaves(self) -> list[Path]:
        """The maximal paths: those of completed calls that no other path extends.

        Returns:
            In the order of their calls, compared call by call from the root: of two leaves that part after a common
            call, the one whose next call was sent first comes first. Equal paths of different calls are different
            samples: all of them are leaves.
        """
        finished = np.asarray(self._finished, dtype=np.int64)
        leaves = [self._path_of(call, finished) for call in self._num_outputs if self._is_leaf(call)]
        return sorted(leaves, key=lambda path: path.calls)

    def locate(self, token_ids: Sequence[int]) -> Path:
        """What the finished calls say about a token sequence: which of its tokens they generated, with log-probs.

        Args:
            token_ids: N tokens from the root.

        Returns:
            A path of these N tokens; behind the longest prefix shared with a recorded path nothing is generated. Of
            several calls that sampled the same token at the same place, the one that finished first counts.
        """
        tokens = token_array(token_ids)
        point = self._trie.walk(tokens)
        source = np.full(len(tokens), -1, dtype=np.int32)
        source[: point.position] = self._trie.source_to(point)
        return self._path(tokens, source)

    def count_kinds(self) -> Counter[CallKind]:
        """Number of calls of each kind, failed ones included: the kind says what the loop asked for."""
        return Counter(call.kind for call in self._calls)

    def _tick(self) -> int:
        self._num_events += 1
        return self._num_events

    def _is_leaf(self, call: int) -> bool:
        point = self._trie.end_of(call)
        return not any(
            other in self._num_outputs and end > point.position
            for node in self._trie.nodes_behind(point)
            for end, other in reversed(node.ends)
        )

    def _path_of(self, call: int, finished: np.ndarray) -> Path:
        point, num_prompt = self._trie.end_of(call), self._calls[call].num_prompt
        source = self._trie.source_to(point)
        read = source[:num_prompt]
        # Tokens that were generated only after this call had read them are text to it.
        read[(read >= 0) & (finished[read] > self._begun[call])] = -1
        source[num_prompt:] = call
        return self._path(self._trie.tokens_to(point), source)

    def _path(self, tokens: np.ndarray, source: np.ndarray) -> Path:
        log_probs = np.zeros(len(tokens))
        (generated,) = np.nonzero(source >= 0)
        if generated.size:
            base = np.asarray(self._log_prob_base, dtype=np.int64)
            log_probs[generated] = np.frombuffer(self._log_probs)[generated + base[source[generated]]]
        return Path(tokens.astype(np.int64), source, log_probs)

    def _keep_example(self, recorded: np.ndarray, given: np.ndarray, *, start: int, is_healed: bool) -> None:
        before = recorded[max(0, start - _EXAMPLE_LEN) : start].tolist()
        recorded_ids = tuple(recorded[start : start + _EXAMPLE_LEN].tolist())
        given_ids = tuple(given[start : start + _EXAMPLE_LEN].tolist())
        self.drift_example = DriftExample(self._decode([*before, *recorded_ids]), recorded_ids, given_ids, is_healed)


def _healer(decode: Decode, max_tokens: int) -> partial[Realignment]:
    """`heal` with a memory of the texts compared: a drifted turn comes back in every later prompt of its session."""
    compare = lru_cache(_MAX_COMPARED)(partial(fewest_equal, decode=decode, max_tokens=max_tokens))
    return partial(heal, decode=decode, max_tokens=max_tokens, compare=compare)
