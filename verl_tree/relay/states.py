"""States of recurrent layers, handed down to later calls, and their gradients, handed back up.

A recurrent layer sees of its context only what it carries from token to token: a state, and the last inputs of its
convolution. A call is *entered* after tokens of its context, and it is *left* after its own cut tokens. Two autograd
functions relay what is carried. The first makes the states that the call is entered with a leaf of the graph: backward,
it adds their gradients to the store. The second hangs the states that the call is left with to the layer's output:
backward, they get the gradients that later calls have added to the store. Sections run backward last to first, so by
then all of them have.

Legend: E states that a call is entered with, L that it is left with.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl_tree.relay.store import ContextStore


class StateRelay:
    """What one call does with one kind of state of one layer (`verl_tree.tree.plan.States`)."""

    def __init__(
        self,
        store: ContextStore,
        key: Hashable,
        *,
        entered_rows: Tensor | slice,
        cut_rows: slice,
        writes: bool,
    ) -> None:
        self._store = store
        self._key = key
        self._entered_rows = entered_rows
        self._cut_rows = cut_rows
        self._writes = writes

    def enter(self, *made_of: Tensor) -> Tensor:
        """Return the states that the call is entered with, (E, ...).

        They are differentiable if one of the tensors is that the layer makes states of.
        """
        return _Entered.apply(self, *made_of)

    def leave(self, out: Tensor, states: Tensor) -> Tensor:
        """Keep the states that the call is left with, (L, ...), and return the layer's output as it is.

        Called again in the recomputation of a layer, it does the same.
        """
        if self._writes:
            assert not torch.is_grad_enabled(), "what a call is entered with must not change before its backward pass"
            self._store.put(self._key, self._cut_rows, (states,))
        return _Left.apply(out, states, self)

    def entered(self) -> Tensor:
        """Return the states that the call is entered with, without a graph."""
        return self._store.get(self._key)[0][self._entered_rows]

    def hand_up(self, gradients: Tensor) -> None:
        """Add the gradients of the states that the call was entered with."""
        self._store.add(self._key, self._entered_rows, (gradients,))

    def handed_up(self) -> Tensor | None:
        """Return the gradients of the states that the call was left with; None if no call has added any."""
        sums = self._store.added(self._key)
        return None if sums is None else sums[0][self._cut_rows]


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relay: StateRelay, *_made_of: Tensor) -> Tensor:
        ctx.relay, ctx.num_inputs = relay, 1 + len(_made_of)
        return relay.entered()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        return _hand_up(ctx, *grad_outputs)


@once_differentiable
def _hand_up(ctx: Any, gradients: Tensor) -> tuple[None, ...]:
    ctx.relay.hand_up(gradients)
    return (None,) * ctx.num_inputs


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, states: Tensor, relay: StateRelay) -> Tensor:
        ctx.relay, ctx.dtype = relay, states.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _take_gradients(ctx, *grad_outputs)


@once_differentiable
def _take_gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    handed_up = ctx.relay.handed_up()
    return grad_out, None if handed_up is None else handed_up.to(ctx.dtype), None
