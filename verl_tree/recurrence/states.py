"""States that cross model calls, where a tree is computed in several of them (`verl_tree.relay`)."""

from typing import Protocol

from torch import Tensor


class States(Protocol):
    """One kind of state of one layer in one call: E that it is entered with and L that it is left with.

    It is entered after the tokens of its context that have a child in the call, and left after those of its own tokens
    that have a child in another call, ascending each.
    """

    def enter(self, *made_of: Tensor) -> Tensor:
        """Return the states that the call is entered with, (E, ...), which gradients reach as they reach `made_of`."""
        ...

    def leave(self, out: Tensor, states: Tensor) -> Tensor:
        """Keep the states that the call is left with, (L, ...), and return `out`, the layer's output, as it is."""
        ...
