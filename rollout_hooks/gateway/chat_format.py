"""Messages to tokens by the chat template, and tokens to text and tool calls.

Text goes out for the client to read and is never encoded back into what is recorded. The history that a client sends is
rendered anew, and the recorder compares its tokens with what it knows. Two rules make them match. The text leaves out
nothing but the stop token, which the template writes itself. And a turn with tool calls that comes back unchanged is
rendered from the model's own words: a template writes calls in its own way (spaces, order).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from uuid import uuid4

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.session_images import check_num_images, image_spans, message_images
from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.turn import Message, ToolCall

_UNFINISHED = "\ufffd"
"""What decoders write for a token that holds a part of a character."""

_MAX_UNFINISHED_TOKENS = 16
"""Tokens that are decoded again and again while their text ends within a character. More of them are hardly text."""

_CHARACTER_LEN = 4
"""The most bytes of a character, and so the most tokens."""


class ChatFormat:
    """The chat format of one model.

    Args:
        tokenizer: The model's tokenizer.
        render: Maps messages and tools to prompt tokens; verl's `ContinuousTokenBuilder.build_initial_tokens`.
        tool_parser: verl's parser of the model's tool calls (`rollout.multi_turn.format`); None if it has no tools.
        keeps_raw_calls: Whether a turn with tool calls is rendered from the model's own words. Turn it off for
            templates that accept results only behind messages with `tool_calls`.
        image_token: Id of the tokens of an image, for a model whose `render` takes `images`; None if it reads none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        render: Callable[..., list[int]],
        tool_parser: ToolParser | None = None,
        keeps_raw_calls: bool = True,
        image_token: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self.tool_parser = tool_parser
        self.keeps_raw_calls = keeps_raw_calls
        self._image_token = image_token
        self.longest_token = _longest_token(tokenizer)
        special = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special_ids = frozenset(special)
        self._special_texts = tuple(special.values())

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Render a prompt, up to the model's turn.

        Raises:
            ApiError: 400, if the chat template refuses the messages, or they show images and the model reads none.
        """
        images = message_images(messages)
        if images and self._image_token is None:
            raise ApiError(400, "this model reads text: send no images", code="no_images", param="messages")
        media = {"images": images} if images else {}
        try:
            token_ids = self._render(list(messages), tools=list(tools) or None, **media)
            # A text may spell the token of an image.
            check_num_images(image_spans(np.asarray(token_ids), self._image_token), images)
        except Exception as error:  # a template is a program of the model's: what it raises may be anything
            # TemplateError is for what a template says itself; any other is known by its type: `'x'` may be a KeyError.
            cause = error if isinstance(error, TemplateError | ValueError) else describe_error(error)
            message = f"the model's chat template refuses the messages: {cause}"
            raise ApiError(400, message, code="chat_template_error", param="messages") from error
        return [int(token) for token in token_ids]

    def special_in(self, text: str) -> str | None:
        """Return a special token that a text spells, or None. The tokenizer would make the token of it."""
        return next((token for token in self._special_texts if token in text), None)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def ends_itself(self, token_ids: Sequence[int]) -> bool:
        """Say whether a turn ends with a special token. A turn that was cut at its limit does not."""
        return bool(token_ids) and token_ids[-1] in self._special_ids

    def without_stop_token(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens of a turn without the special token that ends it."""
        return list(token_ids[: len(token_ids) - self.ends_itself(token_ids)])

    async def parse_calls(
        self, token_ids: Sequence[int], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text beside the tool calls of a turn, and the calls."""
        assert self.tool_parser is not None
        schemas = [_parser_schema(tool["function"]) for tool in tools]
        content, calls = await self.tool_parser.extract_tool_calls(list(token_ids), schemas)
        if self.ends_itself(token_ids):
            content = content.removesuffix(self.decode(token_ids[-1:]))
        return content, tuple(
            ToolCall(call.tool_call_id or f"call_{uuid4().hex[:24]}", _whole(call.name), _whole(call.arguments))
            for call in calls
        )


def _whole(text: str) -> str:
    # A model may write half a character as an escape of JSON, which cannot be sent.
    return text.encode(errors="replace").decode()


@lru_cache(maxsize=8)  # each session has a format of its own, and this takes a tenth of a second
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most characters that one token stands for. Byte-level vocabularies write a character for each byte."""
    return max(map(len, tokenizer.get_vocab()))


def _parser_schema(function: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """Return a function's schema for verl's parsers, which read only the names and types of arguments."""
    given = function["parameters"].get("properties")
    properties = {name: {"type": _argument_type(schema)} for name, schema in dict(given or {}).items()}
    required = [name for name in function["parameters"].get("required") or [] if name in properties]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": function["name"], "description": function["description"], "parameters": schema}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def _argument_type(schema: Any) -> str | list[str]:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str) or (isinstance(kind, list) and all(isinstance(each, str) for each in kind)):
        return kind
    return "object"  # e.g. `anyOf` or a reference: the parsers read JSON for an object


class TextStream:
    """The text of a turn as its tokens come.

    Text that may still change is held back: parts of characters, the possible beginning of a stop string, and a special
    token that may end the turn. A stop string and what follows it are not part of the text.
    """

    def __init__(self, chat_format: ChatFormat, *, stop: Sequence[str] = ()) -> None:
        self._format = chat_format
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Tokens are decoded from `_start` on, and `_num_known` characters of that have been taken. The start is
        # a little before `_whole`, the last end of a character: a token's text may depend on the token before it.
        self._start = self._whole = self._read = self._num_known = 0
        self._emitted: list[str] = []
        # Stop strings are searched for here only: none begins in what was handed out.
        self._held = ""
        self._has_stopped = False

    @property
    def text(self) -> str:
        """All text that was handed out."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is certain now."""
        self._token_ids += token_ids
        self._decode_to(self._text_len(), is_end=False)
        longest = max(map(len, self._stop), default=1)
        return self._emit(len(self._held) - longest + 1)

    def finish(self) -> str:
        """Return the rest of the text, as no more tokens come."""
        self._decode_to(self._text_len(), is_end=True)
        return self._emit(len(self._held))

    def _text_len(self) -> int:
        return len(self._token_ids) - self._format.ends_itself(self._token_ids)

    def _decode_to(self, end: int, *, is_end: bool) -> None:
        if end <= self._read and not is_end:
            return
        text = self._format.decode(self._token_ids[self._start : end])
        num_open = 0 if is_end else len(text) - len(text.rstrip(_UNFINISHED))
        is_waiting = num_open > 0 and end - self._start <= _MAX_UNFINISHED_TOKENS
        if not is_waiting:
            num_open = min(num_open, 1)  # only the last mark can be of a character that goes on
        certain = len(text) - num_open
        self._held += text[self._num_known : certain]
        self._read = end
        if is_waiting:
            self._num_known = max(self._num_known, certain)
            return
        if num_open:
            self._start = self._whole = max(self._start, end - _CHARACTER_LEN)
        else:
            self._start, self._whole = self._whole, end
        self._num_known = len(self._format.decode(self._token_ids[self._start : end])) - num_open

    def _emit(self, end: int) -> str:
        """Hand out the held text up to `end`, or to the stop string that begins before it."""
        if self._has_stopped:
            return ""
        end = max(0, end)
        first_stop = min((at for at in map(self._held.find, self._stop) if at >= 0), default=end)
        self._has_stopped = first_stop < end
        new, self._held = self._held[: min(end, first_stop)], self._held[min(end, first_stop) :]
        self._emitted.append(new)
        return new
