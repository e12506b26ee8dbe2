"""Responses that a session keeps, so that requests can go on from them by `previous_response_id`.

A response is kept as what it adds to the response before it, so that memory grows with the messages and not with the
lengths of the histories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.turn import Message


@dataclass(frozen=True, slots=True)
class _Kept:
    """A history: the first `num_shared` messages of the history `before`, then `added`."""

    before: "_Kept | None"
    num_shared: int
    added: tuple[Message, ...]


class KeptResponses:
    """The responses of one session."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def keep(self, response_id: str, messages: Sequence[Message], *, previous: str | None) -> None:
        """Keep the messages up to a response, which went on from the response `previous`."""
        before = None if previous is None else self._kept.get(previous)
        # A client may add calls to the last message of the response before; what is equal is shared.
        pairs = zip(self._messages(before), messages, strict=False)
        num_shared = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        if num_shared is None:
            num_shared = min(_num_messages(before), len(messages))
        self._kept[response_id] = _Kept(before, num_shared, tuple(messages[num_shared:]))

    def until(self, response_id: str) -> list[Message]:
        """Return the messages up to a response. Raise ApiError (400) if no response with that id was kept."""
        if response_id not in self._kept:
            raise ApiError(
                400,
                f"previous_response_id={response_id!r} is no kept response of this session (store=false, or another "
                "session): send its items in `input` instead",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        return self._messages(self._kept[response_id])

    @staticmethod
    def _messages(kept: _Kept | None) -> list[Message]:
        num_messages = _num_messages(kept)
        parts: list[tuple[Message, ...]] = []
        while kept is not None:
            parts.append(kept.added[: max(0, num_messages - kept.num_shared)])
            num_messages = min(num_messages, kept.num_shared)
            kept = kept.before
        return [message for part in reversed(parts) for message in part]


def _num_messages(kept: _Kept | None) -> int:
    return 0 if kept is None else kept.num_shared + len(kept.added)
