"""What an update on a CPU holds: the most bytes at once, those that wait for the backward pass, and what they are.

All numbers come from one run under torch's profiler, so temporary buffers inside operators count. What libraries take
outside of torch's allocator does not. `verl_tree.functional.memory.peak_bytes` finds the same peak.

Bytes saved for the backward pass are those that are held when its first node starts: activations, keys and values in a
relay's store, scores. Hooks on saved tensors would see less and change more: while there are any, a relay leaves its
own out (`verl_tree.relay.context`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

BACKWARD = "autograd::engine::evaluate_function: "
NUM_LARGEST = 6


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes that were allocated beyond those that were there before.

    Attributes:
        peak_bytes: The most at once.
        saved_bytes: The most that were held where a backward pass starts.
        largest: What was held at the peak, the largest first: "operator of the model or of autograd > operator that
            allocated", and the bytes of all its tensors.
    """

    peak_bytes: int
    saved_bytes: int
    largest: dict[str, int]


def held_bytes(run: Callable[[], Any]) -> Held:
    """Run, and return what was held meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    results: Any = profiled.profiler
    roots = sorted(results.kineto_results.experimental_event_tree(), key=lambda event: event.start_time_ns)
    events: list[Any] = []
    backward_starts = [0]  # in events
    was_backward = False
    for root in roots:
        if root.tag != _EventType.Allocation:
            is_backward = root.name.startswith(BACKWARD)
            if is_backward and not was_backward:
                backward_starts.append(len(events))
            was_backward = is_backward
        events += _allocations(root)
    # Bytes that are freed have a minus.
    live = np.cumsum([0, *(event.extra_fields.alloc_size for event in events)])
    peak_at = int(live.argmax())
    held: dict[int, Any] = {}  # by address
    for event in events[:peak_at]:
        if event.extra_fields.alloc_size > 0:
            held[event.extra_fields.ptr] = event
        else:
            held.pop(event.extra_fields.ptr, None)
    totals: Counter[str] = Counter()
    for event in held.values():
        totals[_made_by(event)] += event.extra_fields.alloc_size
    return Held(int(live[peak_at]), int(live[backward_starts].max()), dict(totals.most_common(NUM_LARGEST)))


def _allocations(root: Any) -> list[Any]:
    """Return what an operator and those below it allocated and freed, in order."""
    return sorted(
        (event for event in _walk(root) if event.tag == _EventType.Allocation), key=lambda event: event.start_time_ns
    )


def _walk(root: Any) -> Iterator[Any]:
    waiting = [root]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children


def _made_by(event: Any) -> str:
    """Name the outermost and the innermost operator around an allocation."""
    names = []
    while (event := event.parent) is not None:
        names.append(event.name.removeprefix(BACKWARD))
    return " > ".join(dict.fromkeys((names[-1], names[0]))) if names else "outside of operators"
