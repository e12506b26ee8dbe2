"""Tiny vision-language models, and rows of text and images that share prefixes, for the tests of images on trees."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from verl_tree.attention.hf import register
from verl_tree.functional.images import Image

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
VOCABULARY, IMAGE, VIDEO, START, END = 64, 60, 61, 62, 63
PATCH = 3 * 2 * 4 * 4
"""Numbers of a patch: channels, frames, height, width."""

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 0,
    "bos_token_id": None,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
}
_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}


def vision_model(family: str) -> PreTrainedModel:
    """Make a random float32 model in evaluation mode; that of Qwen3-VL has DeepStack behind both vision blocks."""
    register()
    torch.manual_seed(5)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    if family == "qwen2_5_vl":
        text = _TEXT | {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}}
        vision = _VISION | {"window_size": 16, "fullatt_block_indexes": [1]}
        config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)
        model = Qwen2_5_VLForConditionalGeneration(config)
    else:
        interleaved = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        text = _TEXT | {"head_dim": 8, "rope_parameters": rope | interleaved}
        vision = _VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the default initialisation: attention matters, and positions and pixels change probabilities.
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "bias" in name:
                parameter.normal_(std=0.3)
    return model.eval()


@contextmanager
def all_in_float64() -> Iterator[None]:
    """Let `Tensor.float` and `Tensor.to(torch.float32)` return float64: norms and rotations compute in float32."""
    to_float, to = torch.Tensor.float, torch.Tensor.to
    torch.Tensor.float = torch.Tensor.double

    def widened(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return to(self, *args, **{k: torch.float64 if each is torch.float32 else each for k, each in kwargs.items()})

    torch.Tensor.to = widened
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to = to_float, to


@dataclass(frozen=True)
class Row:
    """A row of token ids, and its images in order."""

    ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()

    def __add__(self, other: "Row") -> "Row":
        """Return this row continued by another."""
        return Row(self.ids + other.ids, self.images + other.images)


def span(image: Image) -> Row:
    """Return the tokens of an image with its marks."""
    return Row((START, *[IMAGE] * (int(np.prod(image.grid)) // 4), END), (image,))


def draw_image(rng: np.random.Generator, height: int, width: int) -> Image:
    """Draw an image of so many patches, both even."""
    return Image(torch.from_numpy(rng.standard_normal((height * width, PATCH))).float(), (1, height, width))


def draw_text(rng: np.random.Generator, low: int, high: int) -> Row:
    """Draw some ordinary tokens."""
    return Row(tuple(rng.integers(1, IMAGE, size=rng.integers(low, high + 1)).tolist()))


def branching_rows(seed: int) -> list[Row]:
    """Draw 16 rows, and three without images among them.

    An image stands in a shared prompt; a second behind a shared turn; the first again, deeper; a third, of equal size,
    behind the same token ids; two in one prompt.
    """
    rng = np.random.default_rng(seed)

    def text(low: int, high: int) -> Row:
        return draw_text(rng, low, high)

    first, second, twin, tall = (draw_image(rng, *size) for size in ((4, 4), (4, 8), (4, 4), (8, 4)))
    head, tail = text(2, 4), text(3, 5)
    prompt, other = head + span(first) + tail, head + span(twin) + tail
    rows: list[Row] = []
    for _ in range(2):
        turn = prompt + text(2, 4)
        rows += [turn + text(1, 5) for _ in range(2)]
        seen = turn + span(second) + text(1, 2)
        rows += [seen + text(1, 4) for _ in range(2)]
    rows += [other + text(2, 4) for _ in range(2)]
    rows += [other + text(1, 3) + span(first) + text(1, 2)]
    plain = text(4, 6)
    rows += [plain + text(2, 3) for _ in range(2)]
    pair = text(2, 3) + span(first) + text(1, 1) + span(tall) + text(2, 2)
    return rows + [pair + text(1, 4) for _ in range(3)]


def random_rows(seed: int, *, num_rows: int = 8) -> list[Row]:
    """Draw rows that fork from, extend, repeat or cut short earlier ones, or start anew; images are never cut."""
    rng = np.random.default_rng(seed)
    sizes = ((2, 2), (4, 4), (4, 8), (4, 4), (2, 4))
    images = [draw_image(rng, *size) for size in sizes]

    def pieces() -> list[Row]:
        drawn: list[Row] = []
        for _ in range(rng.integers(1, 4)):
            drawn += [Row((token,)) for token in draw_text(rng, 1, 4).ids]
            if rng.random() < 0.5:
                drawn.append(span(images[rng.integers(len(images))]))
        return drawn

    rows = [[Row((int(rng.integers(1, IMAGE)),)), *pieces()]]
    for _ in range(num_rows - 1):
        start = rows[rng.integers(len(rows))]
        kept = start[: rng.integers(0 if rng.random() < 0.15 else 1, len(start) + 1)]
        row = kept + (pieces() if rng.random() < 0.8 or not kept else [])
        rows.append(row)
    return [sum(row, Row()) for row in rows]


def positions_of(model: PreTrainedModel, row: Row) -> torch.Tensor:
    """Return the (4, L) positions of a row as verl stores them: 0, 1, 2, ..., and those of M-RoPE."""
    ids = torch.tensor([row.ids])
    of_text = torch.arange(len(row.ids)).unsqueeze(0)
    if not row.images:
        return of_text.repeat(4, 1)
    grids = torch.tensor([image.grid for image in row.images])
    of_model, _ = model.model.get_rope_index(ids, (ids == IMAGE).int(), image_grid_thw=grids)
    return torch.cat([of_text, of_model[:, 0]])


def flat_inputs(model: PreTrainedModel, row: Row) -> dict[str, torch.Tensor]:
    """Return what the model reads of a row alone."""
    inputs = {"input_ids": torch.tensor([row.ids]), "position_ids": positions_of(model, row).unsqueeze(1)}
    if row.images:
        inputs["pixel_values"] = torch.cat([image.pixels_AX for image in row.images])
        inputs["image_grid_thw"] = torch.tensor([image.grid for image in row.images])
    return inputs


def laid_out(rows: list[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Return the token ids of rows one after another, and the bounds of the rows."""
    offsets = np.cumsum([0, *(len(row.ids) for row in rows)])
    return np.concatenate([row.ids for row in rows]), offsets


def split(values: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    """Cut values of rows at their bounds."""
    return [values[start:end] for start, end in pairwise(offsets.tolist())]
