"""Recurrent layers in the tree engines: bound for the life of the model (docs/recurrence.md)."""

import torch.distributed as dist
from transformers import PreTrainedModel

from verl_tree.recurrence.bind import RecurrentLayers


def bind_recurrent_layers(model: PreTrainedModel, *, team: dist.ProcessGroup | None) -> None:
    """Let the recurrent layers of a model, if it has any, follow the trees of its calls.

    Raises:
        ValueError: Several ranks compute trees together.
    """
    layers = RecurrentLayers(model)
    if not len(layers):
        return
    if team is not None:
        raise ValueError(
            f"ulysses_sequence_parallel_size={dist.get_world_size(team)}: {type(model).__name__} has recurrent layers, "
            "which need all tokens of a path on one rank; set 1"
        )
    layers.bind()
