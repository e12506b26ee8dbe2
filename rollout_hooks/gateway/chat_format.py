"""Between messages and tokens: chat template one way, text and tool calls the other way.

Text goes out once, for the client to read, and is never encoded back into what is recorded. The history that a client
sends is rendered anew, and the recorder compares the tokens with what it knows. Two rules keep that history what the
model wrote. Nothing of the text is left out but the stop token, which the template writes itself. And a turn with tool
calls that comes back unchanged is rendered from the model's own words, since a template writes calls in its own way
(spaces, order) and no tokeniser could undo that.
"""

from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from rollout_hooks.gateway.errors import ApiError
from rollout_hooks.gateway.turn import Message, ToolCall

_UNFINISHED = "\ufffd"
"""Decoders write it for a token that holds a part of a character."""


class ChatFormat:
    """The chat format of one model.

    Args:
        tokenizer: The model's.
        render: Messages and tools to the tokens of a prompt; verl's `ContinuousTokenBuilder.build_initial_tokens`.
        tool_parser: verl's parser of the model's tool calls (`rollout.multi_turn.format`), None for a model that
            has no tools.
        keeps_raw_calls: Whether a turn with tool calls is rendered from the model's own words. Turn it off for
            templates that accept results only behind messages with `tool_calls`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        render: Callable[..., list[int]],
        tool_parser: ToolParser | None = None,
        keeps_raw_calls: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._render = render
        self.tool_parser = tool_parser
        self.keeps_raw_calls = keeps_raw_calls
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a prompt, the beginning of the model's turn included.

        Raises:
            ApiError: 400, if the chat template refuses the messages.
        """
        try:
            token_ids = self._render(list(messages), tools=list(tools) or None)
        except (TemplateError, ValueError) as error:
            message = f"the model's chat template refuses the messages: {error}"
            raise ApiError(400, message, code="chat_template_error", param="messages") from error
        return [int(token) for token in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, special ones included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def ends_itself(self, token_ids: Sequence[int]) -> bool:
        """Say whether a turn ends with a special token, and not because it may not be longer."""
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
            ToolCall(call.tool_call_id or f"call_{uuid4().hex[:24]}", call.name, call.arguments) for call in calls
        )


def _parser_schema(function: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """Return a function as verl's parsers want it: they look at the names and at the types of its arguments.

    Argument schemas without a plain type (`anyOf`, references) are called objects: the parsers then read JSON.
    """
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
    return "object"


class TextStream:
    """The text of a turn as its tokens come.

    Text that may still change is held back: parts of characters, the possible beginning of a stop string, and a special
    token that may be the end of the turn. A stop string and what follows it are not part of the text.
    """

    def __init__(self, chat_format: ChatFormat, *, stop: Sequence[str] = ()) -> None:
        self._format = chat_format
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        # Text is decoded from `_start`, a little before `_read`, since what a token reads may depend on the one before.
        self._start = self._read = 0
        self._text = ""
        self._num_emitted = 0

    @property
    def text(self) -> str:
        """All text that was handed out."""
        return self._text[: self._num_emitted]

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is certain now."""
        self._token_ids += token_ids
        self._decode_to(self._text_len(), is_end=False)
        longest = max(map(len, self._stop), default=1)
        return self._emit(len(self._text) - longest + 1)

    def finish(self) -> str:
        """Return the rest of the text, as no more tokens come."""
        self._decode_to(self._text_len(), is_end=True)
        return self._emit(len(self._text))

    def _text_len(self) -> int:
        return len(self._token_ids) - self._format.ends_itself(self._token_ids)

    def _decode_to(self, end: int, *, is_end: bool) -> None:
        if end <= self._read:
            return
        known = self._format.decode(self._token_ids[self._start : self._read])
        text = self._format.decode(self._token_ids[self._start : end])
        if text.endswith(_UNFINISHED) and not is_end:
            return
        self._text += text[len(known) :]
        self._start, self._read = self._read, end

    def _emit(self, end: int) -> str:
        stops = [at for at in map(self._text.find, self._stop) if at >= 0]
        end = max(self._num_emitted, min([end, *stops]))
        new, self._num_emitted = self._text[self._num_emitted : end], end
        return new
