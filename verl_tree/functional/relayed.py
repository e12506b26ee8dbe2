"""Scores of a forest that exceeds the capacity, for a loss that comes later: the joint form of relay (docs/relay.md).

The forward pass runs all sections without gradient, first to last. What stays are the scores, and the keys and values
of the spine. The backward pass knows the gradients of all scores. It runs the sections again, last to first, each
forward and backward. So the activations of one section are held at a time, in both passes.

All of it is one autograd function from the trained parameters to the scores. Its backward pass touches no `.grad`: it
returns the gradients of the parameters, and autograd adds them up as ever. So a hook that runs after accumulation sees
one gradient. But a hook on a parameter itself (`Tensor.register_hook`) sees the part of each section and then their
sum, so one that changes gradients must not mind to run twice.

Legend: T tokens of the forest, Q tokens of a model call, K scores that it makes, C kinds of scores.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from verl_tree.attention.hf import no_mask, tree_attention_implementation
from verl_tree.functional.images import PackImages
from verl_tree.functional.logprobs import TreeLogProbs, forward_scores
from verl_tree.functional.scorer import LogitReading, ScoredPairs
from verl_tree.relay.calls import RelayCall, RelayCalls
from verl_tree.relay.cut import MIN_SECTION_COST, Cut, cut
from verl_tree.relay.run import RELAYED, RelayRun, call_plan, watched
from verl_tree.relay.store import ContextStore
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device


def call_scores(
    model: PreTrainedModel,
    call: RelayCall,
    layout: TreeLayout,
    *,
    plan: AttentionPlan,
    images: PackImages | None = None,
    temperature: float | Tensor = 1.0,
    calculate_entropy: bool = False,
    reading: LogitReading | None = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Run a causal LM on one call and score what the call scores, (C, K).

    `layout`, `images` and `reading` are those of the whole forest, and `temperature` a number or (T,) on the host. The
    other arguments and the errors are those of `forward_scores`.
    """
    host = layout.on_host
    token_Q, scored_K, scorer_K = map(torch.from_numpy, (call.token_Q, call.scored_K, call.scorer_K))
    return forward_scores(
        model,
        token_ids_Q=host.token_ids_T[token_Q],
        position_Q=host.position_T[token_Q],
        pairs=ScoredPairs.of_scorers(scorer_K, host.token_ids_T[scored_K]),
        plan=plan,
        images=None if images is None else images.of_call(token_Q),
        temperature=temperature[token_Q] if isinstance(temperature, Tensor) else temperature,
        calculate_entropy=calculate_entropy,
        reading=None if reading is None else reading.of_call(token_Q, device=plan.subtree_end_T.device),
        chunk_size=chunk_size,
    )


def call_values(model: torch.nn.Module, call: RelayCall, layout: TreeLayout, *, plan: AttentionPlan) -> Tensor:
    """Run a critic on one call and return the values of what the call scores, (1, K).

    `model` is a transformers token classifier with one label, bare or wrapped by PEFT or FSDP2. The ranks of the plan's
    shard call it together, and all get all values.
    """
    host, shard, device = layout.on_host, plan.shard, plan.subtree_end_T.device
    token_Q = torch.from_numpy(call.token_Q)
    by_token = [shard.slice(each[token_Q]) for each in (host.token_ids_T, host.position_T)]
    token_ids_L, position_L, index_M, place_M = to_device(
        (*by_token, *shard.own(torch.from_numpy(call.scorer_K))), device
    )
    output = model(
        input_ids=token_ids_L.unsqueeze(0),
        position_ids=position_L.unsqueeze(0),
        attention_mask=no_mask(cast("PretrainedConfig", model.config), device),
        use_cache=False,
        tree_plan=plan,
    )
    values_1L = output.logits.reshape(1, shard.local_len)
    values_1L = values_1L if values_1L.dtype == torch.float64 else values_1L.float()
    return shard.collect(values_1L[:, place_M], index_M, num_scores=len(call.scorer_K))


def forest_calls(layout: TreeLayout, *, capacity: int | None, scores_tokens: bool = True) -> RelayCalls:
    """Return the model calls of a forest: sections of at most `capacity` tokens, or one if all its tokens fit.

    `layout` is on the host. The calls score every token that has a parent, or nothing without `scores_tokens`.

    Raises:
        ValueError: The capacity is not positive.
    """
    subtree_end_T, num_tokens = layout.subtree_end_T.numpy(), layout.num_tokens
    sections = Cut.whole(subtree_end_T)
    if capacity is not None and num_tokens > capacity:
        position_T, section_cost = layout.position_T.numpy(), MIN_SECTION_COST * capacity
        sections = cut(subtree_end_T, position_T, capacity=capacity, section_cost=section_cost)
    return RelayCalls.of_cut(
        sections,
        spine_cut=sections.spine_cut(capacity or num_tokens),
        scorer_T=layout.parent_T.numpy(),
        wanted_T=np.full(num_tokens, scores_tokens),
        tree_index_F=layout.tree_index_F.numpy(),
        leaf_offsets=layout.leaf_offsets,
    )


