"""The store of keys and values: buffers, what is handed down and up, and recomputation, by hand.

The forest is the one that `Cut` draws, with one head of one dimension, so a key is a number::

    0 ┬ 1 ─ 2 ─ 3 ─ 4 ┬ 5      sections 0..3, 4..7, 8..11
      │               └ 6      spine    0 1 2 3 7, rows 0..4 of the store
      └ 7 ─ 8 ─ 9 ─ 10         context  of 4..7: 0 1 2 3; of 8..11: 0 7
    11
"""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from verl_tree.relay.calls import RelayCalls
from verl_tree.relay.context import RelayContext
from verl_tree.relay.cut import cut
from verl_tree.relay.host import Buffer, HostBuffer, HostCopies
from verl_tree.relay.store import ContextStore

CPU = torch.device("cpu")
LAYER = torch.nn.Identity()
PARENT_T = np.array([-1, 0, 1, 2, 3, 4, 4, 0, 7, 8, 9, -1])


def drawn_calls():
    sections = cut(
        np.array([11, 7, 7, 7, 7, 6, 7, 11, 11, 11, 11, 12]),
        np.array([0, 1, 2, 3, 4, 5, 5, 1, 2, 3, 4, 0]),
        capacity=4,
        section_cost=1,
    )
    return RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(4),
        scorer_T=PARENT_T,
        wanted_T=PARENT_T >= 0,
        tree_index_F=np.array([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 0, 7, 8, 9, 10, 11]),
        leaf_offsets=np.array([0, 6, 12, 17, 18]),
    )


def numbers(*values, dtype=torch.float64):
    """One head of one dimension per value."""
    return torch.tensor(values, dtype=dtype).reshape(-1, 1, 1)


def buffer(*, on_host, num_rows=3):
    tensors = (torch.zeros(num_rows, 1, 1, dtype=torch.float64), torch.zeros(num_rows, 1, 2))
    return HostBuffer(tensors, device=CPU, copies=HostCopies()) if on_host else Buffer(tensors)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_buffer_keeps_rows(on_host):
    """Keys and values may differ in their dtype and their head dim."""
    rows = buffer(on_host=on_host)
    assert rows.num_bytes == 3 * 8 + 3 * 2 * 4
    rows.put(slice(1, 3), (numbers(5, 6), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])))
    rows.put(slice(0, 1), (numbers(4), torch.full((1, 1, 2), 9.0)))
    key, value = rows.fetch()
    assert key.flatten().tolist() == [4, 5, 6]
    assert value.tolist() == [[[9, 9]], [[1, 2]], [[3, 4]]]
    assert (key.dtype, value.dtype) == (torch.float64, torch.float32)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_change_in_place_is_stored_by_putting_back(on_host):
    rows = buffer(on_host=on_host)
    key, value = rows.fetch()
    key[1] += 7.0
    # A host buffer hands out copies, a device buffer itself.
    assert rows.fetch()[0].flatten().tolist() == ([0, 0, 0] if on_host else [0, 7, 0])
    rows.put_back((key, value))
    assert rows.fetch()[0].flatten().tolist() == [0, 7, 0]


def test_the_next_layer_is_fetched_on_the_way_up_and_down():
    """The way turns at the first and the last layer; a layer that is fetched twice does not turn it."""
    copies = HostCopies()
    for _ in range(4):
        HostBuffer((torch.zeros(1, 1, 1),) * 2, device=CPU, copies=copies)
    up, down = [0, 1, 2, 3], [3, 2, 1, 0]
    assert [copies._place_after(place) for place in up] == [1, 2, 3, 2]
    assert [copies._place_after(place) for place in down] == [2, 1, 0, 1]
    assert [copies._place_after(place) for place in (0, 1, 2, 2, 2, 1, 1, 0)] == [1, 2, 3, 3, 3, 0, 0, 1]


def test_one_layer_has_no_next():
    copies = HostCopies()
    HostBuffer((torch.zeros(1, 1, 1),) * 2, device=CPU, copies=copies)
    assert [copies._place_after(0), copies._place_after(0)] == [None, None]


