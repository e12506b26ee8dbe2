"""Refusals and failures of the gateway: a status, and the error JSON of OpenAI or of Anthropic."""

import reprlib
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rollout_hooks.gateway.limits import MAX_ERROR_LEN, MAX_ERRORS, MAX_SHOWN_LEN

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An error that reaches the client: HTTP status, message, OpenAI's code, and the parameter at fault."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(_cut(message, MAX_ERROR_LEN))
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """Return Anthropic's error JSON."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


def refused(message: str, *, param: str | None) -> ApiError:
    """Return the 400 for a parameter that cannot be served."""
    return ApiError(400, message, code="unsupported_or_invalid_parameter", param=param)


def context_exceeded(text: str, *, context_len: int) -> ApiError:
    """Return the 400 for a text that leaves no room to answer.

    Agents end, or shorten their history, where they know such a refusal: some by its code, which Anthropic's form has
    not, others by the words of OpenAI and Anthropic, which are here. Unknown, it is asked again for minutes.
    """
    message = f"prompt is too long: {text}, and this model's maximum context length is {context_len} tokens"
    return ApiError(400, message, code="context_length_exceeded")


class EngineFailure(ApiError):
    """A call that the engine failed (500) or gave up (503). The session's tree records both."""

    def __init__(self, cause: str, *, is_aborted: bool = False) -> None:
        code = "engine_aborted" if is_aborted else "engine_error"
        super().__init__(503 if is_aborted else 500, cause, code=code)


_SAMPLING = "the policy is trained as it samples; leave it out"

# What to do instead, by the first name of the parameter.
_REMEDIES = {
    "background": "answers are waited for; leave it out",
    "conversation": "send the items, or previous_response_id",
    "frequency_penalty": _SAMPLING,
    "include": "leave it out; for log-probs use chat/completions with logprobs=true",
    "input": "send messages, function calls and their outputs, as text or images in data URLs",
    "logit_bias": _SAMPLING,
    "messages": "send text, or images in data URLs",
    "modalities": "the model reads and writes text; leave it out",
    "presence_penalty": _SAMPLING,
    "service_tier": 'there is one; use "auto" or leave it out',
    "store": "completions are not kept; leave it out",
    "top_k": _SAMPLING,
    "top_logprobs": "the engine gives the log-prob of the sampled token only; set logprobs=true and leave this out",
    "truncation": "no prompt is cut; send a shorter one",
}

# A few levels and elements of a value, for its beginning in a message.
_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = _SHORT.maxlong = MAX_SHOWN_LEN


def invalid_request(error: ValidationError) -> ApiError:
    """Return the 400 that names refused parameters, the first ten, their values and what to do instead."""
    problems = error.errors(include_url=False, include_context=False)
    num_left_out = len(problems) - MAX_ERRORS
    params = [_name(problem) for problem in problems[:MAX_ERRORS]]
    lines = [_line(param, problem) for param, problem in zip(params, problems, strict=False)]
    lines += [f"and {num_left_out} more"] if num_left_out > 0 else []
    return refused("; ".join(lines), param=params[0])


def _name(problem: ErrorDetails) -> str | None:
    return ".".join(_cut(str(part), MAX_SHOWN_LEN) for part in problem["loc"]) or None


def _cut(text: str, num_kept: int) -> str:
    return text if len(text) <= num_kept else text[:num_kept] + "..."


def _line(param: str | None, problem: ErrorDetails) -> str:
    reason = problem["msg"].removeprefix("Value error, ")
    if param is None:
        return f"body: {reason}"
    value = _shown(problem["input"])
    remedy = _REMEDIES.get(param.split(".")[0])
    if problem["type"] == "extra_forbidden":
        return f"unsupported parameter {param}={value}: {remedy or 'leave it out'}"
    return f"{param}={value}: {reason}" + (f": {remedy}" if remedy else "")


def _shown(value: Any) -> str:
    """Return the beginning of a value's `repr`, without making the whole of it."""
    if isinstance(value, str):
        value = value[: MAX_SHOWN_LEN + 1]
        return _cut(repr(value), MAX_SHOWN_LEN)
    return _cut(_SHORT.repr(value), MAX_SHOWN_LEN)
