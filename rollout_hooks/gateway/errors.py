"""What the gateway says when it refuses or fails: a status and OpenAI's error JSON."""

from pydantic import ValidationError


class ApiError(Exception):
    """An error that reaches the client.

    Args:
        status: HTTP status.
        message: What is wrong and what would be right.
        code: OpenAI's machine-readable code.
        param: The parameter of the request that is meant.
    """

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, dict[str, str | None]]:
        """OpenAI's error JSON."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class EngineFailure(ApiError):
    """A call that the engine failed (500) or gave up (503); both are recorded in the session's tree."""

    def __init__(self, cause: str, *, is_aborted: bool = False) -> None:
        code = "engine_aborted" if is_aborted else "engine_error"
        super().__init__(503 if is_aborted else 500, cause, code=code)


def invalid_request(error: ValidationError) -> ApiError:
    """The 400 that names every parameter of a request that cannot be served."""
    problems = error.errors(include_url=False, include_context=False)
    params = [".".join(str(part) for part in problem["loc"]) or None for problem in problems]
    lines = []
    for param, problem in zip(params, problems, strict=True):
        is_unknown = problem["type"] == "extra_forbidden"
        lines.append(f"unsupported parameter {param!r}" if is_unknown else f"{param or 'body'}: {problem['msg']}")
    return ApiError(400, "; ".join(lines), code="unsupported_or_invalid_parameter", param=params[0])
