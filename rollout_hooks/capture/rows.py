"""The rows of a session: the loop's own outputs, merged with the calls recorded while it ran.

A loop's own outputs stay as they are, with two exceptions. A token is trained only if a recorded call generated it at
that very place. Drift that was healed in a call is healed in the outputs too. Recorded leaves that no own output covers
become rows before them: they are what a loop forked off, dropped or rewrote. Their prompt is all that comes before the
first generated token. A row shows the images of its own path.

Leaves that are left out make no row. The last row of the session tells of them (`LEFT_OUT_FIELD`), so that they are
shown where the tree is.

The response is cut at `rollout.response_length`, as in verl. A rewritten history may be longer than
`rollout.prompt_length`. Its tokens beyond that limit are kept as untrained tokens of the response, because the output
must be trained under the context in which it was sampled. A cut inside an image leaves the image out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from rollout_hooks.capture.outputs import CALL_STATES_FIELD, TreeAgentLoopOutput, make_row, weight_versions
from rollout_hooks.capture.recorded import LeftOut, TokenPath
from rollout_hooks.capture.roles import ROLE, role_in
from rollout_hooks.capture.session_images import cut_before_image
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.capture.token_arrays import common_prefix_len

CALLS_FIELD = "recorded_calls"
"""Key in a row's `extra_fields`: which call sampled which of its tokens, as `sampled_by` returns it."""

LEFT_OUT_FIELD = "left_out_leaves"
"""Key in the `extra_fields` of a session's last row: a `LeftOutLeaf` for each leaf that made no row."""

_PROCESSOR_FIELDS = ("mm_processor_kwargs", "mm_processor_output")


@dataclass(frozen=True, slots=True)
class RowLimits:
    """verl's `rollout.prompt_length` and `rollout.response_length`, and whether rollout log-probs were asked for."""

    prompt_length: int
    response_length: int
    wants_log_probs: bool


class LeftOutLeaf(NamedTuple):
    """A leaf that made no row: why (a value of `LeftOut`), the length of its prompt, its tokens, who sampled them."""

    reason: str
    prompt_len: int
    token_ids: list[int]
    sampled_by: "list[SampledBy]"
    role: str | None = None


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The rows of one session, and how many trajectories gave no row or were cut to the response length.

    `outputs` has recorded leaves in the order of their calls, then the loop's own outputs as it returned them.
    """

    outputs: list[AgentLoopOutput]
    num_dropped: int
    num_truncated: int


def session_rows(tree: SessionTree, outputs: Sequence[AgentLoopOutput], *, limits: RowLimits) -> SessionRows:
    """Make the rows of one session; they have the same fields, and each has a trained token.

    If an output is a `TreeAgentLoopOutput`, the loop has named its leaves itself, and other recorded paths are dropped.
    They are dropped, too, if an output has `routed_experts`. A row in which the model has sampled the token of an image
    or a video is dropped: nothing tells what it shows. An output whose mask is 0 everywhere is a leaf that the loop
    leaves out.

    Raises:
        ValueError: Log-probs are wanted and there is none for a trained token, an output has other images than its
            tokens show, or a role that is none (`roles`).
    """
    roles = [role_in(output.extra_fields, of=f"output {number}") for number, output in enumerate(outputs)]
    own = [_own_row(tree if tree.calls else None, output, limits=limits) for output in outputs]
    own_keys = [_row_keys(tree, row) for row in own]
    leaves = tree.leaves()
    # A row that trains nothing stands for leaves only if the loop has masked it, not if the limits have cut it short.
    stands = [any(row.response_mask) or _is_masked(output) for row, output in zip(own, outputs, strict=True)]
    own_rows = list(compress(zip(own, own_keys, strict=True), stands))
    missing = [(path, _missing(path, own_rows, leaves, limits=limits)) for path in leaves]
    uncovered = [path for path, what in missing if what == "row"]
    names_its_leaves = any(isinstance(output, TreeAgentLoopOutput) for output in outputs)
    has_routing = any(output.routed_experts is not None for output in outputs)
    wanted = [] if names_its_leaves or has_routing else uncovered
    captured = [_captured_row(tree, path, limits=limits) for path in wanted]
    all_keys = [_row_keys(tree, row) for row in captured] + own_keys
    is_kept = [
        any(row.response_mask) and not tree.images.shows_unknown(keys)
        for row, keys in zip(captured + own, all_keys, strict=True)
    ]
    rows, keys = list(compress(captured + own, is_kept)), list(compress(all_keys, is_kept))
    _share_fields(rows)
    for row in rows:
        _check_log_probs(row, limits=limits)
    left_out = tree.left_out_leaves()
    masked = [(keys, role) for output, keys, role in zip(outputs, own_keys, roles, strict=True) if _is_masked(output)]
    for row in rows:  # of a loop that made its outputs here
        row.extra_fields.pop(LEFT_OUT_FIELD, None)
    if rows and (left_out or masked):
        shown = [(path, reason, tree.call(int(path.source[-1])).role) for path, reason in left_out]
        shown += [(tree.locate(keys), LeftOut.DROPPED, role) for keys, role in masked]
        rows[-1].extra_fields[LEFT_OUT_FIELD] = [
            LeftOutLeaf(reason.value, path.prompt_len, path.token_ids.tolist(), sampled_by(tree, path), role)
            for path, reason, role in shown
        ]
    num_without_row = len(uncovered) + sum(what == "end" for _, what in missing)
    return SessionRows(
        outputs=rows,
        num_dropped=num_without_row + len(own) - len(rows) + sum(reason is LeftOut.DROPPED for _, reason in left_out),
        num_truncated=sum(_is_cut(*each, leaves, limits=limits) for each in zip(rows, keys, strict=True)),
    )


def _is_masked(output: AgentLoopOutput) -> bool:
    return bool(output.response_mask) and not any(output.response_mask)


def _row_keys(tree: SessionTree, row: AgentLoopOutput) -> np.ndarray:
    """Return the keys (N,) of a row's tokens; those that it trains were sampled and show no image."""
    is_read = np.array([1] * len(row.prompt_ids) + [1 - bit for bit in row.response_mask], dtype=bool)
    return tree.images.keys_of(row.prompt_ids + row.response_ids, images_of_row(row), is_read=is_read)