def relayed_log_probs(
    model: PreTrainedModel,
    layout: TreeLayout,
    *,
    capacity: int,
    backend: str = "auto",
    temperature: float = 1.0,
    calculate_entropy: bool = False,
) -> TreeLogProbs:
    """Score all tokens that have a parent, in sections of at most `capacity` tokens; differentiable once, for any loss.

    The model's attention implementation is "tree_attention"; the backward pass sets it by itself. `layout` is on the
    model's device. The other arguments are those of `forward_scores`.

    Raises:
        ValueError: The capacity is not positive. With gradients: the model draws random numbers, or its parameters are
            sharded. In the backward pass: a parameter or a buffer has changed since the forward pass.
    """
    relayed = _RelayedForest(
        model=model,
        layout=layout,
        calls=forest_calls(layout.on_host, capacity=capacity),
        backend=backend,
        temperature=temperature,
        calculate_entropy=calculate_entropy,
        autocast=_autocast_of_caller(model.device.type),
    )
    trained = _trained_parameters(model) if torch.is_grad_enabled() else {}
    scores_CT = _RelayedScores.apply(relayed, *trained.values())
    return TreeLogProbs(scores_CT[0], scores_CT[1] if calculate_entropy else None)


def _autocast_of_caller(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes autocast as it is here and now, for both passes."""
    is_enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=is_enabled)


def _trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that need gradients, by name; refuse a model whose sections do not give them."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trained.items():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"{name} is sharded (a DTensor), and a relayed forest gives whole parameters their gradients: use the "
                'tree engine (python -m verl_tree.main_ppo), or packs (packing="auto")'
            )
    if trained:
        RELAYED.check(model)
    return trained


def _read_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a pass reads of a model, by name: also what is frozen, as under adapters, decides on the gradients."""
    return chain(model.named_parameters(), model.named_buffers())


@dataclass(frozen=True, slots=True, eq=False)
class _RelayedForest:
    """What both passes share."""

    model: PreTrainedModel
    layout: TreeLayout  # on the model's device
    calls: RelayCalls
    backend: str
    temperature: float
    calculate_entropy: bool
    autocast: Callable[[], AbstractContextManager[Any]]

    def forward(self, *, is_repeated: bool) -> tuple[Tensor, ContextStore]:
        """Run all sections without gradient; return the scores (C, T) and the store of the spine."""
        compute = watched(self._compute, self.model) if is_repeated else self._compute
        run = RelayRun(self.calls, compute, mode="forward", device=self.layout.token_ids_T.device, backend=self.backend)
        for number in range(run.num_first):
            run.first(number)
        return run.scores_CT, run.store

    def backward(
        self, store: ContextStore, gradient_CT: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Run all sections forward and backward; return the parameters' gradients, None for a parameter without use."""
        RELAYED.check(self.model)  # It may have been in evaluation mode in the forward pass.
        compute = watched(self._compute, self.model)
        device = gradient_CT.device
        sums: list[Tensor | None] = [None] * len(parameters)
        for call in reversed(self.calls.sections):
            plan = call_plan(call, store, writes=False, device=device, backend=self.backend)
            with torch.enable_grad():
                made_CK = compute(call, plan)
            (scored_K,) = to_device((torch.from_numpy(call.scored_K),), device)
            gradient_CK = gradient_CT[:, scored_K]
            parts = torch.autograd.grad(made_CK, parameters, gradient_CK, allow_unused=True)
            # Not in place: two parameters may have been given one tensor.
            sums = [
                part if total is None else total if part is None else total + part
                for total, part in zip(sums, parts, strict=True)
            ]
        return tuple(sums)

    def _compute(self, call: RelayCall, plan: AttentionPlan) -> Tensor:
        with self.autocast():
            return call_scores(
                self.model,
                call,
                self.layout,
                plan=plan,
                temperature=self.temperature,
                calculate_entropy=self.calculate_entropy,
            )


class _RelayedScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, relayed: _RelayedForest, *parameters: Tensor) -> Tensor:
        scores_CT, store = relayed.forward(is_repeated=len(parameters) > 0)
        ctx.relayed, ctx.parameters = relayed, parameters
        ctx.read = {name: (tensor, tensor._version) for name, tensor in _read_tensors(relayed.model)}
        # Saved tensors are freed after the backward pass, and those who hook into autograd's memory see them.
        kept = store.layers()
        ctx.layers = [(key, len(tensors)) for key, tensors in kept.items()]
        ctx.save_for_backward(*chain.from_iterable(kept.values()))
        return scores_CT

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, gradient_CT: Tensor) -> tuple[Tensor | None, ...]:
    relayed: _RelayedForest = ctx.relayed
    saved = ctx.saved_tensors
    now = dict(_read_tensors(relayed.model))
    for name, (tensor, version) in ctx.read.items():
        if now.get(name) is not tensor or tensor._version != version:
            raise ValueError(
                f"{name} has changed since tree_log_probs, and the backward pass computes the sections again: run it "
                "before the optimiser's step"
            )
    # A store of this pass alone, so that the graph may run backward again.
    rest = iter(saved)
    store = ContextStore.of_layers(
        {key: tuple(islice(rest, num_tensors)) for key, num_tensors in ctx.layers},
        num_rows=relayed.calls.num_spine_tokens,
        num_cut_tokens=relayed.calls.num_cut_tokens,
    )
    max_path_len = int(np.diff(relayed.layout.leaf_offsets).max())
    # torch.autograd.grad does not run through checkpoints of the reentrant kind.
    with tree_attention_implementation(relayed.model, max_path_len=max_path_len, use_reentrant=False):
        return None, *relayed.backward(store, gradient_CT, ctx.parameters)
