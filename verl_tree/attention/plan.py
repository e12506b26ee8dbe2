"""What all attention layers of one pack share: the mask, the runs, and what backends precompute.

The mask of a pack in DFS preorder is one integer per key: key `j` is visible to query `i` iff
`j <= i < subtree_end[j]`. A *run* is a maximal stretch of tokens with one `subtree_end`. Inside a run attention is
causal, and the tokens below a run follow it directly. So the whole mask is a few triangles and rectangles::

    prompt ──┬── a ──┬── b        runs in DFS order:  prompt | a | b | c | d
             │       └── c
             └── d                prompt: triangle over itself, rectangle for the queries a..d
                                  a:      triangle over itself, rectangle for the queries b..c

The first P tokens may be *context*: one root path whose keys and values come from elsewhere. Only the tokens behind it
are queries. A run ends where the context ends.

Legend: T tokens, P of them context and Q = T - P queries, R runs, Hkv key-value heads, D head dim.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch

from verl_tree.attention.sharding import SequenceShard
from verl_tree.recurrence.causal_conv import ConvSeams
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.levels import TreeLevels
from verl_tree.recurrence.states import States
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.transfer import to_device

T = TypeVar("T")


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


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of one pack in DFS order, on the host, so that planning waits for no device.

    `subtree_end_T`, `position_T` and `num_context` are those of `AttentionPlan`. The others are int64 (R,): the first
    token of each run, one past its last token, and the `subtree_end` of its tokens.
    """

    subtree_end_T: np.ndarray
    position_T: np.ndarray
    start_R: np.ndarray
    end_R: np.ndarray
    subtree_end_R: np.ndarray
    num_context: int

    @classmethod
    def from_subtree_end(cls, subtree_end_T: np.ndarray, *, num_context: int = 0) -> Self:
        """Find the runs of a pack. Raise a ValueError if it is not a forest in DFS preorder behind one root path."""
        num_tokens = len(subtree_end_T)
        if subtree_end_T.ndim != 1 or num_tokens == 0:
            raise ValueError(f"subtree_end has shape {subtree_end_T.shape}; it must be (T,) with at least one token")
        wrong = np.flatnonzero((subtree_end_T <= np.arange(num_tokens)) | (subtree_end_T > num_tokens))
        if len(wrong):
            raise ValueError(
                f"subtree_end[{wrong[0]}] = {subtree_end_T[wrong[0]]}, but a token's subtree holds the token itself "
                f"and ends within the pack of {num_tokens} tokens; give one past the last descendant in DFS preorder"
            )
        _check_context(subtree_end_T, num_context)
        start_R = np.union1d([0, num_context], np.flatnonzero(np.diff(subtree_end_T)) + 1)
        end_R = np.append(start_R[1:], num_tokens)
        subtree_end_R = subtree_end_T[start_R]
        depth_R = np.zeros(len(start_R), dtype=np.int64)  # tokens above the run
        path: list[int] = []
        for run, (start, end) in enumerate(zip(start_R.tolist(), subtree_end_R.tolist(), strict=True)):
            while path and subtree_end_R[path[-1]] <= start:
                path.pop()
            if path:
                parent = path[-1]
                if end > subtree_end_R[parent]:
                    raise ValueError(
                        f"subtree_end[{start}] = {end} reaches past its ancestor's {subtree_end_R[parent]}; the tokens "
                        "are not in DFS preorder"
                    )
                depth_R[run] = depth_R[parent] + end_R[parent] - start_R[parent]
            path.append(run)
        position_T = np.arange(num_tokens) + np.repeat(depth_R - start_R, end_R - start_R)
        whole = (subtree_end_T.astype(np.int32), position_T.astype(np.int32))
        return cls(*whole, start_R, end_R, subtree_end_R, num_context)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (start, end, subtree_end) of every run."""
        return list(zip(self.start_R.tolist(), self.end_R.tolist(), self.subtree_end_R.tolist(), strict=True))


def _check_context(subtree_end_T: np.ndarray, num_context: int) -> None:
    if not 0 <= num_context < len(subtree_end_T):
        raise ValueError(
            f"num_context = {num_context} of {len(subtree_end_T)} tokens: give a number from 0 on that leaves at least "
            "one query"
        )
    wrong = np.flatnonzero(subtree_end_T[:num_context] <= num_context)
    if len(wrong):
        raise ValueError(
            f"subtree_end[{wrong[0]}] = {subtree_end_T[wrong[0]]}, so the first query, token {num_context}, does not "
            f"see token {wrong[0]} of its context: give as context the root path of the first query, and nothing else"
        )


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
        """The runs of the pack, on the host."""
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
    def shard(self) -> SequenceShard:
        """How the queries lie on the ranks that compute them together."""
        return self._shared.shard

    def chunks(self, size: int) -> TreeChunks:
        """Return the queries in chunks of at most `size` tokens, as recurrent layers compute them.

        Raises:
            ValueError: The plan has a context whose states are not kept.
        """
        self._check_serves_recurrence()
        return self.once(
            ("chunks", size),
            lambda plan: TreeChunks.from_subtree_end(plan.runs.subtree_end_T, size=size, **plan._where_it_is_cut()),
        )

    def levels(self, chunk_size: int) -> TreeLevels:
        """Return the calls of a kernel with chunks of `chunk_size` tokens; the errors are those of `chunks`."""
        self._check_serves_recurrence()
        device = self.subtree_end_T.device
        return self.once(
            ("levels", chunk_size),
            lambda plan: TreeLevels.from_subtree_end(plan.runs.subtree_end_T, chunk_size=chunk_size, device=device),
        )

    def seams(self, width: int) -> ConvSeams:
        """Return the seams of a causal convolution of `width` tokens; the errors are those of `chunks`."""
        self._check_serves_recurrence()
        return self.once(
            ("seams", width),
            lambda plan: ConvSeams.from_subtree_end(plan.runs.subtree_end_T, width=width, **plan._where_it_is_cut()),
        )

    def _where_it_is_cut(self) -> dict[str, Any]:
        return {
            "device": self.subtree_end_T.device,
            "num_context": self.num_context,
            "cut_places": None if self.context is None else self.context.cut_places,
        }

    def _check_serves_recurrence(self) -> None:
        if self.num_context and self.context is None:
            raise ValueError(
                f"a recurrent layer got a plan of {self.num_context} context tokens without their states: give what "
                "keeps them (context=...)"
            )
        # A rank of several has only some tokens of a path, so an engine refuses these layers (`verl_tree.clashes`).
        assert self.shard.num_ranks == 1, self.shard.num_ranks

    def once(self, key: Hashable, make: Callable[[Self], T]) -> T:
        """Return `make(self)`, made on the first call for `key` and shared by all layers and their recomputation.

        Backends keep here what they precompute for a pack. The key names the backend and holds all it depends on.
        """
        made = self._shared.made
        if key not in made:
            made[key] = make(self)
        return made[key]
