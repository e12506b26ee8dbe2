"""The LLM calls of one session, recorded as paths in a token tree, and the leaves that they make.

    call 0   prompt P         generates A
    call 1   prompt P A t     generates B      continuation: its prompt begins with a whole recorded path
    call 2   prompt P A u     generates C      fork: another answer of the environment, u instead of t

    P ── A ──┬── t ── B        leaf of the calls (0, 1):  P A t B
             └── u ── C        leaf of the calls (0, 2):  P A u C

A call whose answer nobody read, or that the agent dropped, is *left out*: it ends no leaf. Where the agent went on from
its answer all the same, this is a part of the longer leaf.

A token is *generated* on a path if an earlier, finished call sampled it there, after exactly the same tokens. So A is
trained on both leaves, with its rollout log-prob. A changed copy of A is only text that the model read. A copy that
reads the same in other tokens can be healed before the call is sent (`realign`).

Each token and log-prob is stored once, so memory grows with the tree's tokens, not with the lengths of its paths.
Where prompts show images, the tokens of the tree are keys: see `session_images`.
"""

from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from rollout_hooks.capture.call_kinds import CallKind, classify
from rollout_hooks.capture.realign import MAX_REPLACED_TOKENS, Healer, Realignment
from rollout_hooks.capture.recorded import CallStatus, DriftExample, LeftOut, RecordedCall, TokenPath
from rollout_hooks.capture.session_images import SessionImages
from rollout_hooks.capture.text_compare import Decode
from rollout_hooks.capture.token_arrays import token_array
from rollout_hooks.capture.token_trie import Point, TokenTrie

_NEVER = np.iinfo(np.int64).max
_EXAMPLE_LEN = 16
_MAX_LONGER = 64
"""Most longer paths that are looked at for one that trains what a call sampled; it is nearly always the first."""