def images_of_row(row: AgentLoopOutput) -> list[Any]:
    """Return the images that a row shows, in order."""
    return list((row.multi_modal_data or {}).get("images") or ())


def _own_row(tree: SessionTree | None, output: AgentLoopOutput, *, limits: RowLimits) -> AgentLoopOutput:
    """Complete mask, log-probs and weight versions of a loop's own output from the recorded calls, if there are any."""
    if tree is not None:
        output = _realigned(tree, output, limits=limits)
    mask, log_probs = list(output.response_mask), output.response_logprobs
    extra_fields = dict(output.extra_fields)
    if tree is not None:
        prompt_len = len(output.prompt_ids)
        if log_probs is not None and len(log_probs) != len(mask):
            log_probs = None
        given = None
        if log_probs is not None:
            of_trained = (value if bit else None for value, bit in zip(log_probs, mask, strict=True))
            given = [*[None] * prompt_len, *of_trained]
        path = _as_trained(tree.locate(_row_keys(tree, output), log_probs=given), prompt_len, mask)
        mask = path.is_generated[prompt_len:].astype(int).tolist()
        if log_probs is None:
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


def _as_trained(path: TokenPath, prompt_len: int, mask: Sequence[int]) -> TokenPath:
    """Return a path whose response counts as read where the loop does not train it."""
    is_read = np.array([0] * prompt_len + [1 - bit for bit in mask], dtype=bool)
    return replace(path, source=np.where(is_read, -1, path.source))


def _realigned(tree: SessionTree, output: AgentLoopOutput, *, limits: RowLimits) -> AgentLoopOutput:
    """Heal the drift of an output: a loop builds it from its own tokens, not from those that were sent."""
    realignment = tree.realign(_row_keys(tree, output))
    # Recorded routing belongs to the output's tokens as they are.
    if not realignment.splices or output.routed_experts is not None:
        return output
    prompt_len = min(realignment.position(len(output.prompt_ids)), limits.prompt_length)
    keys = realignment.token_ids
    end = cut_before_image(keys, prompt_len + limits.response_length)
    token_ids, response = tree.images.ids_of(keys), slice(prompt_len, end)
    mask = realignment.spread(np.array([0] * len(output.prompt_ids) + list(output.response_mask)))
    update: dict[str, Any] = {
        "prompt_ids": token_ids[:prompt_len].tolist(),
        "response_ids": token_ids[response].tolist(),
        "response_mask": mask[response].tolist(),
        "response_logprobs": None,
    }
    if CALL_STATES_FIELD in output.extra_fields:
        states = [(realignment.position(start), key) for start, key in output.extra_fields[CALL_STATES_FIELD]]
        update["extra_fields"] = {**output.extra_fields, CALL_STATES_FIELD: states}
    if isinstance(output, TreeAgentLoopOutput):
        update["node_rewards"] = tuple(
            (realignment.position(len(output.prompt_ids) + position) - prompt_len, value)
            for position, value in output.node_rewards
        )
    images = tree.images.images_of(keys[:end])
    update["multi_modal_data"] = {"images": images} if images else {}
    return output.model_copy(update=update)


