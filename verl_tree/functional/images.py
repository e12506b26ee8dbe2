"""Images in a forest: what makes two prefixes equal, and how each distinct image goes through the tower once per call.

A vision-language model reads an image through its vision tower, which makes a run of features. They take the place of
the embeddings of as many equal image tokens. So the token ids say where an image stands, but not which. An image token
has the *number* of its feature, counted over the distinct images, and a forest of rows with images is built from ids
and numbers (`verl_tree.tree.row_keys`). So rows share an image exactly if they share all before it and the image has
the same pixels and the same grid.

Positions come from the rows, because those after an image depend on its grid. The tower gets the distinct images of a
model call, and its features are gathered to the image tokens of the call. The gather's backward sums over the places of
an image. Source: transformers 5.10.4, models qwen2_5_vl and qwen3_vl; verl 0.9.1, models/transformers.

Legend: F flat tokens, T tokens of a pack, Q tokens of a model call, I images, A patches of X numbers, C components of a
position, E image tokens of a call.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl_tree.families import IMAGE_TYPES
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.transfer import to_device

NUM_POSITION_COMPONENTS = 4
"""Text, time, height, width."""


def reads_images(config: PretrainedConfig) -> bool:
    """Return whether images of a model are served."""
    return config.model_type in IMAGE_TYPES


@dataclass(frozen=True, slots=True, eq=False)
class Image:
    """An image as the processor of a model hands it over, on the host."""

    pixels_AX: Tensor
    grid: tuple[int, int, int]  # Patches in time, height and width; A is their product

    def digest(self) -> bytes:
        """Return a hash of the grid and the pixels."""
        described = repr((self.grid, self.pixels_AX.dtype, tuple(self.pixels_AX.shape))).encode()
        pixels = self.pixels_AX.contiguous().view(torch.uint8).numpy()
        return hashlib.blake2b(pixels.data, key=hashlib.sha256(described).digest(), digest_size=16).digest()


@dataclass(frozen=True, slots=True, eq=False)
class RowsWithImages:
    """The images of rows of tokens.

    Example: the image token is 9, and both images have two features. The rows [5 9 9 6] with image A, [5 9 9 6] with
    image B and [5 9 9 7] with image A have the numbers [0 1 2 0], [0 3 4 0] and [0 1 2 0].
    """

    number_F: IntArray  # 1 and more: the feature of each image token among those of all images. 0 of other tokens
    images: tuple[Image, ...]  # The distinct ones, in order of first appearance
    feature_bounds: IntArray  # (I + 1,) int64, where the features of each image start among those of all

    @classmethod
    def of_rows(
        cls, token_ids_F: IntArray, *, offsets: IntArray, images: Sequence[Sequence[Image]], config: PretrainedConfig
    ) -> Self:
        """Give features numbers; `offsets` (B + 1,) bounds the rows, and `images` are those of each row in order.

        Raises:
            ValueError: A row has another number of image tokens than its images have features, or video tokens.
        """
        settings = config.to_dict()
        image_token_id = settings["image_token_id"]
        merged = settings["vision_config"]["spatial_merge_size"] ** 2
        number_F = np.zeros(len(token_ids_F), dtype=np.int64)
        _refuse_videos(token_ids_F, video_token_id=settings["video_token_id"], offsets=offsets)
        numbers: dict[bytes, int] = {}
        distinct: list[Image] = []
        bounds = [0]
        for row, (start, end, row_images) in enumerate(zip(offsets[:-1], offsets[1:], images, strict=True)):
            features: list[IntArray] = []
            for image in row_images:
                number = numbers.setdefault(image.digest(), len(distinct))
                if number == len(distinct):
                    distinct.append(image)
                    bounds.append(bounds[-1] + int(np.prod(image.grid)) // merged)
                features.append(np.arange(bounds[number], bounds[number + 1]))
            places = start + np.flatnonzero(token_ids_F[start:end] == image_token_id)
            feature = np.concatenate([np.arange(0), *features])
            if len(places) != len(feature):
                raise ValueError(
                    f"row {row} has {len(places)} image tokens (id {image_token_id}), and its {len(row_images)} images "
                    f"have {len(feature)} features: a row holds whole images and brings the pixels of each "
                    "(multi_modal_inputs); raise the lengths that cut it, or leave it out"
                )
            number_F[places] = feature + 1
        return cls(number_F, tuple(distinct), np.array(bounds, dtype=np.int64))

    def of_pack(self, layout: TreeLayout, place_F: Tensor, *, position_CF: Tensor) -> "PackImages":
        """Return what the model reads of a pack besides its token ids.

        `layout` is on the host. `place_F` are the places of its flat tokens, in the order of its leaves, among those of
        all rows, and `position_CF` the positions of all rows.

        Raises:
            ValueError: Rows give a token that they share different positions.
        """
        feature_T = torch.zeros(layout.num_tokens, dtype=torch.int64)
        feature_T[layout.tree_index_F] = torch.from_numpy(self.number_F)[place_F] - 1
        position_CF = position_CF[:, place_F].long()
        position_CT = torch.zeros(len(position_CF), layout.num_tokens, dtype=torch.int64)
        position_CT[:, layout.tree_index_F] = position_CF
        if not torch.equal(position_CT[:, layout.tree_index_F], position_CF):
            raise ValueError(
                "rows that share tokens and images give them different position_ids: a position must follow from what "
                "stands before it, as M-RoPE's does; train these rows with tree.enabled=false"
            )
        return PackImages(self.images, self.feature_bounds, feature_T=feature_T, position_CT=position_CT)


def _refuse_videos(token_ids_F: IntArray, *, video_token_id: int, offsets: IntArray) -> None:
    videos = np.flatnonzero(token_ids_F == video_token_id)
    if len(videos):
        row = int(offsets.searchsorted(videos[0], side="right")) - 1
        raise ValueError(
            f"row {row} has a video token (id {video_token_id}): trees take text and images; train videos with "
            "tree.enabled=false"
        )


@dataclass(frozen=True, slots=True, eq=False)
class PackImages:
    """What a vision-language model reads of a pack besides its token ids, on the host."""

    images: tuple[Image, ...]  # May be more than those of the pack
    feature_bounds: IntArray  # (I + 1,) int64
    feature_T: (
        Tensor  # (T,) int64, the feature that each image token takes among those of all images; -1 of other tokens
    )
    position_CT: Tensor  # (C, T) int64

    @classmethod
    def of_text(cls, layout: TreeLayout) -> Self:
        """Return that of a pack without images: the depth in the tree is the position in every component."""
        host = layout.on_host
        return cls(
            images=(),
            feature_bounds=np.zeros(1, dtype=np.int64),
            feature_T=torch.full_like(host.token_ids_T, -1),
            position_CT=host.position_T.expand(NUM_POSITION_COMPONENTS, -1),
        )

    def of_call(self, token_Q: Tensor) -> "CallImages":
        """Return what the model reads in a call that computes some tokens of the pack."""
        feature_E, number_E = self._shown(token_Q)
        numbers, place_E = np.unique(number_E, return_inverse=True)
        starts, ends = self.feature_bounds[numbers], self.feature_bounds[numbers + 1]
        of_call = np.cumsum(ends - starts) - (ends - starts)  # where each image starts among those of the call
        images = [self.images[number] for number in numbers.tolist()]
        return CallImages(
            position_CQ=self.position_CT[:, token_Q],
            pixels_AX=torch.cat([image.pixels_AX for image in images]) if images else None,
            grids_I3=torch.tensor([image.grid for image in images], dtype=torch.int64).reshape(-1, 3),
            feature_E=torch.from_numpy(feature_E - starts[place_E] + of_call[place_E]),
        )

    def num_features(self, token_Q: Tensor) -> int:
        """Count what the tower makes in such a call: the features of its distinct images."""
        _, number_E = self._shown(token_Q)
        return int(np.diff(self.feature_bounds)[np.unique(number_E)].sum())

    def _shown(self, token_Q: Tensor) -> tuple[IntArray, IntArray]:
        """Return the feature and the image of each image token among some tokens, (E,) each."""
        feature_Q = self.feature_T[token_Q]
        feature_E = feature_Q[feature_Q >= 0].numpy()
        return feature_E, self.feature_bounds.searchsorted(feature_E, side="right") - 1


@dataclass(frozen=True, slots=True, eq=False)
class CallImages:
    """What a vision-language model reads in a call besides token ids."""

    position_CQ: Tensor
    pixels_AX: Tensor | None  # Patches of the distinct images; None without an image
    grids_I3: Tensor
    feature_E: Tensor  # (E,) int64, the feature of each image token among those of these images

    def to(self, device: torch.device) -> Self:
        """Return the same with its tensors on a device."""
        pixels = () if self.pixels_AX is None else (self.pixels_AX,)
        position_CQ, grids_I3, feature_E, *pixels = to_device(
            (self.position_CQ, self.grids_I3, self.feature_E, *pixels), device
        )
        return type(self)(position_CQ, pixels[0] if pixels else None, grids_I3, feature_E)

    def model_inputs(self, config: PretrainedConfig) -> dict[str, Tensor]:
        """Return the keyword arguments of a model whose tower `distinct_images` serves."""
        inputs = {"position_ids": self.position_CQ.unsqueeze(1)}
        if self.pixels_AX is None:
            return inputs
        # transformers cuts the features by these grids and puts the parts together again, so one part will do. The
        # tower itself gets the grids of the images.
        merge_size = config.to_dict()["vision_config"]["spatial_merge_size"]
        grid_13 = torch.tensor([[1, merge_size, merge_size * len(self.feature_E)]], device=self.grids_I3.device)
        return inputs | {"pixel_values": self.pixels_AX, "image_grid_thw": grid_13}


def vision_tower(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that makes features of pixels."""
    tower = model.get_encoder("image")
    assert tower is not model, "a model that reads images has a vision tower"
    return tower


