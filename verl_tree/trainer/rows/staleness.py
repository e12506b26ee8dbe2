"""How old the weights were that sampled the rows of a step.

In the asynchronous modes a session may be sampled under several versions of the weights: between two of its calls, and
within a call that a weight sync interrupts. verl's `training/off_policy/trajectory_...` count rows, so a shared token
counts with every leaf. Here a call counts once, and the ends of a tree are told from its beginning.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from verl_tree.records import CallRun
from verl_tree.trainer.row_keys import parse_row_key


def staleness_metrics(calls_of: Mapping[str, Sequence[CallRun]], *, version: int) -> dict[str, float]:
    """Return `tree/async/...` of rows, given the calls of each row by its key and the current version of the weights.

    The staleness of a call is the number of weight syncs since it began, 0 for a call of the current weights.

    - `staleness/mean`, `staleness/max`: over the calls; the mean is weighted by the tokens that they sampled.
    - `staleness/first_call`, `staleness/last_call`: means over the leaves, of the first and last call on their path.
    - `resumed_calls`: calls that were interrupted and resumed under later weights.
    - `version_span/max`: the most versions that sampled one call.

    There are none if no call has a known version.
    """
    # A call's stretches on one row may be several. Of its rows, the longest was cut least.
    num_tokens: dict[tuple[str, int, int], int] = {}
    versions: dict[tuple[str, int, int], tuple[int, int]] = {}
    first, last = [], []
    for key, runs in calls_of.items():
        row, stale, sampled = parse_row_key(key), [], dict[int, int]()
        for run in runs:
            if run.min_global_steps is None or run.max_global_steps is None:
                continue
            sampled[run.call] = sampled.get(run.call, 0) + run.end - run.start
            call = (row.uid, row.session, run.call)
            versions[call] = (run.min_global_steps, run.max_global_steps)
            num_tokens[call] = max(num_tokens.get(call, 0), sampled[run.call])
            stale.append(version - run.min_global_steps)
        first += stale[:1]
        last += stale[-1:]
    if not versions:
        return {}
    oldest_K, newest_K = np.array(list(versions.values())).T
    weight_K = np.array([num_tokens[call] for call in versions])
    values = {
        "staleness/mean": np.average(version - oldest_K, weights=weight_K),
        "staleness/max": (version - oldest_K).max(),
        "staleness/first_call": np.mean(first),
        "staleness/last_call": np.mean(last),
        "resumed_calls": np.count_nonzero(newest_K > oldest_K),
        "version_span/max": (newest_K - oldest_K).max() + 1,
    }
    return {f"tree/async/{name}": float(value) for name, value in values.items()}