def _captured_row(tree: SessionTree, path: TokenPath, *, limits: RowLimits) -> TreeAgentLoopOutput:
    prompt_len = min(path.prompt_len, limits.prompt_length)
    num_tokens = cut_before_image(path.keys, prompt_len + limits.response_length)
    images = tree.images.images_of(path.keys[:num_tokens])
    role = tree.call(int(path.source[-1])).role
    sampled = sampled_by(tree, path, num_tokens=num_tokens)
    states = [(start, tree.call(call).state) for call, _, start, *_ in sampled]
    has_states = any(state is not None for _, state in states)
    return make_row(
        path.token_ids[:num_tokens].tolist(),
        path.is_generated[:num_tokens].astype(int).tolist(),
        path.log_probs[:num_tokens].tolist() if limits.wants_log_probs else None,
        prompt_len=prompt_len,
        response_length=limits.response_length,
        versions=_versions(tree, path),
        extra_fields={
            CALLS_FIELD: sampled,
            **({} if role is None else {ROLE: role}),
            **({CALL_STATES_FIELD: states} if has_states else {}),
        },
        multi_modal_data={"images": images} if images else {},
    )


def _covers(keys: np.ndarray, path: TokenPath, *, limits: RowLimits) -> bool:
    """Return whether a recorded leaf is the row of these keys, a part of it, or the row before the loop cut it."""
    within_limits = path.keys[: min(path.prompt_len, limits.prompt_length) + limits.response_length]
    last = min(len(within_limits), len(keys)) - 1
    if last < 0 or keys[last] != within_limits[last]:
        return False
    if len(within_limits) <= len(keys):
        return bool((keys[: len(within_limits)] == within_limits).all())
    is_prefix = bool((path.keys[: len(keys)] == keys).all())
    return is_prefix and path.source[len(keys) - 1] == path.source[-1]


def _missing(
    path: TokenPath,
    own_rows: Sequence[tuple[AgentLoopOutput, np.ndarray]],
    leaves: Sequence[TokenPath],
    *,
    limits: RowLimits,
) -> Literal["row", "end"] | None:
    """Return what a recorded leaf lacks, given the loop's rows and their keys: a row, or its end.

    A row that shows the leaf is its row, even if the loop trains less of it. But what it shows may be a copy that was
    read: in the row's prompt, on a longer leaf, or where a loop went back behind sampled tokens and read the same.
    """
    is_shown = is_end_trained = False
    for row, keys in own_rows:
        if not _covers(keys, path, limits=limits):
            continue
        num_shown = common_prefix_len(keys, path.keys)
        sampled = np.flatnonzero(path.is_generated[:num_shown])
        if not sampled.size:
            continue  # all that was sampled lies beyond the limits
        trained = np.array([0] * len(row.prompt_ids) + row.response_mask, dtype=bool)
        if trained[sampled].all():
            return None
        if num_shown <= len(row.prompt_ids):
            continue
        is_shown = True
        # A row that trains nothing is dropped and counted as such.
        is_end_trained |= bool(trained[sampled[-1]]) or not trained.any()
    if not is_shown or any(_goes_on(other, path) for other in leaves):
        return "row"
    return None if is_end_trained else "end"


def _goes_on(other: TokenPath, path: TokenPath) -> bool:
    num_tokens = len(path.keys)
    return len(other.keys) > num_tokens and bool((other.keys[:num_tokens] == path.keys).all())


def _is_cut(row: AgentLoopOutput, keys: np.ndarray, leaves: Sequence[TokenPath], *, limits: RowLimits) -> bool:
    end = len(row.prompt_ids) + limits.response_length
    longer = [path.keys for path in leaves if len(path.keys) > len(keys) == cut_before_image(path.keys, end)]
    return any(bool((each[: len(keys)] == keys).all()) for each in longer)


def _versions(tree: SessionTree, path: TokenPath) -> list[int | None]:
    calls = [tree.call(index) for index in path.calls]
    return [version for call in calls for version in (call.min_global_steps, call.max_global_steps)]


SampledBy = tuple[int, str, int, int, int | None, int | None]
"""call, kind, start, end, min_global_steps, max_global_steps"""


def sampled_by(tree: SessionTree, path: TokenPath, *, num_tokens: int | None = None) -> list[SampledBy]:
    """Return one entry for each stretch of a path's first `num_tokens` tokens that one call sampled.

    `kind` is a value of `CallKind`; the last two are the first and last version of the weights that the call met, None
    where the server does not tell. Tokens that were only read are in no stretch. `num_tokens=None` means all tokens.
    """
    source = path.source[:num_tokens]
    bounds = [0, *(np.flatnonzero(np.diff(source)) + 1).tolist(), len(source)]
    stretches = [(int(source[start]), start, end) for start, end in pairwise(bounds) if end > start]
    sampled = [(tree.call(call), call, start, end) for call, start, end in stretches if call >= 0]
    return [
        (call, made.kind.value, start, end, made.min_global_steps, made.max_global_steps)
        for made, call, start, end in sampled
    ]


def _share_fields(rows: Sequence[AgentLoopOutput]) -> None:
    """Give all rows the same fields; verl reads their names from the first row (`list_of_dict_to_tensordict`)."""
    names = set().union(*(row.model_fields_set for row in rows))
    for row in rows:
        for name in sorted(names - row.model_fields_set):
            # Images are a row's own. How they are processed is the same in all rows; the loop's final output has it.
            source: Any = rows[-1] if name in _PROCESSOR_FIELDS else None
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