@contextmanager
def distinct_images(model: PreTrainedModel, images: CallImages) -> Iterator[None]:
    """Let the vision tower compute the distinct images of a call while active, and hand each token its feature.

    `images` are on the model's device. Without an image verl runs the tower on a blank one, so that FSDP2 finds all
    ranks in the same collectives; verl 0.9.1 reads that output of Qwen2.5-VL as transformers 4 gave it, a tensor.
    VeOmni runs a blank image by itself, without images and once more without videos. Only that call brings a list of
    grids (`vit_metadata`), and it stays as it is.
    """
    tower = vision_tower(model)

    def is_blank(kwargs: dict[str, Any]) -> bool:
        return bool(kwargs.get("vit_metadata", {}).get("grid_thw_list"))

    def before(_tower: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, kwargs if is_blank(kwargs) else kwargs | {"grid_thw": images.grids_I3}

    def after(_tower: torch.nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if is_blank(kwargs):
            return output
        has_levels = "deepstack_features" in output
        if images.pixels_AX is None:
            return output if has_levels else output.pooler_output
        output.pooler_output = output.pooler_output.index_select(0, images.feature_E)
        if has_levels:
            output.deepstack_features = [level.index_select(0, images.feature_E) for level in output.deepstack_features]
        return output

    handles = [tower.register_forward_hook(after, with_kwargs=True)]
    if images.pixels_AX is not None:
        handles.append(tower.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
