"""Faults for an engine on trees, each of a kind that a kernel, a plan or a store may have; for tests of the canary.

What is wrong is drawn anew for every model call, from the mutant's seed and the call, so that a call that runs twice is
wrong in one way. The model's own forward (`ModelCalls.flat`) stays right. `backward` faults leave log-probs right;
`routes` need a mixture whose routes are imposed.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from verl_tree.attention.layer import layer_attention
from verl_tree.engine import TreeEngine
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.context import RelayContext
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

ATTENDING = {"verl_tree.attention.hf", "verl_tree.engine.megatron.build"}
"""Modules whose layers call `layer_attention`."""

Draw = np.random.Generator
Ends = np.ndarray
"""The tree mask of a call: one past the last descendant of each token of its context and its own."""


def _parents(end_T: Ends) -> np.ndarray:
    """Return the parent of each token, -1 at roots."""
    parents, path = np.full(len(end_T), -1), []
    for token, end in enumerate(end_T.tolist()):
        while path and path[-1][1] <= token:
            path.pop()
        parents[token] = path[-1][0] if path else -1
        path.append((token, end))
    return parents


def leaks_key(end_T: Ends, rng: Draw) -> Ends:
    """Show a key of one branch to the branches behind it."""
    parents = _parents(end_T)
    begins = np.flatnonzero((parents >= 0) & (end_T < end_T[parents]))
    return _with(end_T, begins, rng, lambda token: end_T[parents[token]])


def loses_key(end_T: Ends, rng: Draw) -> Ends:
    """Hide a key from those behind the first branch below it."""
    parents = _parents(end_T)
    branching = np.flatnonzero(np.bincount(parents[parents >= 0], minlength=len(end_T)) > 1)
    return _with(end_T, branching, rng, lambda token: np.flatnonzero(parents == token)[-1])


def sees_all(end_T: Ends, _: Draw) -> Ends:
    """Let every token see all before it."""
    return np.full_like(end_T, len(end_T))


def _with(end_T: Ends, tokens: np.ndarray, rng: Draw, value: Callable[[int], Any]) -> Ends:
    changed = end_T.copy()
    if len(tokens):
        token = int(rng.choice(tokens))
        changed[token] = value(token)
    return changed


def shifts_a_branch(layout: TreeLayout, rng: Draw) -> TreeLayout:
    """Compute the tokens below one token a position late."""
    position_T, end_T = layout.position_T.clone(), layout.subtree_end_T.tolist()
    start = int(rng.integers(1, len(end_T)))
    position_T[start : end_T[start]] += 1
    return _replaced(layout, position_T=position_T)


def counts_along_the_pack(layout: TreeLayout, _: Draw) -> TreeLayout:
    """Let positions go on from branch to branch."""
    return _replaced(layout, position_T=torch.arange(layout.num_tokens))


def reads_another_token(layout: TreeLayout, rng: Draw) -> TreeLayout:
    """Take another token in place of one."""
    token_ids_T = layout.token_ids_T.clone()
    place = int(rng.integers(layout.num_tokens))
    token_ids_T[place] = token_ids_T[(place + 1) % len(token_ids_T)]
    return _replaced(layout, token_ids_T=token_ids_T)


def _replaced(layout: TreeLayout, **tensors: Tensor) -> Any:
    return SimpleNamespace(on_host=dataclasses.replace(layout, **tensors))


def scores_by_the_token_before(call: RelayCall, _: Draw) -> RelayCall:
    """Score a token by the one before it in the pack, which at branches is not its parent."""
    place_of = {token: place for place, token in enumerate(call.token_Q.tolist())}
    scorers = np.array([max(0, place_of.get(token, 1) - 1) for token in call.scored_K.tolist()], dtype=np.int64)
    order = np.argsort(scorers, kind="stable")
    return dataclasses.replace(call, scorer_K=scorers[order], scored_K=call.scored_K[order])


def _heads(change: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return what changes the attention of one layer: its output (Q, Hq, D)."""

    def wrong(attend: Callable[..., Tensor], rng: Draw) -> Callable[..., Tensor]:
        chosen = int(rng.integers(1 << 16))

        def attention(module: Any, *args: Any, **options: Any) -> Tensor:
            if hasattr(module, "layer_idx"):
                number, num_layers = module.layer_idx, module.config.get_text_config().num_hidden_layers
            else:  # Megatron's counts from 1
                (own,) = module.own
                number, num_layers = own.layer_number - 1, own.config.num_layers
            out = attend(module, *args, **options)
            return change(out, chosen) if number == chosen % num_layers else out

        return attention

    return wrong


@_heads
def loses_head(out_QHD: Tensor, chosen: int) -> Tensor:
    """Let one head of one layer give 0."""
    kept_H = torch.arange(out_QHD.shape[1], device=out_QHD.device) != chosen % out_QHD.shape[1]
    return out_QHD * kept_H[:, None]


@_heads
def swaps_heads(out_QHD: Tensor, _: int) -> Tensor:
    """Exchange the first two heads of one layer."""
    return torch.cat((out_QHD[:, :2].flip(1), out_QHD[:, 2:]), dim=1)


@_heads
def rounds_to_float8(out_QHD: Tensor, _: int) -> Tensor:
    """Round the attention of one layer to 3 bits of mantissa."""
    return out_QHD + (out_QHD.to(torch.float8_e4m3fn).to(out_QHD.dtype) - out_QHD).detach()


