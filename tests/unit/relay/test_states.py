"""The store of recurrent states: what is handed down and up, and recomputation, by hand.

Three cut tokens, rows 0, 1 and 2 of the store. The first call is left after 0 and 1. The second is entered after both,
and left after 2. The third is entered after 0 and 2. A state is a number, and tokens are none: only states matter.
"""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from verl_tree.relay.calls import RelayCall
from verl_tree.relay.context import RelayContext
from verl_tree.relay.store import ContextStore

KEY = (torch.nn.Identity(), "rule")
ENTERED, LEFT = ([], [0, 1], [0, 2]), (slice(0, 2), slice(2, 3), slice(0, 0))


def states_of(store, number, *, writes=False):
    alone = RelayCall.of_pack(np.array([2, 2]), scorer_T=np.array([-1, -1]))
    left, entered = LEFT[number], np.array(ENTERED[number], dtype=np.int64)
    cut_places = np.arange(left.stop - left.start)
    call = dataclasses.replace(alone, entered_rows_E=entered, cut_places=cut_places, cut_rows=left)
    return RelayContext(store, call, writes=writes, device=torch.device("cpu")).states(KEY)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def filled(*, on_host):
    store = ContextStore(5, num_cut_tokens=3, on_host=on_host)
    with torch.no_grad():
        states_of(store, 0, writes=True).leave(numbers(0), numbers(10, 11))
        states_of(store, 1, writes=True).leave(numbers(0), numbers(12))
    return store


@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_handed_down(on_host):
    store = filled(on_host=on_host)
    assert states_of(store, 1).enter().tolist() == [10, 11]
    assert states_of(store, 2).enter().tolist() == [10, 12]
    assert store.num_bytes == 3 * 8
    assert store.layers()[KEY][0].tolist() == [10, 11, 12]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
def test_what_is_handed_up(on_host, use_reentrant):
    """Each call makes its states of x and of what it is entered with: its output is x times the sum of these.

    The third call's loss is its output, with x = 2: the states 0 and 2 get 2 each, and x gets 10 + 12. The second's is
    nothing but the state 2 = 3 x, which so gets 2: x gets 6, and states 0 and 1 get nothing. The first is left with x
    and 5 x, and the state 0 has 2: x gets 2.
    """
    store = filled(on_host=on_host)
    makes = ([1, 5], [3], [])

    def layer(x, number):
        states = states_of(store, number)
        out = x * (states.enter(x).sum() if ENTERED[number] else 0)
        return states.leave(out, torch.stack([factor * x for factor in makes[number]])) if makes[number] else out

    got = []
    for number, weight in ((2, 1.0), (1, 0.0), (0, 0.0)):
        x = numbers(2.0)[0].requires_grad_()
        out = layer(x, number) if use_reentrant is None else checkpoint(layer, x, number, use_reentrant=use_reentrant)
        (weight * out).backward()
        got.append(x.grad.item())
    assert got == [22, 6, 2]
    assert store.added(KEY)[0].tolist() == [2, 0, 2]


def test_a_call_whose_states_nobody_uses_gets_no_gradient():
    x = numbers(1.0).requires_grad_()
    store = filled(on_host=False)
    states_of(store, 1).leave(2 * x, x).sum().backward()
    assert x.grad.tolist() == [2]


def test_a_call_with_gradient_must_not_write():
    with pytest.raises(AssertionError, match="must not change"):
        states_of(filled(on_host=False), 1, writes=True).leave(numbers(0), numbers(1))