def context_of(store, call, *, writes=False):
    return RelayContext(store, call, writes=writes, device=CPU)


def fill(store, *, dtype=torch.float64):
    """Run the spine's calls: the key of token t is 10 + t, its value 20 + t."""
    with torch.no_grad():
        for call in drawn_calls().spine:
            token_Q = torch.from_numpy(call.token_Q).to(dtype).reshape(-1, 1, 1)
            context_of(store, call, writes=True).extend(LAYER, 10 + token_Q, 20 + token_Q)


@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_handed_down(on_host):
    store = ContextStore(5, on_host=on_host)
    fill(store)
    for call, above in zip(drawn_calls().sections, ([], [0, 1, 2, 3], [0, 7]), strict=True):
        own = torch.from_numpy(call.token_Q).double().reshape(-1, 1, 1)
        key, value = context_of(store, call).extend(LAYER, own, -own)
        assert key.flatten().tolist() == [*(10 + token for token in above), *call.token_Q.tolist()]
        assert value.flatten().tolist() == [*(20 + token for token in above), *(-call.token_Q).tolist()]


@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_handed_up(on_host):
    """Token 0 collects gradients from both later sections, 7 from the last, 1 2 3 from the one between.

    The last section's loss is 1 x key 0 + 2 x key 7 + 3 x each own key, that of the one between 10 x keys 0 1 2 3 and
    30 x each own, and that of the first 100 x each. Values have the negative loss.
    """
    store = ContextStore(5, on_host=on_host)
    fill(store)
    got = []
    weights = [[100.0] * 4, [10.0] * 4 + [30.0] * 4, [1.0, 2.0] + [3.0] * 4]
    for call, weight in reversed([*zip(drawn_calls().sections, weights, strict=True)]):
        own_key, own_value = (numbers(1, 2, 3, 4).requires_grad_() for _ in range(2))
        key, value = context_of(store, call).extend(LAYER, own_key, own_value)
        (numbers(*weight) * (key - value)).sum().backward()
        got.append([own_key.grad.flatten().tolist(), own_value.grad.flatten().tolist()])
    last, between, first = got
    assert last[0] == [3, 3, 3, 3]
    assert between[0] == [30, 30, 30, 30 + 2]
    assert first[0] == [100 + 10 + 1, 100 + 10, 100 + 10, 100 + 10]
    for own_key, own_value in got:
        assert own_value == [-x for x in own_key]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("rows", [slice(0, 1), torch.tensor([0])], ids=["neighbours", "index"])
def test_bfloat16_gradients_are_added_in_float32(rows, on_host):
    """256 + 1 is 256 in bfloat16, so token 0 would lose what two sections hand up after the first."""
    store = ContextStore(1, on_host=on_host)
    for gradient in (256.0, 1.0, 1.0):
        given = numbers(gradient, dtype=torch.bfloat16)
        store.add(LAYER, rows, (given, -given))
    key, value = store.added(LAYER)
    assert key.dtype == value.dtype == torch.float32
    assert (key.item(), value.item()) == (258, -258)
    in_bfloat16 = (
        numbers(256, dtype=torch.bfloat16) + numbers(1, dtype=torch.bfloat16) + numbers(1, dtype=torch.bfloat16)
    )
    assert in_bfloat16.item() == 256


def test_the_own_gradient_is_added_before_it_is_rounded():
    """The sum 257 from later sections is no bfloat16. Rounded first, it would be 256, and 256 + 1 is 256 again."""
    store = ContextStore(5)
    fill(store, dtype=torch.bfloat16)
    first = drawn_calls().sections[0]
    above = numbers(257, dtype=torch.float32)
    store.add(LAYER, slice(0, 1), (above, above))
    key, value = (numbers(1, 2, 3, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    torch.stack(context_of(store, first).extend(LAYER, key, value)).sum().backward()
    assert key.grad.dtype == torch.bfloat16
    assert key.grad.flatten().tolist() == value.grad.flatten().tolist() == [258, 1, 1, 1]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("dtype", "gradient_bytes"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)])