@_heads
def loses_last_queries(out_QHD: Tensor, _: int) -> Tensor:
    """Let one layer give 0 for queries behind the last whole tile of 64."""
    whole = max(1, len(out_QHD) // 64 * 64)
    return torch.cat((out_QHD[:whole], out_QHD[whole:] * 0))


@_heads
def halves_gradients(out_QHD: Tensor, _: int) -> Tensor:
    """Hand on half of the gradients of one layer's attention."""
    return (out_QHD + out_QHD.detach()) / 2


@_heads
def loses_gradients_of_last_queries(out_QHD: Tensor, _: int) -> Tensor:
    """Hand on no gradients of one layer's attention for queries behind the last whole tile of 64."""
    whole = max(1, len(out_QHD) // 64 * 64)
    return torch.cat((out_QHD[:whole], out_QHD[whole:].detach()))


def scales_wrongly(attend: Callable[..., Tensor], _: Draw) -> Callable[..., Tensor]:
    """Make the logits of attention 2 % too large."""
    return lambda *args, **options: attend(*args, **options | {"scale": options["scale"] * 1.02})


def sees_a_window(attend: Callable[..., Tensor], _: Draw) -> Callable[..., Tensor]:
    """Show tokens the last 128 tokens of their path only."""
    return lambda *args, **options: attend(*args, **options | {"window": 128})


def stale_store(take: Callable[..., Any], _: Draw) -> Callable[..., Any]:
    """Give the last token of a relayed context the keys and values of the one before it."""

    def hand_down(self: RelayContext, *args: Any) -> tuple[Tensor, Tensor]:
        extended = tuple(each.clone() for each in take(self, *args))
        last = self._num_context - 1
        for each in extended if last > 0 else ():
            each[last] = each[last - 1]
        return extended  # type: ignore[return-value]

    return hand_down


def routes_by_the_next_token(routes_LNk: Tensor, _: Draw) -> Tensor:
    """Give each token the experts of the one behind it in the pack."""
    return routes_LNk.roll(-1, dims=0)


def routes_one_token_wrongly(routes_LNk: Tensor, rng: Draw) -> Tensor:
    """Give one token the experts of the one behind it, in all layers."""
    changed = routes_LNk.clone()
    token = int(rng.integers(max(1, len(changed) - 1)))
    changed[token] = changed[(token + 1) % len(changed)]
    return changed


KINDS: dict[str, tuple[str, Callable[..., Any]]] = {
    "leaks_key": ("mask", leaks_key),
    "loses_key": ("mask", loses_key),
    "sees_all": ("mask", sees_all),
    "shifts_a_branch": ("layout", shifts_a_branch),
    "counts_along_the_pack": ("layout", counts_along_the_pack),
    "reads_another_token": ("layout", reads_another_token),
    "scores_by_the_token_before": ("call", scores_by_the_token_before),
    "loses_head": ("attention", loses_head),
    "swaps_heads": ("attention", swaps_heads),
    "rounds_to_float8": ("attention", rounds_to_float8),
    "loses_last_queries": ("attention", loses_last_queries),
    "halves_gradients": ("backward", halves_gradients),
    "loses_gradients_of_last_queries": ("backward", loses_gradients_of_last_queries),
    "scales_wrongly": ("attention", scales_wrongly),
    "sees_a_window": ("attention", sees_a_window),
    "stale_store": ("store", stale_store),
    "routes_by_the_next_token": ("routes", routes_by_the_next_token),
    "routes_one_token_wrongly": ("routes", routes_one_token_wrongly),
}
"""What is changed of a call, and how."""


@contextmanager
def mutated(engine: TreeEngine, name: str, *, seed: int = 0) -> Iterator[None]:
    """Inject a fault of a kind into an engine, while active."""
    part, change = KINDS[name]
    right, flat, replay = engine.scores, engine.flat, engine.replay
    is_flat = [False]

    def scores(call: RelayCall, layout: TreeLayout, *, plan: AttentionPlan, **options: Any) -> Tensor:
        if is_flat[0]:
            return right(call, layout, plan=plan, **options)
        rng = np.random.default_rng([seed, len(call.token_Q), int(call.token_Q[0])])
        if part == "mask":
            ends = change(plan.runs.subtree_end_T.astype(np.int64), rng)
            same = {"backend": plan.backend, "num_context": plan.num_context, "context": plan.context}
            device = plan.subtree_end_T.device
            plan = AttentionPlan.from_subtree_end(ends, device=device, shard=plan.shard, **same)  # type: ignore[arg-type]
        elif part == "layout":
            layout = change(layout.on_host, rng)
        elif part == "call":
            call = change(call, rng)
        elif part in ("attention", "backward"):
            wrong_attention = change(layer_attention, rng)
            with ExitStack() as stack:
                for module in ATTENDING & sys.modules.keys():
                    stack.enter_context(mock.patch(f"{module}.layer_attention", wrong_attention))
                return right(call, layout, plan=plan, **options)
        elif part == "routes" and replay is not None and replay.imposed_LNk is not None:
            with mock.patch.object(replay, "imposed_LNk", change(replay.imposed_LNk, rng)):
                return right(call, layout, plan=plan, **options)
        return right(call, layout, plan=plan, **options)

    @contextmanager
    def flat_and_right() -> Iterator[None]:
        is_flat[0] = True
        try:
            with flat():
                yield
        finally:
            is_flat[0] = False

    rng = np.random.default_rng(seed)
    wrong = change(RelayContext.hand_down, rng) if part == "store" else RelayContext.hand_down
    with (
        mock.patch.object(engine, "scores", scores),
        mock.patch.object(engine, "flat", flat_and_right),
        mock.patch.object(RelayContext, "hand_down", wrong),
    ):
        yield
