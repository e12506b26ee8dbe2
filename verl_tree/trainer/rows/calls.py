"""The calls of each row, which `gigpo` takes for the steps of an agent.

A loop that knows where its calls begin says so in the row's `extra_fields` (`CALL_STATES_FIELD`), with its own key of a
state where it has one. Otherwise they are the recorded calls (`CALLS_FIELD`). In rows that others make, with neither, a
step is a maximal stretch of trained tokens.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from rollout_hooks.capture.outputs import CALL_STATES_FIELD
from rollout_hooks.capture.rows import CALLS_FIELD
from verl_tree.records import CallRun
from verl_tree.trainer.advantages import Call


def recorded_calls(extra_fields: Mapping[str, Any]) -> tuple[CallRun, ...]:
    """Return the calls that the capture recorded for a row; none where it recorded none."""
    return tuple(CallRun(*run) for run in extra_fields.get(CALLS_FIELD, ()))


def calls_of_row(extra_fields: Mapping[str, Any], *, is_trained: np.ndarray) -> list[Call]:
    """Return the calls of a row of L tokens in order; `is_trained` (L,) says which tokens were sampled to train."""
    if CALL_STATES_FIELD in extra_fields:
        begun = extra_fields[CALL_STATES_FIELD]
        bounds = pairwise([*(position for position, _ in begun), len(is_trained)])
        stretches = [(start, np.flatnonzero(is_trained[start:end])) for start, end in bounds]
        return [
            Call(start, start + int(trained[-1]) + 1, state)
            for (start, trained), (_, state) in zip(stretches, begun, strict=True)
            if len(trained)
        ]
    if CALLS_FIELD in extra_fields:
        return [Call(run.start, run.end) for run in recorded_calls(extra_fields)]
    edges = np.flatnonzero(np.diff(is_trained.astype(np.int8), prepend=0, append=0)).tolist()
    return [Call(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
