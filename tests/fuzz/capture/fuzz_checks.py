"""What must hold for the rows of a session, judged by the engine's own record."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from byte_tokens import byte_level_tokenizer
from fuzz_engine import Engine

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recorded import CallStatus
from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.rows import RowLimits, SessionRows, images_of_row, session_rows
from rollout_hooks.capture.session_tree import SessionTree

OWN = "fuzz_own"
"""Key in the `extra_fields` of a loop's own row: whether its mask says what the loop knows. Others claim too much."""

TOO_EARLY = "a token trained on a path that was sent before its call had ended"


def check(
    engine: Engine, tree: SessionTree, outputs: Sequence[Any], *, limits: RowLimits, names_leaves: bool
) -> Counter:
    """Make the rows of a session, assert that all of the module's rules hold, and count what there was."""
    _check_calls(engine, tree)
    rows = session_rows(tree, outputs, limits=limits)
    assert not any(images_of_row(row) for row in rows.outputs)
    trained: set[int] = set()
    first_ends = _first_ends(engine)
    for row in rows.outputs:
        trained |= _check_row(engine, row, first_ends, limits=limits)
    _check_lost(engine, rows, trained, limits=limits, names_leaves=names_leaves, has_own=bool(outputs))
    _check_twice(rows, limits=limits)
    return Counter(
        calls=len(engine.served),
        rows=len(rows.outputs),
        trained=len(trained),
        abandoned=CaptureReport.of_calls(tree).num_abandoned_leaves,
        healed=sum(call.num_splices > 0 for call in tree.calls),
        drifted=tree.count_kinds()[CallKind.DRIFT],
        dropped=rows.num_dropped,
        truncated=rows.num_truncated,
    )


def check_text(engine: Engine, texts: Sequence[str]) -> None:
    """Assert that what each call was sent reads like what the agent gave."""
    for served, text in zip(engine.served, texts, strict=True):
        assert decode(served.sent) == text, "a healed prompt reads otherwise"


def fingerprint(tree: SessionTree, outputs: Sequence[Any], *, limits: RowLimits) -> list[tuple]:
    """Return all that must not depend on which of several calls ended first."""
    rows = session_rows(tree, outputs, limits=limits).outputs
    names = "min_global_steps", "max_global_steps"
    return [
        (
            (row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs),
            [row.extra_fields.get(name) for name in names],
            # Without kinds, which say what was recorded when a call was sent.
            [(call, *rest) for call, _, *rest in row.extra_fields["recorded_calls"]],
        )
        for row in rows
    ]


def decode(token_ids: Sequence[int]) -> str:
    return byte_level_tokenizer().decode(list(token_ids))


def _check_calls(engine: Engine, tree: SessionTree) -> None:
    assert len(tree.calls) == len(engine.served)
    for call, served in zip(tree.calls, engine.served, strict=True):
        is_failed = served.end in ("failed", "cancelled")
        expected = CallStatus.FAILED if is_failed else CallStatus(served.end)
        assert call.status is expected, f"call {call.index} is {call.status}, and {served.end}"
        assert (call.num_prompt, call.num_output) == (len(served.sent), served.num_got)
    report, ends = CaptureReport.of_calls(tree), Counter(served.end for served in engine.served)
    assert report.num_failed_calls == ends["failed"] + ends["cancelled"]
    assert report.num_aborted_calls == ends["aborted"]


def _check_row(engine: Engine, row: Any, first_ends: dict[int, int], *, limits: RowLimits) -> set[int]:
    """Check one row; return the places that it trains."""
    tokens, prompt_len = row.prompt_ids + row.response_ids, len(row.prompt_ids)
    assert len(row.response_ids) <= limits.response_length
    trained = {
        prompt_len + place: value for place, value in enumerate(row.response_logprobs) if row.response_mask[place]
    }
    ends: dict[int, int] = {}  # of each call: the last token of it that the row trains
    caller: dict[int, int] = {}
    for position, log_prob in trained.items():
        call, place = engine.call_of(log_prob)
        served = engine.served[call]
        assert served.log_probs[place] == log_prob, "a log-prob that was not served"
        assert place < served.num_got, "a token that its caller never got"
        assert position == len(served.sent) + place, "a token that was sampled elsewhere"
        ends[call], caller[position] = position + 1, call
    for call, end in ends.items():
        assert tokens[:end] == engine.served[call].path[:end], "another context than the engine was sent"
    hashes = _places(tokens)
    _check_names(engine, row, caller)
    is_cut = len(row.response_ids) == limits.response_length
    if OWN not in row.extra_fields and not is_cut:
        assert not engine.served[list(ends)[-1]].is_abandoned, "a leaf that nobody read"
    if OWN not in row.extra_fields:
        _check_mask(engine, tokens, set(caller), [first_ends.get(each) for each in hashes])
    elif row.extra_fields[OWN]:
        last = engine.served[list(ends)[-1]]
        assert all(each is last or each.ended < last.begun for each in map(engine.served.__getitem__, ends)), TOO_EARLY
    return {hashes[position] for position in trained}


