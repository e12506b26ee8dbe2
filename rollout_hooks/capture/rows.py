"""The rows of a session: a loop's own outputs, merged with the calls recorded while it ran.

A loop's own outputs stay as the loop made them, with two exceptions: a token is trained only if a recorded call
generated it at that very place, and drift that was healed in a call is healed in them too (`realign`). Recorded leaves
that no own output covers become rows before them. Their prompt ends with the first generated token; the rest is the
response. verl's loops return one output, so the extra rows are what a loop forked off, dropped or rewrote.

Rows are cut where verl cuts them: the response at `rollout.response_length`. If a loop rewrote its history into a
prompt longer than `rollout.prompt_length`, the tokens beyond that limit are kept as untrained tokens of the response:
without them the output would be trained under a context that it was not sampled in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from rollout_hooks.capture.outputs import TreeAgentLoopOutput, make_row, weight_versions
from rollout_hooks.capture.recorded import TokenPath
from rollout_hooks.capture.session_tree import SessionTree

CALLS_FIELD = "recorded_calls"
"""Entry of a row's `extra_fields` that says which call sampled which of its tokens; see `sampled_by`."""

_MEDIA_FIELDS = ("multi_modal_data", "mm_processor_kwargs", "mm_processor_output")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Lengths and contents that a row may have.

    Attributes:
        prompt_length, response_length: verl's `rollout.prompt_length` and `rollout.response_length`, in tokens.
        wants_log_probs: Whether the session's sampling parameters asked for rollout log-probs.
    """

    prompt_length: int
    response_length: int
    wants_log_probs: bool


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of one session.

    Attributes:
        outputs: In the order of their row index: recorded leaves in the order of their calls, then the loop's own
            outputs as it returned them.
        num_dropped: Trajectories that gave no row.
        num_truncated: Rows cut to the response length.
    """

    outputs: list[AgentLoopOutput]
    num_dropped: int
    num_truncated: int


def session_rows(
    tree: SessionTree, outputs: Sequence[AgentLoopOutput], *, limits: RowLimits, has_media: bool = False
) -> SessionRows:
    """Make the rows of one session.

    Args:
        tree: The session's calls.
        outputs: What the loop returned. `TreeAgentLoopOutput`s say that it has named its leaves itself: recorded paths
            that are not among them are dropped.
        limits: Lengths, and whether rows carry log-probs.
        has_media: Whether calls had images or the like. Tokens do not say then what the model saw, so the loop's own
            outputs are taken as they are and other recorded leaves are dropped.

    Returns:
        Rows with the same fields; each has a trained token.

    Raises:
        ValueError: If log-probs are wanted and there is none for a trained token.
    """
    is_exact = not has_media and bool(tree.calls)
    own = [_own_row(tree if is_exact else None, output, limits=limits) for output in outputs]
    leaves = tree.leaves()
    uncovered = [path for path in leaves if not any(_covers(row, path, limits=limits) for row in own)]
    names_its_leaves = any(isinstance(output, TreeAgentLoopOutput) for output in outputs)
    has_routing = any(output.routed_experts is not None for output in outputs)
    wanted = [] if names_its_leaves or has_media or has_routing else uncovered
    captured = [_captured_row(tree, path, limits=limits) for path in wanted]
    rows = [row for row in captured + own if any(row.response_mask)]
    _share_fields(rows)
    for row in rows:
        _check_log_probs(row, limits=limits)
    return SessionRows(
        outputs=rows,
        num_dropped=len(uncovered) + len(own) - len(rows),
        num_truncated=sum(_is_cut(row, leaves, limits=limits) for row in rows),
    )


def _own_row(tree: SessionTree | None, output: AgentLoopOutput, *, limits: RowLimits) -> AgentLoopOutput:
    """Complete mask, log-probs and weight versions of a loop's own output from the recorded calls, if there are any."""
    if tree is not None:
        output = _realigned(tree, output, limits=limits)
    mask, log_probs = list(output.response_mask), output.response_logprobs
    extra_fields = dict(output.extra_fields)
    if tree is not None:
        prompt_len = len(output.prompt_ids)
        path = tree.locate(output.prompt_ids + output.response_ids)
        generated = path.is_generated[prompt_len:].tolist()
        mask = [int(trained and sampled) for trained, sampled in zip(mask, generated, strict=True)]
        if log_probs is None or len(log_probs) != len(mask):
            log_probs = path.log_probs[prompt_len:].tolist()
        versions = weight_versions(_versions(tree, path))
        extra_fields = {**versions, **extra_fields, CALLS_FIELD: sampled_by(tree, path)}
    update = {
        "response_mask": mask,
        "response_logprobs": log_probs if limits.wants_log_probs else None,
        "num_turns": output.num_turns,
        "extra_fields": {"reward_extra_info": {}, **extra_fields},
    }
    if type(output) is AgentLoopOutput:
        fields_set = {name: value for name, value in output if name in output.model_fields_set}
        output = TreeAgentLoopOutput(**fields_set, leaf_reward=output.reward_score)
    return output.model_copy(update=update)


