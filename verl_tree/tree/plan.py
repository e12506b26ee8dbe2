"""What all layers of one pack share: the mask, its runs, the context, and what attention and recurrence precompute.

The first P tokens may be *context*: one root path whose keys and values come from elsewhere. Only the tokens behind it
are queries.

Legend: T tokens, P of them context and Q = T - P queries, Hkv key-value heads, D head dim, E states of the context that
a call is entered with, L that it is left with.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.runs import Runs
from verl_tree.tree.sharding import SequenceShard
from verl_tree.tree.transfer import to_device

T = TypeVar("T")


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


class Context(Protocol):
    """What layers keep of the context: keys and values, or states."""

    @property
    def cut_places(self) -> np.ndarray:
        """The queries after which states are kept, (L,) int64, ascending."""
        ...

    def states(self, key: Hashable, /) -> States:
        """Return the states of a recurrent layer that cross calls, of the kind that `key` stands for."""
        ...

    def extend(
        self, layer: torch.nn.Module, key_QHD: torch.Tensor, value_QHD: torch.Tensor, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, (T, Hkv, D): those of the layer's context, then those of the queries as given."""
        ...

    def save_own(
        self,
        layer: torch.nn.Module,
        own: tuple[torch.Tensor, torch.Tensor],
        extended: tuple[torch.Tensor, torch.Tensor],
        /,
    ) -> AbstractContextManager[object]:
        """Return a context manager in which autograd saves `own` where it is to save `extended`, made of them."""
        ...


class AttentionPlan:
    """The attention structure of one pack, built once on the host and used by every layer and backend.

    Attributes:
        subtree_end_T: int32 (T,), one past the last descendant of each token in DFS preorder.
        position_T: int32 (T,), position of each token on its own path. Sliding windows are measured in it.
        num_tokens: T, context and queries.
        max_path_len: Tokens on the longest root-to-leaf path. A sliding window at least this long has no effect.
        num_visible_pairs: (query, key) pairs that the mask lets through, not counting any window. No token of the
            context is a query. Each pair costs `4 * Hq * D` FLOPs in the forward pass and `10 * Hq * D` in the
            backward pass.
        num_context: P: the first tokens, which are keys only.
        num_queries: Q: the tokens behind the context.
        backend: Name of the backend the layers use, or `"auto"`.
        runs: The runs of the pack, on the host.
        context: Where layers of transformers take the keys and values of the context from.
        shard: How the queries lie on the ranks that compute them together.
    """

    # Not a dataclass: FSDP copies those among a module's arguments, layer by layer, with all they hold.

    def __init__(
        self, runs: Runs, *, backend: str, device: torch.device | str, context: Context | None, shard: SequenceShard
    ) -> None:
        self.runs, self.backend, self.context, self.shard = runs, backend, context, shard
        on_host = (torch.from_numpy(runs.subtree_end_T), torch.from_numpy(runs.position_T))
        self.subtree_end_T, self.position_T = to_device(on_host, device)
        self.num_tokens, self.num_context = len(runs.subtree_end_T), runs.num_context
        self.num_queries = self.num_tokens - self.num_context
        self.max_path_len = int(runs.position_T.max()) + 1
        self.num_visible_pairs = int((runs.position_T[self.num_context :].astype(np.int64) + 1).sum())
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def from_layout(cls, layout: TreeLayout, *, backend: str = "auto", shard: SequenceShard | None = None) -> Self:
        """Build the plan of a layout on its device; see `from_subtree_end`."""
        subtree_end_T, device = layout.on_host.subtree_end_T.numpy(), layout.subtree_end_T.device
        return cls.from_subtree_end(subtree_end_T, backend=backend, device=device, shard=shard)

    @classmethod
    def from_subtree_end(
        cls,
        subtree_end_T: torch.Tensor | np.ndarray,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        num_context: int = 0,
        context: Context | None = None,
        shard: SequenceShard | None = None,
    ) -> Self:
        """Build the plan of a pack, with its tensors on `device`, by default that of `subtree_end_T`.

        `backend` is a key of `verl_tree.attention.BACKENDS`, or `"auto"`. The first `num_context` tokens are the root
        path of the token behind them. Layers of transformers take their keys and values from `context`, and compute
        the queries of `shard` only; by default all of them.

        Raises:
            ValueError: `subtree_end_T` is not that of a forest in DFS preorder, or `num_context` not that of a root
                path with a query behind it.
        """
        if isinstance(subtree_end_T, torch.Tensor):
            device = subtree_end_T.device if device is None else device
            subtree_end_T = subtree_end_T.detach().cpu().numpy()
        device = "cpu" if device is None else device
        runs = Runs.from_subtree_end(np.asarray(subtree_end_T, dtype=np.int64), num_context=num_context)
        num_queries = len(runs.subtree_end_T) - num_context
        shard = SequenceShard(num_queries) if shard is None else shard
        assert shard.num_tokens == num_queries, (shard.num_tokens, num_queries)
        return cls(runs, backend=backend, device=device, context=context, shard=shard)

    @property
    def cut_places(self) -> np.ndarray:
        """The queries after which recurrent layers keep states for other calls, (L,) int64, ascending."""
        return np.empty(0, dtype=np.int64) if self.context is None else self.context.cut_places

    def once(self, key: Hashable, make: Callable[[Self], T]) -> T:
        """Return `make(self)`, made on the first call for `key` and shared by all layers and their recomputation.

        Backends keep here what they precompute for a pack. The key names the backend and holds all it depends on.
        """
        if key not in self._made:
            self._made[key] = make(self)
        return self._made[key]
