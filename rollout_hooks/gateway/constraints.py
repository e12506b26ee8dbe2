"""Turns of a prescribed form: forced tool calls, one call at most, text that follows a JSON schema.

vLLM's structured outputs keep to a form by masking, at each step, the tokens that would leave it. This module builds
the fields of `StructuredOutputsParams`. A form with tool calls is a structural tag of XGrammar (0.2), which describes
the calls as the model's tool parser reads them. Tokens and log-probs are those of the masked distribution, not of the
policy alone.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.experimental.agent_loop.tool_parser import HermesToolParser, Qwen3XMLToolParser, ToolParser

from rollout_hooks.gateway.errors import refused
from rollout_hooks.gateway.schema_limits import check_size
from rollout_hooks.gateway.turn import TurnRequest

_TRIGGER = "<tool_call>"
# XGrammar's messages begin with the time and a line of its C++ source.
_PLACE_IN_XGRAMMAR = re.compile(r"^\[[^]]*\] \S+:\d+:\s*")

Tags = list[dict[str, Any]]


def structured_outputs(request: TurnRequest, tool_parser: ToolParser | None) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams` for the form that a request prescribes.

    Raises:
        ApiError: 400, if calls of this model's format cannot be forced, or a schema is not valid or too large.
    """
    if request.text_schema is not None:
        check_size([request.text_schema], param=request.text_param)
        _check_schema(request.text_schema, param=request.text_param, owner=request.text_param)
        if not request.parses_tools:
            # No structural tag: for plain JSON, vLLM takes another backend if XGrammar cannot keep to the schema.
            return {"json": json.dumps(request.text_schema)}
    tag = json.dumps({"type": "structural_tag", "format": _form_with_calls(request, tool_parser)})
    _check("from_structural_tag", tag, param="tools", owner="tools")
    return {"structural_tag": tag}


def prescribes(request: TurnRequest) -> str | None:
    """Return the first parameter by which a request prescribes a form, or None if the model is free."""
    if request.parses_tools and request.forced_tools:
        return "tool_choice"
    if request.parses_tools and request.single_call:
        return "parallel_tool_calls"
    return None if request.text_schema is None else request.text_param


def _form_with_calls(request: TurnRequest, tool_parser: ToolParser | None) -> dict[str, Any]:
    if type(tool_parser) not in _TAGS:
        formats = "hermes, qwen3_coder"
        raise refused(
            f"tool_choice, parallel_tool_calls=false and {request.text_param} beside tools need a format of tool calls "
            f"that can be enforced ({formats}), and this model's is {type(tool_parser).__name__}; leave them out",
            param=prescribes(request),
        )
    functions = [tool["function"] for tool in request.tools]
    called = [each for each in functions if not request.forced_tools or each["name"] in request.forced_tools]
    check_size([_arguments_schema(function) for function in called], param="tools")
    for function in called:
        _check_schema(_arguments_schema(function), param="tools", owner=f"parameters of {function['name']!r}")
    tags = _TAGS[type(tool_parser)](called)
    ends = {"stop_after_first": request.single_call}
    if request.forced_tools or request.text_schema is not None:
        calls = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True, **ends}
        if request.forced_tools:
            return calls
        return {"type": "or", "elements": [{"type": "json_schema", "json_schema": request.text_schema}, calls]}
    return {"type": "triggered_tags", "triggers": [_TRIGGER], "tags": tags, **ends}


def _hermes_tags(functions: Sequence[Mapping[str, Any]]) -> Tags:
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, with or without line breaks inside."""
    return [
        {
            "type": "tag",
            "begin": f'{_TRIGGER}{space}{{"name": {json.dumps(function["name"])}, "arguments": ',
            "content": {"type": "json_schema", "json_schema": _arguments_schema(function)},
            "end": f"}}{space}</tool_call>",
        }
        for function in functions
        for space in ("\n", "")
    ]


def _qwen3_coder_tags(functions: Sequence[Mapping[str, Any]]) -> Tags:
    """`<function=f>` with one `<parameter=x>` for each argument, as the template of Qwen3-Coder has it."""
    return [
        {
            "type": "tag",
            "begin": f"{_TRIGGER}\n<function={function['name']}>\n",
            "content": {"type": "json_schema", "json_schema": _arguments_schema(function), "style": "qwen_xml"},
            "end": "\n</function>\n</tool_call>",
        }
        for function in functions
    ]


_TAGS: dict[type[ToolParser] | type[None], Callable[[Sequence[Mapping[str, Any]]], Tags]] = {
    HermesToolParser: _hermes_tags,
    Qwen3XMLToolParser: _qwen3_coder_tags,
}


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", **function["parameters"]}


def _check_schema(schema: Mapping[str, Any], *, param: str, owner: str) -> None:
    _check("from_json_schema", json.dumps(schema), param=param, owner=owner)


def _check(grammar_of: str, text: str, *, param: str, owner: str) -> None:
    cause = _refusal(grammar_of, text)
    if cause is not None:
        message = f"{owner}: the JSON schema cannot be kept to: {cause}; simplify it, or leave the constraint out"
        raise refused(message, param=param)


@lru_cache(maxsize=1024)  # agents send the same tools with every turn, and reading them takes milliseconds
def _refusal(grammar_of: str, text: str) -> str | None:
    """Return why XGrammar refuses a form, if it does."""
    # Imported here: XGrammar comes with vLLM, and sessions that prescribe nothing do not need it.
    from xgrammar import Grammar

    try:
        getattr(Grammar, grammar_of)(text)
    except (RuntimeError, ValueError) as error:
        return _PLACE_IN_XGRAMMAR.sub("", str(error)).strip()
    return None
