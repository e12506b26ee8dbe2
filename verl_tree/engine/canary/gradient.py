"""The gradient of one layer from some rows of a tree: by the tree, and by these rows alone.

Log-probs do not show what goes wrong backward: a kernel's gradients of keys that many branches see, sums over rows at
shared tokens, gradients that a relayed section hands up. So now and then (`tree.canary_gradient_every`) the sum of the
scores of a few rows runs backward twice, once through their micro-batch as the update computes it and once through each
row alone by the model's own forward. What is compared is the gradient of all parameters of one layer, another one each
time. The gradients of the update are put aside meanwhile.

Legend: C kinds of scores, T tree tokens, K scores of a path.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_tree.engine.canary.paths import DrawnRow, path_alone
from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.routes.router_replay import MiniBatchRoutes
from verl_tree.engine.rows.columns import gather, jagged
from verl_tree.engine.rows.micro_batch import MicroBatchRows, device_of_rank
from verl_tree.functional.rounding import Difference, moved_embeddings
from verl_tree.relay.run import NumCalls
from verl_tree.tree.nodes import IntArray

MAX_ROWS = 4
"""Rows whose scores are added up: those that stand next to the drawn one, so that they share most."""


def neighbours(drawn: DrawnRow, *, shift: int, max_len: int) -> list[DrawnRow]:
    """Return the rows around a drawn one, itself among them, in the order of the tree: `max_len` tokens at most."""
    num_leaves = drawn.micro.layout.num_leaves
    first = max(0, min(drawn.leaf - MAX_ROWS // 2, num_leaves - MAX_ROWS))
    leaves = range(first, min(first + MAX_ROWS, num_leaves))
    return [DrawnRow.of_leaf(drawn.micro, leaf, shift=shift, max_len=max_len) for leaf in leaves]


def compare_gradient(
    engine: ModelCalls,
    drawn: Sequence[DrawnRow],
    data: TensorDict,
    *,
    routes: MiniBatchRoutes | None,
    number: int,
    idle: Callable[[], Tensor],
) -> tuple[str, Difference]:
    """Return a layer's name and how far its two gradients are apart, in shares of its norm; the same on all ranks.

    Every rank calls it, with rows of one micro-batch, or with none if it has none; `number` chooses the layer, of a
    pipeline one of each stage.
    """
    made = _RowsOfTree(engine, drawn, data, routes=routes) if drawn else None
    layers = _layers(engine.model)
    layer = [*layers][number % len(layers)]  # the embeddings first, whose gradient went through all layers
    num_calls = gather((made.num_calls if made else NumCalls(0, 0), len(made.drawn) if made else 0))
    of_tree = NumCalls(*(max(calls[kind] for calls, _ in num_calls) for kind in (0, 1)))
    num_alone = max(alone for _, alone in num_calls)

    def gradient(first: list[Callable[[], Tensor]], last: list[Callable[[], Tensor]], length: NumCalls) -> list[Tensor]:
        first, last = (
            engine.with_idle(calls, idle, num_calls=num) for calls, num in zip((first, last), length, strict=True)
        )
        engine.clear_gradients()
        if engine.has_schedule:
            engine.run(first, last, is_last=True)
        else:
            for number, call in enumerate(last):
                # Added up over the ranks each time: gradients that wait are as large as all parameters.
                engine.run([] if number else first, [call], is_last=True)
        return [_local_gradient(parameter, engine.gradient_of(parameter)) for parameter in layers[layer]]

    with engine.gradients_aside():
        by_tree = gradient(*(made.of_tree() if made else ([], [])), of_tree)
        alone = made.alone() if made else []
        with engine.flat():
            by_rows = gradient([], alone, NumCalls(0, num_alone))
            with moved_embeddings(engine.embeddings, dtype=engine.compute_dtype):
                moved = gradient([], alone, NumCalls(0, num_alone))
    squares = torch.zeros(3, device=device_of_rank())
    for tree, rows, other in zip(by_tree, by_rows, moved, strict=True):
        squares += torch.stack([each.float().square().sum() for each in (tree - rows, other - rows, rows)])
    dist.all_reduce(squares)
    apart, unit, norm = squares.sqrt().tolist()
    return engine.layer_name(layer), Difference.of_norms(apart, unit, norm, dtype=engine.compute_dtype)


class _RowsOfTree:
    """Some rows of one micro-batch, and the two ways to their scores."""

    def __init__(
        self, engine: ModelCalls, drawn: Sequence[DrawnRow], data: TensorDict, *, routes: MiniBatchRoutes | None
    ) -> None:
        self._engine, self._routes, self.drawn = engine, routes, drawn
        micro, shift = drawn[0].micro, engine.head.shift
        self.num_calls = micro.num_calls("rows")
        names = engine.head.names_of(calculate_entropy=False)
        self._rows = MicroBatchRows(micro, data, names=names, shift=shift)

    def of_tree(self) -> tuple[list[Callable[[], Tensor]], list[Callable[[], Tensor]]]:
        """Return the calls of the micro-batch, without gradient and with it."""
        micro = self._rows.micro
        around = None if self._routes is None else partial(self._routes.around, micro=micro, is_counted=False)
        run = self._engine.relay(self._rows, mode="rows", calculate_entropy=False, around=around)
        last = [partial(run.last, number, self._sum) for number in range(run.num_last)]
        return [partial(run.first, number) for number in range(run.num_first)], last

    def alone(self) -> list[Callable[[], Tensor]]:
        """Return the calls of the rows alone."""
        return [partial(self._sum_alone, each) for each in self.drawn]

    def _sum_alone(self, drawn: DrawnRow) -> Tensor:
        scores_CK = path_alone(self._engine, drawn, self._rows, routes=self._routes)()
        if not self._engine.makes_scores:
            return scores_CK
        scored_K = torch.from_numpy(drawn.token_Q[drawn.scored_K]).to(scores_CK.device)
        scores_CT = scores_CK.new_zeros(len(scores_CK), drawn.micro.layout.num_tokens)
        return self._sum(scores_CT.index_copy(1, scored_K, scores_CK), np.array([drawn.leaf]))

    def _sum(self, scores_CT: Tensor, leaves: IntArray) -> Tensor:
        """Add up the scores of those of the leaves that are compared, as the loss would read them."""
        _, outputs = self._rows.select(scores_CT, leaves)
        values, offsets = jagged(outputs[self._engine.head.names[0]])
        starts = dict(zip(leaves.tolist(), offsets.tolist(), strict=False))
        places = [
            starts[each.leaf] + each.scored_K + self._engine.head.shift for each in self.drawn if each.leaf in starts
        ]
        read_K = torch.from_numpy(np.concatenate([np.empty(0, dtype=np.int64), *places])).to(values.device)
        return values[read_K].sum()


def _layers(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Return the trained parameters of each layer in the model's order, by the layer's name: `model.layers.3`."""
    layers: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = re.match(r"(.*?\.\d+)\.", name)
            layers.setdefault(found[1] if found else name, []).append(parameter)
    return layers


def _local_gradient(parameter: torch.nn.Parameter, grad: Tensor | None) -> Tensor:
    """Copy this rank's part of a gradient to its device; 0 where there is none."""
    grad = torch.zeros_like(parameter) if grad is None else grad
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    return local.detach().to(device_of_rank(), copy=True)