def _check_mask(engine: Engine, tokens: list[int], trained: set[int], first_ends: list[int | None]) -> None:
    """Assert that a recorded row trains what its call sampled, and what calls had sampled there before it was sent."""
    known = []
    for served in engine.served:
        if served.num_got and served.path[: len(tokens)] == tokens:
            own = range(len(served.sent), len(tokens))
            read = [place for place, end in enumerate(first_ends[: len(served.sent)]) if end and end < served.begun]
            known.append({*own, *read})
    assert any(trained <= each for each in known), TOO_EARLY
    assert trained in known, "text that the model had sampled there is not trained"


def _check_names(engine: Engine, row: Any, caller: dict[int, int]) -> None:
    """Assert that `recorded_calls` names the calls whose log-probs the row has, and their weights."""
    stretches = row.extra_fields["recorded_calls"]
    named = {position: call for call, _, start, end, *_ in stretches for position in range(start, end)}
    assert {position: named.get(position) for position in caller} == caller, "a stretch names another call"
    behind = [position for position in named if position >= len(row.prompt_ids)]
    assert set(behind) == set(caller), "a stretch has tokens that are not trained"
    for call, _, _, _, *versions in stretches:
        assert tuple(versions) == (engine.served[call].versions or (None, None)), "other weights"
    versions = [engine.served[call].versions or () for call in set(caller.values())]
    if any(versions):
        # Of a row that was cut, the calls behind the cut count, too.
        assert row.extra_fields["min_global_steps"] <= min(first for first, _ in versions)
        assert row.extra_fields["max_global_steps"] >= max(last for _, last in versions)


def _check_lost(
    engine: Engine, rows: SessionRows, trained: set[int], *, limits: RowLimits, names_leaves: bool, has_own: bool
) -> None:
    """Assert that every token that a caller got is trained at its place, or a leaf is told to be dropped or cut.

    What was abandoned need not be trained.
    """
    lost: list[list[int]] = []
    first_ends = _first_ends(engine)
    for served in (served for served in engine.served if not served.is_abandoned):
        hashes = _places(served.path)[len(served.sent) :]
        missing = [
            place
            for place, at in enumerate(hashes, len(served.sent))
            if at not in trained and not _was_left(engine, rows, served, place, ended=first_ends[at])
        ]
        if not missing:
            continue
        if not names_leaves:
            assert missing[0] >= limits.response_length, "a sampled token is trained nowhere"
        lost.append(served.path)
    paths = [path for path in lost if not any(len(o) > len(path) and o[: len(path)] == path for o in lost)]
    num_told = rows.num_dropped + rows.num_truncated
    # One row that a loop has cut may stand for several leaves.
    least = min(1, len(paths)) if has_own and not names_leaves else len(paths)
    assert num_told >= least, f"{len(paths)} paths lost, {num_told} told"


def _was_left(engine: Engine, rows: SessionRows, served: Any, place: int, *, ended: int) -> bool:
    """Return whether a loop left a token that a call had first sampled there when it `ended`.

    Its row reads the token and goes on, or ends within the output of the call.
    """
    for row in rows.outputs:
        tokens, mask = row.prompt_ids + row.response_ids, [0] * len(row.prompt_ids) + row.response_mask
        if OWN not in row.extra_fields:
            continue
        if len(served.sent) < len(tokens) <= place and served.path[: len(tokens)] == tokens:
            return True
        if tokens[: place + 1] == served.path[: place + 1]:
            last = max(at for at, is_trained in enumerate(mask) if is_trained)
            call, _ = engine.call_of(row.response_logprobs[last - len(row.prompt_ids)])
            if last > place and ended < engine.served[call].begun:
                return True
    return False


def _check_twice(rows: SessionRows, *, limits: RowLimits) -> None:
    recorded = [row for row in rows.outputs if OWN not in row.extra_fields]
    seen = Counter((*row.prompt_ids, -1, *row.response_ids, *row.response_logprobs) for row in recorded)
    cut = [row for row in recorded if len(row.response_ids) == limits.response_length]
    num_twice = sum(count for count in seen.values() if count > 1)
    assert num_twice <= min(len(cut), rows.num_truncated), "a row twice, and not because it was cut"
    if limits.response_length > 4096:
        calls = [tuple(sorted({call for call, *_ in row.extra_fields["recorded_calls"]})) for row in recorded]
        assert calls == sorted(calls), "rows are not in the order in which their calls were sent"


def _first_ends(engine: Engine) -> dict[int, int]:
    """Return, for each place at which a token was sampled, when the first call that did so had ended."""
    ends: dict[int, int] = {}
    for served in sorted(engine.served, key=lambda served: served.ended or 0):
        for at in _places(served.path)[len(served.sent) :]:
            ends.setdefault(at, served.ended or 0)
    return ends


def _places(tokens: Sequence[int]) -> list[int]:
    """Return a number for each token that says which tokens lead to it, itself included."""
    numbers, number = [], 0
    for token in tokens:
        number = hash((number, token))
        numbers.append(number)
    return numbers
