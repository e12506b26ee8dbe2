"""The images of verl's rows.

verl's agent loops write to each row what the model's processor made of its images: `pixel_values`, `image_grid_thw`,
and `images_seqlens` for counting FLOPs (`AgentLoopWorker._compute_multi_modal_inputs`, verl 0.9.1). Rows without images
carry an empty mapping, or None.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict
from transformers import PretrainedConfig
from verl.utils import tensordict_utils as tu

from verl_tree.config import TREE_STRATEGY
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.packs import TreeBatch, TreeMicroBatch
from verl_tree.engine.rows.positions import positions_of
from verl_tree.functional.images import NUM_POSITION_COMPONENTS, Image, RowsWithImages, reads_images

_KEYS = {"pixel_values", "image_grid_thw", "images_seqlens"}


def rows_with_images(data: TensorDict, *, config: PretrainedConfig) -> RowsWithImages | None:
    """Return the rows of a mini-batch with their images; None for a model that reads none.

    Raises:
        ValueError: A row has other media than images, or does not hold its images whole.
    """
    if not reads_images(config):
        return None
    token_ids, offsets = (each.cpu().numpy() for each in jagged(data["input_ids"]))
    media = tu.get(data, "multi_modal_inputs", None)
    images = [_images_of(media[row] if media is not None else None, row=row) for row in range(len(data))]
    return RowsWithImages.of_rows(token_ids, offsets=offsets, images=images, config=config)


def _images_of(inputs: Any, *, row: int) -> list[Image]:
    """Return the images of one row."""
    inputs = inputs.data if isinstance(inputs, NonTensorData) else inputs
    given: Mapping[str, Any] = {name: value for name, value in (inputs or {}).items() if value is not None}
    others = sorted(given.keys() - _KEYS)
    if others:
        raise ValueError(
            f"row {row} has {', '.join(others)} in multi_modal_inputs: {TREE_STRATEGY} takes text and images; train "
            "rows with video or audio with tree.enabled=false"
        )
    if "image_grid_thw" not in given:
        return []
    grids_I3 = given["image_grid_thw"].cpu()
    pixels = given["pixel_values"].cpu().split(grids_I3.prod(-1).tolist())
    return [Image(each, (grid[0], grid[1], grid[2])) for each, grid in zip(pixels, grids_I3.tolist(), strict=True)]


def with_images(batch: TreeBatch, rows: RowsWithImages, data: TensorDict, *, cost_model: CostModel) -> TreeBatch:
    """Return micro-batches with the images of `rows`, their positions and the tower's work.

    Raises:
        ValueError: Rows give a token that they share different positions.
    """
    position_CF = positions_of(data["position_ids"]).cpu()
    position_CF = position_CF.expand(NUM_POSITION_COMPONENTS, -1) if len(position_CF) == 1 else position_CF

    def settled(micro: TreeMicroBatch) -> TreeMicroBatch:
        images = rows.of_pack(micro.layout, micro.flat_index_F, position_CF=position_CF)
        every = torch.arange(micro.layout.num_tokens)
        num_features = sum(images.num_features(every[part.start : part.end]) for part in micro.cut.sections)
        work = dataclasses.replace(micro.work, num_features=num_features)
        return dataclasses.replace(micro, images=images, work=work)

    micro_batches = sorted(map(settled, batch.micro_batches), key=lambda micro: -cost_model.predict(micro.work))
    return dataclasses.replace(batch, micro_batches=tuple(micro_batches))
