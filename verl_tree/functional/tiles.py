"""MLPs and norms that run tile by tile: some of the tokens at a time, once more in the backward pass.

Both treat every token by itself. For its backward pass an MLP keeps four numbers per token and intermediate dimension,
and a norm a float32 copy of its input. A tiled module keeps its input only. Its backward pass takes one tile after
another forward and backward, and adds up the gradients of the parameters in float32.

The input is kept before the module runs (`_Keep`). So where a gradient checkpoint runs a layer again, it stops there,
because it has everything that the layer keeps, unless a norm comes behind the MLP. The MLP then runs twice in all, as
often as without tiles.

verl's own `TiledMLP` (0.9.1, models/transformers/tiled_mlp.py) loses gradients where the tokens do not make as many
tiles as it was told, changes the classes of transformers, and gives `torch.autograd.grad` nothing. No engine of verl
calls it. transformers' `apply_chunking_to_forward` keeps what every chunk needs for its backward pass.

Legend: T tokens of a model call, X dims of a token (several axes in a norm of heads).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_tree import clashes
from verl_tree.relay.repeatable import Repetition

Forward = Callable[[Tensor], Tensor]

_TILED = Repetition("a tiled module runs twice, which must come out the same", "set model.tiled_mlp.enabled=false")


def tile_modules(model: PreTrainedModel, *, num_tiles: int) -> None:
    """Let the MLPs of a model's layers, and all its norms, run in so many tiles; fewer where there are fewer tokens.

    Layers are known by transformers' base class, MLPs and norms by the ends of their class names. LoRA and FSDP2 may
    come later. The model need not use gradient checkpointing.

    Raises:
        ValueError: `num_tiles` is not positive, or the layers have no MLP. In a forward pass: a module returns more
            than a tensor, or, with gradients, draws random numbers.
    """
    if num_tiles < 1:
        raise ValueError(f"tiled_mlp.num_shards={num_tiles}: give a positive number of tiles")
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    mlps = [child for layer in layers for child in layer.children() if type(child).__name__.endswith("MLP")]
    if not mlps:
        clashes.refuse({clashes.TILES: f"tiled_mlp.num_shards={num_tiles}", clashes.NO_MLP: type(model).__name__})
    norms = [each for each in model.modules() if type(each).__name__.endswith("Norm")]
    for module in (*mlps, *norms):
        module.forward = _tiled(module, module.forward, num_tiles=num_tiles)


def _tiled(module: torch.nn.Module, forward: Forward, *, num_tiles: int) -> Forward:
    """Return a module's forward in tiles."""

    def run(hidden_1TX: Tensor) -> Tensor:
        parameters = _trained(module)
        if not torch.is_grad_enabled() or not (parameters or hidden_1TX.requires_grad):
            return _in_tiles(forward, hidden_1TX, num_tiles=num_tiles)
        _TILED.check(module)
        # With the second argument the result has a node that keeps the input even if the input needs no gradient.
        kept_1TX = _Keep.apply(hidden_1TX, torch.empty(0, requires_grad=True))
        with _TILED.watch(module, device=hidden_1TX.device):
            return _Tiled.apply(kept_1TX, kept_1TX.grad_fn, module, forward, num_tiles, *parameters)

    return run


def _trained(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _tiles(tensor_1TX: Tensor, num_tiles: int) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield the places of each tile and the tile. The tokens are on the second axis, or the first of two."""
    axis = 1 if tensor_1TX.dim() > 2 else 0
    num_tokens = tensor_1TX.shape[axis]
    tile_len = max(1, -(-num_tokens // num_tiles))
    for start in range(0, num_tokens, tile_len):
        place = (slice(None),) * axis + (slice(start, start + tile_len),)
        yield place, tensor_1TX[place]


def _in_tiles(forward: Forward, hidden_1TX: Tensor, *, num_tiles: int) -> Tensor:
    """Run a module on one tile after another, without gradient; no copy of its output but one tile's exists."""
    output: Tensor | None = None
    with torch.no_grad(), _autocast(*_autocast_here(hidden_1TX)):
        for place, tile in _tiles(hidden_1TX, num_tiles):
            part = forward(tile)
            if not isinstance(part, Tensor):
                raise ValueError(
                    f"a tiled module returned a {type(part).__name__}, not a tensor: set model.tiled_mlp.enabled=false"
                )
            if output is None:
                output = part.new_empty((*hidden_1TX.shape[:-1], part.shape[-1]))
            output[place] = part
    assert output is not None, "a model call has tokens"
    return output


Autocast = tuple[str, torch.dtype, bool]
"""A type of device, the dtype of its autocast, and whether it is on."""


def _autocast_here(tensor: Tensor) -> Autocast:
    kind = tensor.device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _autocast(kind: str, dtype: torch.dtype, enabled: bool) -> AbstractContextManager[Any]:
    """Autocast without its cache, where a weight that was cast without gradient would be found with gradients."""
    return torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)


class _Keep(torch.autograd.Function):
    """The identity, which keeps its input."""

    @staticmethod
    def forward(ctx: Any, hidden_1TX: Tensor, _anchor: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_1TX)
        return hidden_1TX.view_as(hidden_1TX)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grad_outputs[0], None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kept_1TX: Tensor,
        keeper: Any,
        module: torch.nn.Module,
        forward: Forward,
        num_tiles: int,
        *_parameters: Tensor,
    ) -> Tensor:
        ctx.keeper, ctx.module, ctx.run, ctx.num_tiles = keeper, module, forward, num_tiles
        ctx.autocast = _autocast_here(kept_1TX)
        return _in_tiles(forward, kept_1TX, num_tiles=num_tiles)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, grad_1TX: Tensor) -> tuple[Tensor | None, ...]:
    (hidden_1TX,) = ctx.keeper.saved_tensors  # where the layer is checkpointed, this runs it again
    # Read anew: FSDP2 has gathered the weights again since the forward pass.
    parameters = _trained(ctx.module)
    sums: list[Tensor | None] = [None] * len(parameters)
    grad_hidden_1TX = torch.empty_like(hidden_1TX)
    for place, tile in _tiles(hidden_1TX, ctx.num_tiles):
        leaf = tile.detach().requires_grad_()
        with torch.enable_grad(), _autocast(*ctx.autocast):
            output = ctx.run(leaf)
        grad_hidden_1TX[place], *parts = torch.autograd.grad(
            output, (leaf, *parameters), grad_1TX[place], allow_unused=True
        )
        for number, part in enumerate(parts):
            if part is not None:
                _add(sums, number, part)
    gradients = (
        None if total is None else total.to(parameter.dtype) for total, parameter in zip(sums, parameters, strict=True)
    )
    return grad_hidden_1TX, None, None, None, None, *gradients


def _add(sums: list[Tensor | None], number: int, part: Tensor) -> None:
    """Add a part to a sum, which is in float32 if the part has less."""
    total = sums[number]
    if total is None:
        sums[number] = part.to(torch.promote_types(part.dtype, torch.float32))
    else:
        total += part
