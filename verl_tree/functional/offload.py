"""What gradient checkpointing keeps of every layer, in host memory: the layer's input, until its backward pass.

torch's own `save_on_cpu` moves it. Only that input is moved: what a layer keeps when it runs again is used at once, and
the checkpoint itself looks after it. On CUDA host memory is pinned, and the copies run in order with the layers.

verl's own `enable_activation_offloading` (0.9.1, utils/activation_offload.py) does not serve trees. It counts a layer's
forward passes and backward passes, which must be as many, but a relay also runs forward passes alone, and an output
head in chunks runs several times. It replaces transformers' checkpoints by reentrant ones.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from transformers import PreTrainedModel

from verl_tree import clashes

Checkpoint = Callable[..., Any]


def offload_checkpoints(model: PreTrainedModel, *, moved: AbstractContextManager[Any] | None = None) -> None:
    """Keep in host memory what gradient checkpointing keeps, which is enabled before.

    `moved` holds the hooks that move a tensor and bring it back; None: `save_on_cpu`, pinned where there is CUDA. It is
    entered for every layer.

    Raises:
        ValueError: The model does not use gradient checkpointing.
    """
    if not model.is_gradient_checkpointing:
        switches = {clashes.OFFLOAD: "model.enable_activation_offload=true"}
        switches[clashes.NO_CHECKPOINTS] = "model.enable_gradient_checkpointing=false"
        clashes.refuse({clashes.TREES: type(model).__name__, **switches})
    moved = save_on_cpu(pin_memory=torch.cuda.is_available()) if moved is None else moved
    name = "_gradient_checkpointing_func"
    for module in model.modules():
        attributes = vars(module)
        if name in attributes:
            attributes[name] = _offloading(attributes[name], moved)


def _offloading(checkpoint: Checkpoint, moved: AbstractContextManager[Any]) -> Checkpoint:
    """Return a checkpoint function whose saved inputs are moved."""

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with moved:
            return checkpoint(function, *args, **options)

    return run
