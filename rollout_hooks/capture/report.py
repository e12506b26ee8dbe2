"""Counts of what was captured and what was lost, with causes; they add up over sessions and workers."""

from dataclasses import dataclass, fields

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recorded import CallStatus, LeftOut
from rollout_hooks.capture.session_tree import SessionTree

ENDED = "ended_prompts"
"""The partition of TransferQueue with a key for each worker, whose tag `num` counts the prompts that have ended there.

Whoever waits for prompts asks for these few numbers, not again and again for the tags of all rows.
"""


@dataclass(frozen=True, slots=True)
class FailedSession:
    """A session that failed, and why."""

    uid: str
    session_id: int
    cause: str
    num_calls: int  # LLM calls recorded before it failed
    num_rows: int = 0  # leaves that are trained anyway, because they had a reward of their own
    place: str = ""  # `raised_at`: where in the user's code; sessions of one cause and place fail for the same reason
    traceback: str = ""  # `user_traceback`, if no earlier session of the worker's report has this cause and place


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """Sums over sessions; add them with `+`.

    `num_dropped_leaves` counts trajectories that gave no row: they have no trained token within the length limits, a
    branching loop did not finish them or shows their end as text that was read, the agent dropped them, or they have
    images or other media.
    """

    num_sessions: int = 0  # sessions that ended, failed ones included
    num_leaves: int = 0  # rows written
    num_sampled_tokens: int = 0  # each once for the call that sampled it, whether it is trained or not
    num_calls: int = 0  # the first call of a session is none of the four kinds that follow (`CallKind`)
    num_continuations: int = 0
    num_forks: int = 0
    num_rewrites: int = 0
    num_drifts: int = 0
    num_realigned: int = 0  # calls whose prompt was healed; their kind is that of the healed prompt
    num_failed_calls: int = 0
    num_aborted_calls: int = 0  # calls that the server gave up
    num_dropped_leaves: int = 0
    num_prompt_tokens: int = 0  # of the calls whose server says how many of them its prefix cache had
    num_cached_tokens: int = 0
    num_abandoned_leaves: int = 0  # of answers that the agent did not read to the end, and did not go on from
    num_retried_prompts: int = 0  # whose worker died, so that they ran again; told by the manager
    num_truncated_leaves: int = 0  # rows cut to `rollout.response_length`
    cut_prompts: tuple[int, ...] = ()  # lengths of prompts whose beginning was cut to `rollout.prompt_length`
    failed_sessions: tuple[FailedSession, ...] = ()
    failed_prompts: tuple[str, ...] = ()  # uids of prompts whose sessions have all failed
    dead_servers: tuple[str, ...] = ()  # of each session that lost leaves with its server: the error of its call

    def __add__(self, other: "CaptureReport") -> "CaptureReport":
        return CaptureReport(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @classmethod
    def of_calls(cls, tree: SessionTree) -> "CaptureReport":
        """Count the recorded calls of one session."""
        kinds = tree.count_kinds()
        statuses = [call.status for call in tree.calls]
        cached = [(call.num_prompt, call.num_cached) for call in tree.calls if call.num_cached is not None]
        return cls(
            num_sampled_tokens=sum(call.num_output for call in tree.calls),
            num_calls=len(tree.calls),
            num_continuations=kinds[CallKind.CONTINUATION],
            num_forks=kinds[CallKind.FORK],
            num_rewrites=kinds[CallKind.REWRITE],
            num_drifts=kinds[CallKind.DRIFT],
            num_realigned=sum(call.num_splices > 0 for call in tree.calls),
            num_failed_calls=statuses.count(CallStatus.FAILED),
            num_aborted_calls=statuses.count(CallStatus.ABORTED),
            num_prompt_tokens=sum(length for length, _ in cached),
            num_cached_tokens=sum(hits for _, hits in cached),
            num_abandoned_leaves=sum(reason is LeftOut.ABANDONED for _, reason in tree.left_out_leaves()),
        )
