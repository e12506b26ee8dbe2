"""The images of one session, and what stands for their tokens in its tree.

All tokens of an image have one id, whatever it shows. So paths are compared by *keys*: the ids, and for the tokens of
an image a number below 0, one for each distinct image of the session. With the image token 9:

    prompt   5 9 9 6   with image A        keys   5 -1 -1 6
    prompt   5 9 9 6   with image B        keys   5 -2 -2 6      shares only 5
    prompt   5 9 9 7   with image A        keys   5 -1 -1 7      shares 5 -1 -1

Images are equal if their pixels are, as the agent gave them. An image token that the model sampled shows nothing and
keeps its id.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from rollout_hooks.capture.text_compare import Decode
from rollout_hooks.capture.token_arrays import token_array

_FIRST_SURROGATE = 0xD800
"""The first of 2,048 code points that no decoder writes, because they are no characters."""


class SessionImages:
    """The distinct images of a session.

    `image_token` is the id of an image's tokens, and `video_token` that of a video's. None: the model has none.
    """

    def __init__(self, *, image_token: int | None = None, video_token: int | None = None) -> None:
        self.image_token = image_token
        self._placeholders = [token for token in (image_token, video_token) if token is not None]
        self._images: list[Image.Image] = []
        self._numbers: dict[bytes, int] = {}

    def keys_of(
        self, token_ids: Sequence[int], images: Sequence[Image.Image] = (), *, is_read: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the keys (N,) int32 of tokens that show these images, in order.

        `is_read` (N,) bool says which tokens the model read; the others show no image. By default it read all.

        Raises:
            ValueError: The tokens show another number of images, or an image is no PIL image.
        """
        ids = token_array(token_ids)
        spans = image_spans(ids if is_read is None else np.where(is_read, ids, -1), self.image_token)
        check_num_images(spans, images)
        if not spans:
            return ids
        keys = ids.copy()
        for (start, end), image in zip(spans, images, strict=True):
            keys[start:end] = self._key_of(image)
        return keys

    def ids_of(self, keys: np.ndarray) -> np.ndarray:
        """Return the token ids (N,) of keys."""
        return keys if self.image_token is None else np.where(keys < 0, self.image_token, keys)

    def images_of(self, keys: np.ndarray) -> list[Image.Image]:
        """Return the images that tokens with these keys show, in order."""
        return [self._images[-int(keys[start]) - 1] for start, _ in _spans(keys < 0)]

    def shows_unknown(self, keys: np.ndarray) -> bool:
        """Return whether there is a token of an image or a video that nobody has given: the model has sampled it."""
        return bool(np.isin(keys, self._placeholders).any())

    def decoder(self, decode: Decode) -> Decode:
        """Return `decode` for keys: each token of an image reads as a text of its own, which no other token has."""

        def decode_keys(keys: list[int]) -> str:
            places = [place for place, key in enumerate(keys) if key < 0]
            if not places:
                return decode(keys)
            texts = [_text_of(keys[place]) for place in places] + [""]
            bounds = pairwise([-1, *places, len(keys)])
            return "".join(
                decode(keys[before + 1 : place]) + text for (before, place), text in zip(bounds, texts, strict=True)
            )

        return decode_keys

    def _key_of(self, image: Image.Image) -> int:
        if not isinstance(image, Image.Image):
            raise ValueError(f"an image of the type {type(image).__name__}: give a PIL image, as verl's data sets do")
        digest = _digest(image)
        if digest not in self._numbers:
            self._numbers[digest] = len(self._images)
            self._images.append(image)
        return -self._numbers[digest] - 1


def message_images(messages: Sequence[Mapping[str, Any]]) -> list[Image.Image]:
    """Return the images that messages show in blocks of the type `image`, in order."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [block["image"] for content in contents for block in content if block["type"] == "image"]


def image_spans(token_ids: np.ndarray, image_token: int | None) -> list[tuple[int, int]]:
    """Return where images stand among tokens: [(start, end)], half-open.

    Two images have a token between them, the mark of where one begins or ends.
    """
    return [] if image_token is None else _spans(token_ids == image_token)


def check_num_images(spans: Sequence[tuple[int, int]], images: Sequence[Image.Image]) -> None:
    """Raise ValueError if there is not one image for each span."""
    if len(spans) != len(images):
        raise ValueError(
            f"tokens of {len(spans)} images and {len(images)} images: give the images that the messages show, in "
            "order, and a model that reads images; if the model has sampled the image token itself, the path ends here"
        )


def cut_before_image(keys: np.ndarray, num_tokens: int) -> int:
    """Return the most of the first `num_tokens` tokens that end with no part of an image, given all keys."""
    if num_tokens >= len(keys) or keys[num_tokens] >= 0:
        return num_tokens
    (others,) = np.nonzero(keys[:num_tokens] != keys[num_tokens])
    return int(others[-1]) + 1 if others.size else 0


def _spans(is_image: np.ndarray) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(is_image.astype(np.int8), prepend=0, append=0))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _digest(image: Image.Image) -> bytes:
    # An index into a palette says nothing without the palette.
    digest = hashlib.blake2b(repr((image.mode, image.size, image.getpalette())).encode(), digest_size=16)
    digest.update(image.tobytes())
    return digest.digest()


def _text_of(key: int) -> str:
    # The digits as code points that no text has, with one more as the end of the number.
    return "".join(chr(_FIRST_SURROGATE + int(digit)) for digit in str(-key)) + chr(_FIRST_SURROGATE + 10)
