"""What all layers of one pack share: the mask, its runs, the context, and what attention and recurrence precompute.

The first P tokens may be *context*: one root path whose keys and values come from elsewhere. Only the tokens behind it
are queries.

Legend: T tokens, P of them context and Q = T - P queries, Hkv key-value heads, D head dim, E states of the context that
a call is entered with, L that it is left with.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
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


class _Shared:
    """What all copies of a plan share: the runs, the context, the shard, and what `AttentionPlan.once` made of them."""

    # FSDP copies the dataclasses and dicts among a module's arguments, layer by layer, with all they hold. This class
    # is neither, so FSDP passes it on as it is.

    def __init__(self, runs: Runs, context: Context | None, shard: SequenceShard) -> None:
        self.runs = runs
        self.context = context
        self.shard = shard
        self.made: dict[Hashable, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
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
        backend: Name of the backend the layers use, or `"auto"`.
    """

    subtree_end_T: torch.Tensor
    position_T: torch.Tensor
    num_tokens: int
    max_path_len: int
    num_visible_pairs: int
    backend: str
    _shared: _Shared = field(repr=False)

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
        num_tokens = len(runs.subtree_end_T)
        shard = SequenceShard(num_tokens - num_context) if shard is None else shard
        assert shard.num_tokens == num_tokens - num_context, (shard.num_tokens, num_tokens, num_context)
        on_host = (torch.from_numpy(runs.subtree_end_T), torch.from_numpy(runs.position_T))
        subtree_end_on_device_T, position_T = to_device(on_host, device)
        return cls(
            subtree_end_T=subtree_end_on_device_T,
            position_T=position_T,
            num_tokens=num_tokens,
            max_path_len=int(runs.position_T.max()) + 1,
            num_visible_pairs=int((runs.position_T[num_context:].astype(np.int64) + 1).sum()),
            backend=backend,
            _shared=_Shared(runs, context, shard),
        )

    @property
    def runs(self) -> Runs:
        """The runs of the pack, on the host; one object for all copies of a plan."""
        return self._shared.runs

    @property
    def num_context(self) -> int:
        """P: the first tokens, which are keys only."""
        return self.runs.num_context

    @property
    def num_queries(self) -> int:
        """Q: the tokens behind the context."""
        return self.num_tokens - self.num_context

    @property
    def context(self) -> Context | None:
        """Where layers of transformers take the keys and values of the context from."""
        return self._shared.context

    @property
    def cut_places(self) -> np.ndarray:
        """The queries after which recurrent layers keep states for other calls, (L,) int64, ascending."""
        return np.empty(0, dtype=np.int64) if self.context is None else self.context.cut_places

    @property
    def shard(self) -> SequenceShard:
        """How the queries lie on the ranks that compute them together."""
        return self._shared.shard

    def once(self, key: Hashable, make: Callable[[Self], T]) -> T:
        """Return `make(self)`, made on the first call for `key` and shared by all layers and their recomputation.

        Backends keep here what they precompute for a pack. The key names the backend and holds all it depends on.
        """
        made = self._shared.made
        if key not in made:
            made[key] = make(self)
        return made[key]
