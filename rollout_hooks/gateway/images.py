"""Images in requests: data URLs with PNG or JPEG files, read as a data set of verl reads its images.

Nothing is fetched. A remote URL is refused, so what an agent sends is what the model saw, and the gateway opens no
connection that a client chose.
"""

import base64
import binascii
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from PIL import Image

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.limits import GatewayLimits
from rollout_hooks.gateway.turn import Message, TurnRequest

_DATA_URL = re.compile(r"data:image/(png|jpe?g);base64,", re.IGNORECASE)
_SHOWN_LEN = 40  # characters of a URL in a message


def has_unread_images(messages: Sequence[Message]) -> bool:
    """Return whether messages show images that are still URLs."""
    return any(isinstance(block.get("image"), str) for message in messages for block in _blocks(message))


def read_images(request: TurnRequest, *, limits: GatewayLimits) -> TurnRequest:
    """Return a request whose images are PIL images; those of an earlier response are so already.

    Raises:
        ApiError: 400, if there are too many images, or one is no PNG or JPEG in a data URL, is broken or too large.
    """
    given = [block["image"] for message in request.messages for block in _blocks(message) if "image" in block]
    if len(given) > limits.max_images:
        raise _refusal(f"the messages show {len(given)} images, and {limits.max_images} are the most; send fewer")
    # Opening a file reads its size. Its pixels are read when it is known that all of them are few enough.
    opened = [_open(each, max_pixels=limits.max_pixels) if isinstance(each, str) else each for each in given]
    num_pixels = sum(image.width * image.height for image in opened)
    if num_pixels > limits.max_total_pixels:
        limit = limits.max_total_pixels
        raise _refusal(f"the images have {num_pixels} pixels together, and {limit} are the most; send smaller ones")
    images = iter(
        [_load(each, image) if isinstance(each, str) else image for each, image in zip(given, opened, strict=True)]
    )
    messages = [
        {**message, "content": [{**block, "image": next(images)} if "image" in block else block for block in blocks]}
        if (blocks := _blocks(message))
        else message
        for message in request.messages
    ]
    return replace(request, messages=messages)


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _open(url: str, *, max_pixels: int) -> Image.Image:
    head = _DATA_URL.match(url)
    if head is None:
        remedy = "send the image itself, as data:image/png;base64,... or data:image/jpeg;base64,..."
        raise _refusal(f"image {_shown(url)}: nothing is fetched, and other formats are not read; {remedy}")
    try:
        # A view: the file may be megabytes.
        file = base64.b64decode(memoryview(url.encode())[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(f"image {_shown(url)}: this is no base64 ({error})") from error
    with _whole_file(url):
        image = Image.open(io.BytesIO(file), formats=("PNG", "JPEG"))
    if image.width * image.height > max_pixels:
        size = f"{image.width} x {image.height}"
        raise _refusal(f"image {_shown(url)} has {size} pixels, and {max_pixels} are the most; send a smaller one")
    return image


def _load(url: str, image: Image.Image) -> Image.Image:
    with _whole_file(url):
        image.load()
    return _on_white(image)


@contextmanager
def _whole_file(url: str) -> Iterator[None]:
    try:
        yield
    # PIL reports a broken PNG as a SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _refusal(f"image {_shown(url)}: this is no whole PNG or JPEG file ({error})") from error


def _shown(url: str) -> str:
    return repr(url if len(url) <= _SHOWN_LEN else url[:_SHOWN_LEN] + "...")


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGB", image.size, "white")
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_image", param="messages")