def test_the_store_counts_its_bytes(on_host, dtype, gradient_bytes):
    """Two layers of two heads of dimension 3, for five tokens: 2 x 30 keys and 2 x 30 values, and their gradients."""
    store = ContextStore(5, on_host=on_host)
    assert store.num_bytes == 0
    for layer in (torch.nn.Identity(), torch.nn.Identity()):
        keys_values = (torch.zeros(5, 2, 3, dtype=dtype), torch.zeros(5, 2, 3, dtype=dtype))
        store.put(layer, slice(0, 5), keys_values)
        store.add(layer, slice(0, 5), keys_values)
    assert store.num_bytes == 120 * dtype.itemsize + 120 * gradient_bytes


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_recomputation_hands_down_the_same_and_hands_up_once(on_host, use_reentrant):
    """The section 4..7, its keys twice and its values three times its input x, with the loss (key x value).sum().

    Its context's keys 10 11 12 13 get their values 20 21 22 23 as gradients, and the values get the keys. Without
    recomputation, d loss / dx = 12 x. Row 4, token 7, holds 5 and 6 from a later section: 2 x 5 + 3 x 6 more.
    """
    store = ContextStore(5, on_host=on_host)
    fill(store)
    store.add(LAYER, slice(4, 5), (numbers(5), numbers(6)))
    context = context_of(store, drawn_calls().sections[1])
    num_runs = 0

    def layer(x):
        nonlocal num_runs
        num_runs += 1
        key, value = context.extend(LAYER, 2 * x, 3 * x)
        return key * value

    x = numbers(1, 2, 3, 4).requires_grad_()
    out = layer(x) if use_reentrant is None else checkpoint(layer, x, use_reentrant=use_reentrant)
    assert out.flatten().tolist() == [10 * 20, 11 * 21, 12 * 22, 13 * 23, 6, 24, 54, 96]
    out.sum().backward()
    assert num_runs == (1 if use_reentrant is None else 2)
    assert x.grad.flatten().tolist() == [12, 24, 36, 48 + 28]
    key, value = store.added(LAYER)
    assert key.flatten().tolist() == [20, 21, 22, 23, 5]
    assert value.flatten().tolist() == [10, 11, 12, 13, 6]


def test_incoming_gradients_are_not_changed():
    """Autograd hands the gradient of a sum to keys and values as one tensor."""
    store = ContextStore(5)
    fill(store)
    store.add(LAYER, slice(0, 1), (numbers(5), numbers(6)))
    key, value = (numbers(1, 2, 3, 4).requires_grad_() for _ in range(2))
    given = numbers(1, 1, 1, 1)
    torch.autograd.backward(context_of(store, drawn_calls().sections[0]).extend(LAYER, key, value), [given, given])
    assert given.flatten().tolist() == [1, 1, 1, 1]
    assert key.grad.flatten().tolist() == [6, 1, 1, 1]
    assert value.grad.flatten().tolist() == [7, 1, 1, 1]


def test_a_section_that_neither_sees_nor_is_seen_needs_no_store():
    """Two trees of two tokens, a section each."""
    sections = cut(np.array([2, 2, 4, 4]), np.array([0, 1, 0, 1]), capacity=2, section_cost=1)
    calls = RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(2),
        scorer_T=np.array([-1, 0, -1, 2]),
        wanted_T=np.ones(4, dtype=bool),
        tree_index_F=np.arange(4),
        leaf_offsets=np.array([0, 2, 4]),
    )
    store = ContextStore(calls.num_spine_tokens)
    for call in calls.sections:
        key, value = numbers(1, 2), numbers(3, 4)
        got_key, got_value = context_of(store, call).extend(LAYER, key, value)
        assert got_key is key
        assert got_value is value
    assert store.num_bytes == 0


def test_a_call_with_gradient_must_not_write():
    store = ContextStore(5)
    with pytest.raises(AssertionError, match="must not change"):
        context_of(store, drawn_calls().spine[0], writes=True).extend(LAYER, numbers(1, 2, 3, 4), numbers(1, 2, 3, 4))