class SessionTree:
    """The calls of one session and their paths.

    Call `begin` when a call is sent, and `complete` or `fail` when it ends. Concurrent calls are then indexed, and
    their leaves ordered, as the loop sent them. Without `decode` (token ids to text) no drift is reported or healed.
    `max_replaced` is the most tokens that one splice of `realign` replaces; 0 heals nothing. `images` makes the
    keys of prompts that show some; these stand for their tokens everywhere here. With `keeps_abandoned` answers that
    nobody read are not left out.
    """

    def __init__(
        self,
        *,
        decode: Decode | None = None,
        max_replaced: int = MAX_REPLACED_TOKENS,
        images: SessionImages | None = None,
        keeps_abandoned: bool = False,
    ) -> None:
        self.images = images or SessionImages()
        self._keeps_abandoned = keeps_abandoned
        self._decode = None if decode is None else self.images.decoder(decode)
        self._trie = TokenTrie()
        self._healer: Healer | None = None
        if self._decode is not None and max_replaced > 0:
            self._healer = Healer(self._trie, decode=self._decode, max_tokens=max_replaced)
        self._calls: list[RecordedCall] = []
        # Tokens that each completed call has generated, without calls that generated none.
        self._num_outputs: dict[int, int] = {}
        # When each call began and finished, as event numbers. A call could read what had finished before it began.
        self._num_events = 0
        self._begun: list[int] = []
        self._finished: list[int] = []
        # Log-probs of all calls in one array. That of a call's token at position p is at p + the call's base.
        self._log_probs = array("d")
        self._log_prob_base: list[int] = []
        self.drift_example: DriftExample | None = None
        """The first drift of the session; None if there was none."""

    @property
    def calls(self) -> tuple[RecordedCall, ...]:
        """All calls in the order in which they were sent."""
        return tuple(self._calls)

    def call(self, index: int) -> RecordedCall:
        """Return one call."""
        return self._calls[index]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the tree; shared prefixes count once."""
        return sum(node.size for node in self._trie.nodes_behind(self._trie.root))

    def realign(self, token_ids: Sequence[int] | np.ndarray) -> Realignment:
        """Heal the drift of a prompt: replace its tokens by recorded ones that read the same.

        The tree does not change. Give the result to `begin`, and send its `token_ids`. They are the given ones if there
        is nothing to heal or healing is switched off.
        """
        given = token_array(token_ids)
        if self._healer is None or given.ndim != 1:
            return Realignment(given)
        realignment = self._healer.heal(given)
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
        """Record that a call is sent, and return its index; its prompt is token ids, or the result of `realign`.

        Raises:
            ValueError: The prompt is empty.
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
        num_cached: int | None = None,
    ) -> None:
        """Record what a call generated.

        `output_ids` includes the stop token and may be empty. `log_probs` has one value per token. If `is_aborted`, the
        server gave the call up; the tokens generated until then count. `stop_reason` is the server's word for how it
        ended. `min_global_steps` and `max_global_steps` are the first and last version of the weights that were used.
        `num_cached` counts the tokens of the prompt that were in the server's prefix cache.

        Raises:
            ValueError: The number of log-probs is not the number of tokens, or one of these is no token or number. The
                call has failed then.
        """
        assert self._calls[call].status is CallStatus.RUNNING
        try:
            output, values = _checked_output(output_ids, log_probs)
        except ValueError as error:
            self.fail(call, str(error))
            raise
        self._calls[call] = replace(
            self._calls[call],
            num_output=len(output),
            status=CallStatus.ABORTED if is_aborted else CallStatus.COMPLETED,
            stop_reason=stop_reason,
            cause=f"aborted after {len(output)} tokens" if is_aborted else None,
            min_global_steps=min_global_steps,
            max_global_steps=max_global_steps,
            num_cached=num_cached,
        )
        if not len(output):
            # A call that generated nothing adds no path; the path that it would have continued stays a leaf.
            self._trie.remove(call)
            return
        self._trie.complete(call, output)
        self._num_outputs[call] = len(output)
        self._finished[call] = self._tick()
        self._log_prob_base[call] = len(self._log_probs) - self._calls[call].num_prompt
        self._log_probs.frombytes(values.tobytes())

    def fail(self, call: int, cause: str) -> None:
        """Record that a call ended with an error; its cause is kept, its path is not."""
        assert self._calls[call].status is CallStatus.RUNNING
        self._calls[call] = replace(self._calls[call], status=CallStatus.FAILED, cause=cause)
        self._trie.remove(call)

    def leave_out(self, call: int, reason: LeftOut) -> None:
        """Record that a call, which may still run, ends no leaf."""
        if reason is not LeftOut.ABANDONED or not self._keeps_abandoned:
            self._calls[call] = replace(self._calls[call], left_out=reason)

    def describe(self, call: int, *, role: str | None, state: str | None) -> None:
        """Record what the agent says of a call; None where it says nothing.

        `role` is that of the leaf which the call ends; where the agent goes on from it, the next call's counts. `state`
        is the key of the environment's state that the call is sampled from.
        """
        self._calls[call] = replace(self._calls[call], role=role, state=state)

    def leaves(self) -> list[TokenPath]:
        """Return the paths of completed calls, without those that go on: a longer path trains all that they train.

        They are sorted by their `calls`: where two leaves part, the one whose next call was sent first comes first.
        Equal paths of different calls are different samples, so all of them are leaves. Calls that are left out are
        neither leaves nor longer paths.
        """
        kept = frozenset(call for call in self._num_outputs if self._calls[call].left_out is None)
        return self._leaves(kept, among=kept)

    def left_out_leaves(self) -> list[tuple[TokenPath, LeftOut]]:
        """Return the paths of completed calls that are left out and from which nobody went on, and why."""
        reasons = {call: reason for call in self._num_outputs if (reason := self._calls[call].left_out) is not None}
        return [(path, reasons[int(path.source[-1])]) for path in self._leaves(reasons, among=self._num_outputs)]

    def locate(
        self, token_ids: Sequence[int] | np.ndarray, *, log_probs: Sequence[float | None] | None = None
    ) -> TokenPath:
        """Return a token sequence from the root as a path, which says what finished calls generated.

        Tokens after the longest recorded prefix count as read. `log_probs` has the value of each token, None where it
        is not known, as of those that were read. Of calls that sampled the same tokens, one that gave these counts.
        """
        tokens = token_array(token_ids)
        point = self._trie.walk(tokens)
        source = np.full(len(tokens), -1, dtype=np.int32)
        source[: point.position] = self._trie.source_to(point)
        known = None if log_probs is None else np.asarray(log_probs, dtype=np.float64)
        self._name(source[: point.position], point, before=_NEVER, log_probs=known)
        return self._path(tokens, source)

    def count_kinds(self) -> Counter[CallKind]:
        """Count the calls of each kind, failed ones included, because the kind says what the loop asked for."""
        return Counter(call.kind for call in self._calls)

    def _tick(self) -> int:
        self._num_events += 1
        return self._num_events

    def _leaves(self, calls: Iterable[int], *, among: Container[int]) -> list[TokenPath]:
        """Return the paths of those of some calls from which none `among` others goes on, sorted by their `calls`."""
        finished = np.asarray(self._finished, dtype=np.int64)
        leaves = [self._path_of(call, finished) for call in calls if self._is_leaf(call, finished, among=among)]
        return sorted(leaves, key=lambda path: path.calls)

    def _is_leaf(self, call: int, finished: np.ndarray, *, among: Container[int]) -> bool:
        point = self._trie.end_of(call)
        longer = (
            other
            for node in self._trie.nodes_behind(point)
            for end, other in reversed(node.ends)
            if other in among and end > point.position
        )
        return not any(self._trains_all(other, call, point, finished) for other in islice(longer, _MAX_LONGER))

    def _trains_all(self, other: int, call: int, point: Point, finished: np.ndarray) -> bool:
        """Return whether a longer path trains all that a call's path, which ends at `point`, trains."""
        if self._begun[other] > self._finished[call]:
            return True
        # What is trained in the text that the other call read, it must have met as text of calls that had finished.
        source = self._trie.source_to(point)[: self._calls[other].num_prompt]
        ends = np.where(source < 0, _NEVER, finished[source])
        is_trained = ends < self._begun[call]
        is_trained[self._calls[call].num_prompt :] = True
        return bool((ends[is_trained] < self._begun[other]).all())

    def _path_of(self, call: int, finished: np.ndarray) -> TokenPath:
        point, num_prompt = self._trie.end_of(call), self._calls[call].num_prompt
        source = self._trie.source_to(point)
        read = source[:num_prompt]
        # A token whose call finished only after this one began is text that this call read.
        read[(read >= 0) & (finished[read] > self._begun[call])] = -1
        self._name(read, point, before=self._begun[call])
        source[num_prompt:] = call
        return self._path(self._trie.tokens_to(point), source)

    def _name(self, source: np.ndarray, point: Point, *, before: int, log_probs: np.ndarray | None = None) -> None:
        """Choose among calls that sampled the same tokens, in `source` (N,), the first tokens up to a point.

        The call counts whose output goes on farthest; of several the longest, then the one that was sent first; calls
        that are left out come last. So who finished first does not matter. Calls that finished after the event
        `before` do not count.
        """
        ends = self._trie.repeats_to(point)
        if not ends:
            return
        calls, first = np.unique(source[::-1], return_index=True)
        for call, end in zip(calls.tolist(), (len(source) - first).tolist(), strict=True):
            ends[call] = max(end, ends.get(call, 0))

        def rank(call: int) -> tuple[bool, bool, int, int, int]:
            start, end = self._calls[call].num_prompt, min(ends[call], len(source))
            is_given = False
            if log_probs is not None and start < end:
                base = self._log_prob_base[call]
                given = np.frombuffer(self._log_probs)[base + start : base + end]
                known = ~np.isnan(log_probs[start:end])
                is_given = bool(known.any() and (given == log_probs[start:end])[known].all())
            return is_given, self._calls[call].left_out is None, end, -start, -call

        for call in sorted((call for call in ends if call >= 0 and self._finished[call] < before), key=rank):
            source[self._calls[call].num_prompt : ends[call]] = call

    def _path(self, tokens: np.ndarray, source: np.ndarray) -> TokenPath:
        log_probs = np.zeros(len(tokens))
        (generated,) = np.nonzero(source >= 0)
        if generated.size:
            base = np.asarray(self._log_prob_base, dtype=np.int64)
            log_probs[generated] = np.frombuffer(self._log_probs)[generated + base[source[generated]]]
        return TokenPath(self.images.ids_of(tokens).astype(np.int64), tokens, source, log_probs)

    def _keep_example(self, recorded: np.ndarray, given: np.ndarray, *, start: int, is_healed: bool) -> None:
        assert self._decode is not None, "without it there is no drift"
        before = recorded[max(0, start - _EXAMPLE_LEN) : start].tolist()
        recorded_ids = tuple(recorded[start : start + _EXAMPLE_LEN].tolist())
        given_ids = tuple(given[start : start + _EXAMPLE_LEN].tolist())
        self.drift_example = DriftExample(self._decode([*before, *recorded_ids]), recorded_ids, given_ids, is_healed)


def _checked_output(output_ids: Sequence[int], log_probs: Sequence[float] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return generated tokens (N,) int32 and their log-probs (N,) float64, NaN if there are none."""
    try:
        output = token_array(output_ids)
        values = np.full(len(output), np.nan) if log_probs is None else np.array(log_probs, dtype=np.float64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"generated tokens or log-probs that are no numbers, or too large: {error}") from error
    if output.ndim != 1 or (output < 0).any():
        raise ValueError(f"generated tokens {output.tolist()[:8]}: a token is a number of at least 0")
    if len(values) != len(output):
        raise ValueError(f"{len(values)} log_probs for {len(output)} generated tokens: give one per token, or None")
    return output, values