def _realigned(tree: SessionTree, output: AgentLoopOutput, *, limits: RowLimits) -> AgentLoopOutput:
    """Heal the drift of an output as that of its calls was healed, so that it is the sequence that the model saw.

    A loop builds its output from the tokens that it gave, not from those that were sent.
    """
    realignment = tree.realign(output.prompt_ids + output.response_ids)
    # Routing is recorded per token of the output as it is.
    if not realignment.splices or output.routed_experts is not None:
        return output
    prompt_len = min(realignment.position(len(output.prompt_ids)), limits.prompt_length)
    response = slice(prompt_len, prompt_len + limits.response_length)
    mask = realignment.spread(np.array([0] * len(output.prompt_ids) + list(output.response_mask)))
    update: dict[str, Any] = {
        "prompt_ids": realignment.token_ids[:prompt_len].tolist(),
        "response_ids": realignment.token_ids[response].tolist(),
        "response_mask": mask[response].tolist(),
        "response_logprobs": None,
    }
    if isinstance(output, TreeAgentLoopOutput):
        update["node_rewards"] = tuple(
            (realignment.position(len(output.prompt_ids) + position) - prompt_len, value)
            for position, value in output.node_rewards
        )
    return output.model_copy(update=update)


def _captured_row(tree: SessionTree, path: TokenPath, *, limits: RowLimits) -> TreeAgentLoopOutput:
    """Make the row of a recorded leaf."""
    prompt_len = min(path.prompt_len, limits.prompt_length)
    num_tokens = prompt_len + limits.response_length
    return make_row(
        path.token_ids.tolist(),
        path.is_generated.astype(int).tolist(),
        path.log_probs.tolist() if limits.wants_log_probs else None,
        prompt_len=prompt_len,
        response_length=limits.response_length,
        versions=_versions(tree, path),
        extra_fields={CALLS_FIELD: sampled_by(tree, path, num_tokens=num_tokens)},
    )


def _covers(row: AgentLoopOutput, path: TokenPath, *, limits: RowLimits) -> bool:
    """Whether a recorded leaf is the row, an earlier part of it, or the row before the loop cut it."""
    tokens = np.asarray(row.prompt_ids + row.response_ids, dtype=np.int64)
    within_limits = path.token_ids[: min(path.prompt_len, limits.prompt_length) + limits.response_length]
    if len(within_limits) <= len(tokens):
        return bool((tokens[: len(within_limits)] == within_limits).all())
    is_prefix = bool((path.token_ids[: len(tokens)] == tokens).all())
    return is_prefix and path.source[len(tokens) - 1] == path.source[-1]


def _is_cut(row: AgentLoopOutput, leaves: Sequence[TokenPath], *, limits: RowLimits) -> bool:
    if len(row.response_ids) < limits.response_length:
        return False
    tokens = np.asarray(row.prompt_ids + row.response_ids, dtype=np.int64)
    longer = [path.token_ids for path in leaves if len(path.token_ids) > len(tokens)]
    return any(bool((token_ids[: len(tokens)] == tokens).all()) for token_ids in longer)


def _versions(tree: SessionTree, path: TokenPath) -> list[int | None]:
    calls = [tree.calls[index] for index in path.calls]
    return [version for call in calls for version in (call.min_global_steps, call.max_global_steps)]


def sampled_by(tree: SessionTree, path: TokenPath, *, num_tokens: int | None = None) -> list[tuple[int, str, int, int]]:
    """Return who sampled the tokens of a path.

    Args:
        tree: The session's calls.
        path: The path.
        num_tokens: Number of its first tokens to look at; None for all.

    Returns:
        For each stretch of tokens that one call sampled: the call's index, its kind, and the positions start and end
        in the path. Tokens that were only read are in no stretch.
    """
    source = path.source[:num_tokens]
    bounds = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), len(source)]
    stretches = [(int(source[start]), start, end) for start, end in pairwise(bounds) if end > start]
    return [(call, tree.calls[call].kind.value, start, end) for call, start, end in stretches if call >= 0]


def _share_fields(rows: Sequence[AgentLoopOutput]) -> None:
    """Give all rows the same fields, because verl reads the names from the first one (`list_of_dict_to_tensordict`)."""
    names = set().union(*(row.model_fields_set for row in rows))
    for row in rows:
        for name in sorted(names - row.model_fields_set):
            # Media are the same for all rows of a session: the loop's own final output has them.
            source: Any = rows[-1] if name in _MEDIA_FIELDS else None
            value = dict(source).get(name) if source is not None else type(row).model_fields[name].get_default()
            setattr(row, name, value)


def _check_log_probs(row: AgentLoopOutput, *, limits: RowLimits) -> None:
    if not limits.wants_log_probs:
        return
    has_value = (
        row.response_logprobs is not None
        and not np.isnan(row.response_logprobs)[np.asarray(row.response_mask, dtype=bool)].any()
    )
    if not has_value:
        raise ValueError(
            "rollout.calculate_log_probs=True, but the LLM server returned no log-prob for some trained tokens: "
            "let it return them, or set actor_rollout_ref.rollout.calculate_log_probs=False"
        )
