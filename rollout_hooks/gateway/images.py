"""Images in requests: data URLs with PNG or JPEG files, read as a data set of verl reads its images.

Nothing is fetched. A remote URL is refused, so what an agent sends is what the model saw, and the gateway opens no
connection that a client chose.
"""

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.turn import Message, TurnRequest

_DATA_URL = re.compile(r"data:image/(png|jpe?g);base64,", re.IGNORECASE)
_SHOWN_LEN = 40  # characters of a URL in a message


def has_unread_images(messages: Sequence[Message]) -> bool:
    """Return whether messages show images that are still URLs."""
    return any(isinstance(block.get("image"), str) for message in messages for block in _blocks(message))


def read_images(request: TurnRequest, *, max_images: int, max_pixels: int) -> TurnRequest:
    """Return a request whose images are PIL images; those of an earlier response are so already.

    Raises:
        ApiError: 400, if there are too many images, or one is no PNG or JPEG in a data URL, is broken or too large.
    """
    num_images = sum("image" in block for message in request.messages for block in _blocks(message))
    if num_images > max_images:
        raise _refusal(f"the messages show {num_images} images, and {max_images} are the most; send fewer")
    messages = [
        {**message, "content": [_read_block(block, max_pixels=max_pixels) for block in blocks]}
        if (blocks := _blocks(message))
        else message
        for message in request.messages
    ]
    return replace(request, messages=messages)


def _blocks(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return content if isinstance(content, list) else []


def _read_block(block: dict[str, Any], *, max_pixels: int) -> dict[str, Any]:
    url = block.get("image")
    return {**block, "image": _read(url, max_pixels=max_pixels)} if isinstance(url, str) else block


def _read(url: str, *, max_pixels: int) -> Image.Image:
    shown = url if len(url) <= _SHOWN_LEN else url[:_SHOWN_LEN] + "..."
    head = _DATA_URL.match(url)
    if head is None:
        remedy = "send the image itself, as data:image/png;base64,... or data:image/jpeg;base64,..."
        raise _refusal(f"image {shown!r}: nothing is fetched, and other formats are not read; {remedy}")
    try:
        # A view: the file may be megabytes.
        file = base64.b64decode(memoryview(url.encode())[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refusal(f"image {shown!r}: this is no base64 ({error})") from error
    try:
        image = Image.open(io.BytesIO(file), formats=("PNG", "JPEG"))
        if image.width * image.height > max_pixels:
            size = f"{image.width} x {image.height}"
            raise _refusal(f"image {shown!r} has {size} pixels, and {max_pixels} are the most; send a smaller one")
        image.load()
    # PIL reports a broken PNG as a SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise _refusal(f"image {shown!r}: this is no whole PNG or JPEG file ({error})") from error
    return _on_white(image)


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    ground = Image.new("RGB", image.size, "white")
    ground.paste(layer, mask=layer.getchannel("A"))
    return ground


def _refusal(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_image", param="messages")
