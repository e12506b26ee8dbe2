"""What the bodies of the APIs share: text, functions, and the form of an answer."""

from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import override

from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.json_values import is_finite
from rollout_hooks.gateway.limits import (
    MAX_FIELDS,
    MAX_METADATA,
    MAX_METADATA_KEY_LEN,
    MAX_METADATA_VALUE_LEN,
    MAX_PARTS,
)

_THINKING = "how a model thinks is set for the training run, by the arguments of its chat template"
WITHOUT_EFFECT = {
    "context_management": "no context is edited but by the agent",
    "output_config.effort": _THINKING,
    "reasoning": _THINKING,
    "reasoning_effort": _THINKING,
    "server_tools": "tools that OpenAI's servers run are not offered to the model",
    "speed": "there is one",
    "thinking": _THINKING,
}
"""What agents may ask for although it changes nothing of what is sampled, and why it does not. The log says it once."""


class Body(BaseModel):
    """A JSON object of a request. Unknown fields are refused; null and empty lists count as not given."""

    model_config = ConfigDict(extra="forbid")

    def without_effect(self) -> list[str]:
        """Return the names of `WITHOUT_EFFECT` that are given."""
        return [name for name in WITHOUT_EFFECT if reduce(_field, name.split("."), self) is not None]

    @model_validator(mode="before")
    @classmethod
    def _drop_unset(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"{len(values)} fields, and {MAX_FIELDS} are the most")
        return {name: value for name, value in values.items() if value is not None and value != []}


def _field(body: Any, name: str) -> Any:
    return getattr(body, name, None)


class TextPart(Body):
    """A part of a message that is text."""

    text: str


class ImagePart(Body):
    """A part of a message that is an image, with the URL of its data."""

    @property
    def url(self) -> str:
        """Return the URL."""
        raise NotImplementedError


class _TextPart(TextPart):
    type: Literal["text", "input_text", "output_text"]


# An image is shown as large as it is, within the limits of the model's processor.
_Detail = Literal["auto", "high", "original"]


class _ImageUrl(Body):
    url: str
    detail: _Detail = "auto"


class _ChatImage(ImagePart):
    type: Literal["image_url"]
    image_url: _ImageUrl

    @property
    @override
    def url(self) -> str:
        return self.image_url.url


class _ResponsesImage(ImagePart):
    type: Literal["input_image"]
    image_url: str
    detail: _Detail = "auto"

    @property
    @override
    def url(self) -> str:
        return self.image_url


_Part = Annotated[_TextPart | _ChatImage | _ResponsesImage, Field(discriminator="type")]
Content = str | Annotated[list[_Part], Field(max_length=MAX_PARTS, fail_fast=True)]


def content_of(content: str | Sequence[TextPart | ImagePart], *, role: str) -> str | list[dict[str, Any]]:
    """Return the content of a message as chat templates read it: its text, or blocks of text and of URLs of images.

    Raises:
        ApiError: 400, if a message that is neither a user's nor a tool's shows images.
    """
    if isinstance(content, str):
        return content
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if len(texts) == len(content):
        return "".join(texts)
    if role not in ("user", "tool"):
        raise refused(f"a message of the role {role} shows an image: only users and tools may", param="messages")
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image", "image": part.url}
        for part in content
    ]


def thinking_text(thinking: str) -> str:
    """Return what a model wrote whose thinking a client or an API has taken out of its turn."""
    return f"<think>{thinking}</think>"


def _finite(value: dict[str, Any]) -> dict[str, Any]:
    if not is_finite(value):
        raise ValueError("NaN and infinite numbers are no JSON: leave them out")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_finite)]


def _readable(parameters: JsonObject) -> JsonObject:
    """Check what verl's tool parsers read of a function, before any token is sampled."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, dict | None):
        raise ValueError("`properties` must be an object")
    if not (required is None or (isinstance(required, list) and all(isinstance(each, str) for each in required))):
        raise ValueError("`required` must be a list of names")
    return parameters


Parameters = Annotated[JsonObject, AfterValidator(_readable)]


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Parameters = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def as_tool(self) -> dict[str, Any]:
        """Return it as chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class PlainFormat(Body):
    """`{"type": "text"}`, no constraint, or `{"type": "json_object"}`, any JSON object."""

    type: Literal["text", "json_object"]

    def schema_of_text(self) -> dict[str, Any] | None:
        """Return the JSON schema of the text, None for any text."""
        return None if self.type == "text" else {"type": "object"}


class NamedSchema(Body):
    """A JSON schema; the answer keeps to it whether or not the client calls it strict."""

    name: str = ""
    description: str = ""
    # Not named `schema`, since pydantic's models have a method of that name.
    json_schema: JsonObject = Field(alias="schema")
    strict: bool = False


def _known_choice(value: Any) -> Any:
    # `call_rules` checks that a named function is in `tools`.
    if value in ("auto", "none", "required") or _named_function(value) is not None:
        return value
    raise ValueError('use "auto", "none", "required", or name one function of `tools`')


def _named_function(choice: Any) -> str | None:
    """Return the function that `{"type": "function", "name": ...}` names, or its form in Chat Completions."""
    if not isinstance(choice, dict) or choice.get("type") != "function" or len(choice) != 2:
        return None
    function = choice.get("function", {"name": choice.get("name")})
    name = function.get("name") if isinstance(function, dict) and len(function) == 1 else None
    return name if isinstance(name, str) else None


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_LEN)], Annotated[str, Field(max_length=MAX_METADATA_VALUE_LEN)]
    ],
    Field(max_length=MAX_METADATA),
]


def call_rules(
    tools: list[dict[str, Any]], *, choice: Any, may_call: bool, must_call: bool, named: str | None, single: bool
) -> dict[str, Any]:
    """Return the fields of a `TurnRequest` that say whether, which and how many tools may be called.

    `choice` is the parameter as the client gave it, `named` the one function that it forces.

    Raises:
        ApiError: 400, if the request forces a tool that is not in `tools`.
    """
    names = tuple(tool["function"]["name"] for tool in tools)
    if (must_call and not names) or (named is not None and named not in names):
        raise refused(
            f"tool_choice={choice!r}, but `tools` has {', '.join(names) or 'nothing'}: add the function, or leave "
            "tool_choice out",
            param="tool_choice",
        )
    return {
        "tools": tools,
        "parses_tools": bool(tools) and may_call,
        "forced_tools": (named,) if named is not None else names if must_call else (),
        "single_call": named is not None or single,
    }


class SharedBody(Body):
    """The parameters that both of OpenAI's APIs have."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tool_choice: Annotated[Any, BeforeValidator(_known_choice)] = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: Literal[0] = 0
    user: str | None = None
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] = "auto"

    def sampling(self, **more: Any) -> dict[str, Any]:
        """Return the sampling parameters that are given, under vLLM's names."""
        wanted = {"temperature": self.temperature, "top_p": self.top_p, **more}
        return {name: value for name, value in wanted.items() if value is not None}

    def call_rules(self, tools: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what `call_rules` makes of `tool_choice` and `parallel_tool_calls`."""
        return call_rules(
            tools,
            choice=self.tool_choice,
            may_call=self.tool_choice != "none",
            must_call=self.tool_choice == "required",
            named=_named_function(self.tool_choice),
            single=not self.parallel_tool_calls,
        )
