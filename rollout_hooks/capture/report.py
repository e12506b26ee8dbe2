"""Counts of what was captured and what was lost, with causes; they add up over sessions and workers."""

from dataclasses import dataclass, fields

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.session_tree import CallStatus, SessionTree


@dataclass(frozen=True, slots=True)
class FailedSession:
    """A session that failed, and why.

    Attributes:
        num_calls: LLM calls recorded before it failed.
        num_rows: Leaves that are trained anyway, because they had a reward of their own.
    """

    uid: str
    session_id: int
    cause: str
    num_calls: int
    num_rows: int = 0


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Sums over sessions; add them with `+`.

    Attributes:
        num_sessions: Sessions that ended, failed ones included.
        num_leaves: Rows written.
        num_calls: LLM calls. Root calls, such as the first of a session, are none of the four kinds below.
        num_realigned: Calls whose prompt was healed; their kind is that of the healed prompt.
        num_aborted_calls: Calls that the server gave up.
        num_dropped_leaves: Trajectories that gave no row: they have no trained token within the length limits, a
            branching loop did not finish them, or they have images or other media.
        num_truncated_leaves: Rows cut to `rollout.response_length`.
        failed_prompts: The uid of each prompt whose sessions have all failed.
    """

    num_sessions: int = 0
    num_leaves: int = 0
    num_calls: int = 0
    num_continuations: int = 0
    num_forks: int = 0
    num_rewrites: int = 0
    num_drifts: int = 0
    num_realigned: int = 0
    num_failed_calls: int = 0
    num_aborted_calls: int = 0
    num_dropped_leaves: int = 0
    num_truncated_leaves: int = 0
    failed_sessions: tuple[FailedSession, ...] = ()
    failed_prompts: tuple[str, ...] = ()

    def __add__(self, other: "CaptureReport") -> "CaptureReport":
        return CaptureReport(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @classmethod
    def of_calls(cls, tree: SessionTree) -> "CaptureReport":
        """Count the recorded calls of one session."""
        kinds = tree.count_kinds()
        statuses = [call.status for call in tree.calls]
        return cls(
            num_calls=len(tree.calls),
            num_continuations=kinds[CallKind.CONTINUATION],
            num_forks=kinds[CallKind.FORK],
            num_rewrites=kinds[CallKind.REWRITE],
            num_drifts=kinds[CallKind.DRIFT],
            num_realigned=sum(call.num_splices > 0 for call in tree.calls),
            num_failed_calls=statuses.count(CallStatus.FAILED),
            num_aborted_calls=statuses.count(CallStatus.ABORTED),
        )
