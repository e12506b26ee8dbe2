"""A model runs over the calls of a cut forest, "spine first".

1. Forward passes without gradient over the spine's sections fill the store and make the scores that rows read before
   the section of the score has run.
2. The sections run last to first, each forward and backward. A section scores its tokens, the loss of the rows that are
   complete there is computed, and the section runs backward from the gradients of its scores. All that later sections
   have handed up for its tokens is in the store by then.

A *joint* loss couples rows, so it needs all scores at once: in its first pass every section runs forward, then the loss
is computed on all rows. Without gradients there is only this first pass: every token once.

Legend: T tokens of the forest, K scores of a call, C kinds of scores (log-prob, entropy; or value).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_tree.relay.calls import RelayCall, RelayCalls
from verl_tree.relay.context import RelayContext
from verl_tree.relay.repeatable import Repetition
from verl_tree.relay.store import ContextStore
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard
from verl_tree.tree.transfer import to_device

Compute = Callable[[RelayCall, AttentionPlan], Tensor]
"""The model on one call: the scores (C, K) of `scored_K`, with a graph if gradients are on."""

Loss = Callable[[Tensor, IntArray], Tensor]
"""The loss, a scalar, of some leaves of the layout from the scores (C, T) of all tokens."""

RELAYED = Repetition(
    "a relayed tree computes tokens twice, which must come out the same",
    'do not relay (tree.relay=never in a training run, packing="auto" in tree_log_probs)',
)
"""Why a model must not draw random numbers."""

Mode = Literal["forward", "rows", "joint"]
"""Forward only; a loss that is a sum over rows; a loss that couples rows."""


class NumCalls(NamedTuple):
    """Calls of the model: forward passes without gradient, which come first, then forward and backward passes."""

    num_first: int
    num_last: int

    @classmethod
    def of(cls, mode: Mode, *, num_sections: int, num_spine_calls: int) -> Self:
        """Count the calls of a forest."""
        if mode == "forward":
            return cls(num_sections, 0)
        # With one section all rows are complete at once, so every loss reads all of them anyway.
        return cls(num_sections if mode == "joint" and num_sections > 1 else num_spine_calls, num_sections)


class RelayRun:
    """One pass of a model over a forest: `num_first` calls of `first`, then `num_last` calls of `last`.

    The caller makes the calls one by one, because ranks have to make them in step, or because a pipeline's schedule
    asks for them. It runs what `last` returns backward before the next `last`. The ranks of a `team` make each call
    together: all of them have all scores, and each stores the keys and values of its own heads. An earlier stage of a
    pipeline makes no scores; `compute` returns what it hands on, and so do `first` and `last`. A rank may have several
    stages, so each call asks `makes_scores`.

    Attributes:
        store: What the calls keep for later ones.
        num_first: Forward passes without gradient.
        num_last: Forward and backward passes; 0 with `mode="forward"`.
    """

    def __init__(
        self,
        calls: RelayCalls,
        compute: Compute,
        *,
        mode: Mode,
        device: torch.device,
        backend: str = "auto",
        store_on_host: bool = False,
        team: dist.ProcessGroup | None = None,
        makes_scores: Callable[[], bool] = lambda: True,
    ) -> None:
        is_whole = all(len(call.leaf_groups) <= 1 for call in calls.sections)
        assert is_whole or mode != "joint", "a loss that couples rows reads those of a section as one group"
        self._calls, self._compute = calls, compute
        self._device, self._backend, self._team = device, backend, team
        self._makes_scores = makes_scores
        counts = NumCalls.of(mode, num_sections=len(calls.sections), num_spine_calls=len(calls.spine))
        self.num_first, self.num_last = counts
        self._is_joint = mode == "joint" and len(calls.sections) > 1
        self._first = calls.sections if mode == "forward" or self._is_joint else calls.spine
        self.store = ContextStore(calls.num_spine_tokens, num_cut_tokens=calls.num_cut_tokens, on_host=store_on_host)
        self._scores_CT: Tensor | None = None
        self._gradient_CT: Tensor | None = None

    @torch.no_grad()
    def first(self, number: int) -> Tensor:
        """Run one forward pass without gradient and return its scores (C, K); `number` counts from 0."""
        call = self._first[number]
        made_CK = self._compute(call, self._plan(call, writes=True))
        if self._makes_scores():
            self._keep_scores(made_CK, self._scored_tokens(call))
        return made_CK

    def last(self, number: int, loss: Loss) -> Tensor:
        """Run one forward pass and return a scalar whose backward is that of the call; `number` counts from 0.

        The loss is called if rows are complete here. The value of the scalar means nothing.
        """
        if number == 0 and self._is_joint and self._makes_scores():
            groups = [group for call in self._calls.sections for group in call.leaf_groups]
            self._add_gradients(np.sort(np.concatenate(groups)), loss)
        call = self._calls.sections[len(self._calls.sections) - 1 - number]
        made_CK = self._compute(call, self._plan(call, writes=False))
        if not self._makes_scores():
            return made_CK
        scored_K = self._scored_tokens(call)
        if not self._is_joint:
            self._keep_scores(made_CK, scored_K)
            for leaves in call.leaf_groups:
                self._add_gradients(leaves, loss)
        return (made_CK * self._gradient_of(made_CK, scored_K)).sum()

    @property
    def scores_CT(self) -> Tensor:
        """The scores that were made so far, 0 elsewhere."""
        assert self._scores_CT is not None, "no call has run"
        return self._scores_CT

    def _gradient_of(self, made_CK: Tensor, scored_K: Tensor) -> Tensor:
        """Return the gradients of a call's scores, (C, K); zero where no loss has read them."""
        if self._gradient_CT is None:
            return torch.zeros_like(made_CK)
        return self._gradient_CT[:, scored_K]

    def _plan(self, call: RelayCall, *, writes: bool) -> AttentionPlan:
        return call_plan(call, self.store, writes=writes, device=self._device, backend=self._backend, team=self._team)

    def _keep_scores(self, made_CK: Tensor, scored_K: Tensor) -> None:
        if self._scores_CT is None:
            self._scores_CT = made_CK.new_zeros(made_CK.shape[0], self._calls.num_tokens)
        self._scores_CT[:, scored_K] = made_CK.detach()

    def _add_gradients(self, leaves: IntArray, loss: Loss) -> None:
        """Compute the loss of some leaves and add the gradients of the scores that it reads."""
        leaf_CT = self.scores_CT.detach().requires_grad_()
        (gradient_CT,) = torch.autograd.grad(loss(leaf_CT, leaves), leaf_CT)
        self._gradient_CT = gradient_CT if self._gradient_CT is None else self._gradient_CT + gradient_CT

    def _scored_tokens(self, call: RelayCall) -> Tensor:
        (scored_K,) = to_device((torch.from_numpy(call.scored_K),), self._device)
        return scored_K


def call_plan(
    call: RelayCall,
    store: ContextStore,
    *,
    writes: bool,
    device: torch.device,
    backend: str = "auto",
    team: dist.ProcessGroup | None = None,
) -> AttentionPlan:
    """Return the attention plan of one call, whose context is in the store, for the ranks of a team or this one alone.

    With `writes`, the call stores what later calls see of its tokens. It then must run without gradient.
    """
    return AttentionPlan.from_subtree_end(
        call.subtree_end,
        backend=backend,
        device=device,
        num_context=call.num_context,
        context=RelayContext(store, call, writes=writes, device=device) if store.num_rows else None,
        shard=SequenceShard(len(call.token_Q), team),
    )


def watched(compute: Compute, model: torch.nn.Module) -> Compute:
    """Return `compute`, which runs a model, for trees whose tokens are computed twice; see `Repetition.watch`."""

    def run(call: RelayCall, plan: AttentionPlan) -> Tensor:
        with RELAYED.watch(model, device=plan.subtree_end_T.device):
            return compute(call, plan)

    return run
