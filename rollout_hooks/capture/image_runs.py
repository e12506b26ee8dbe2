"""Where a row has images, and which: what its token ids do not say.

The tokens of an image are equal, whatever it shows. So who compares rows compares *keys*: the ids, and in the place of
each image token a number made of the image's pixels and grid, which no token has. The worker that writes a row has its
pixels; it notes the runs of image tokens in the row's `extra_fields`, and the driver never reads pixels.

The number has 31 bits. Two images of one prompt get the same one by chance once in two billion pairs; the driver then
counts them as one. Engines compare whole images.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image
from verl.utils.tokenizer import get_processor_token_id

from rollout_hooks.capture.leaf_shapes import FIRST_IMAGE_KEY

IMAGES_FIELD = "image_runs"
"""Key in a row's `extra_fields`: [(start, end, number)] of its images, ascending, half-open; not there without one."""

ImageRun = tuple[int, int, int]

THUMBNAILS_FIELD = "image_thumbnails"
"""Column of a row: its images as small JPEG files, by their numbers; for pages of stored trees."""

_THUMBNAIL_SIZE = (128, 128)


def image_runs(token_ids: ArrayLike, inputs: Mapping[str, Any], *, processor: Any) -> list[ImageRun]:
    """Find the images of a row from its token ids and verl's `multi_modal_inputs`.

    `processor` is the model's: it knows the image token, and how many patches become one token (`merge_size` squared).

    Raises:
        ValueError: The row has another number of image tokens than its images make.
    """
    grids = inputs.get("image_grid_thw")
    if grids is None:
        return []
    merged = processor.image_processor.merge_size**2
    num_patches = grids.prod(-1).tolist()
    places = np.flatnonzero(np.asarray(token_ids) == get_processor_token_id(processor, "image"))
    if len(places) != sum(num_patches) // merged:
        raise ValueError(
            f"a row has {len(places)} image tokens, and its {len(num_patches)} images make "
            f"{sum(num_patches) // merged}: an image was cut, so raise data.max_response_length or send smaller images"
        )
    ends = np.cumsum(num_patches) // merged
    starts = ends - np.array(num_patches) // merged
    pixels = inputs["pixel_values"].split(num_patches)
    return [
        (int(places[start]), int(places[end - 1]) + 1, _number(pixels_AX, grid))
        for start, end, pixels_AX, grid in zip(starts, ends, pixels, grids.tolist(), strict=True)
    ]


def thumbnail(image: Image.Image) -> bytes:
    """Return an image as a JPEG file of at most 128 x 128 pixels, of a few KB."""
    small = image.convert("RGB")
    small.thumbnail(_THUMBNAIL_SIZE)
    file = io.BytesIO()
    small.save(file, "JPEG")
    return file.getvalue()


def _number(pixels_AX: Any, grid: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(grid).encode(), digest_size=4)
    digest.update(pixels_AX.contiguous().numpy().data)
    return FIRST_IMAGE_KEY | int.from_bytes(digest.digest())


def tree_keys(token_ids: ArrayLike, extra_fields: Mapping[str, Any]) -> np.ndarray:
    """Return the keys of a row, (L,) int64: rows share a prefix if they share its keys."""
    keys = np.array(token_ids, dtype=np.int64)
    for start, end, number in extra_fields.get(IMAGES_FIELD, ()):
        keys[start:end] = number
    return keys
