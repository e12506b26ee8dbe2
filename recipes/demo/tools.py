"""The two tools: a calculator that evaluates a parsed expression, and a lookup memory in an SQLite file.

Both answer with an equation (``84 + 23 = 107``, ``k41 = 53``), so that a branch that sees one result of two knows which
call it belongs to. A wrong call is answered with ``error: <cause>``.
"""

import ast
import asyncio
import contextlib
import io
import operator
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml
from typing_extensions import override
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_MAX_EXPRESSION_LEN = 64
_MAX_MAGNITUDE = 10**12
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """Return the value of integers with ``+``, ``-``, ``*`` and parentheses.

    Raises:
        ValueError: The expression has anything else, a text over 64 characters or a magnitude over 10**12.
    """
    if len(expression) > _MAX_EXPRESSION_LEN:
        raise ValueError(f"expression longer than {_MAX_EXPRESSION_LEN} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError("not an expression") from error
    return _evaluate(tree.body)


def write_memory(path: Path, *, memory: dict[str, int]) -> None:
    """Store `memory` as the table ``memory(key, value)`` of a new SQLite file at `path`."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE memory (key TEXT PRIMARY KEY, value INTEGER NOT NULL)")
        connection.executemany("INSERT INTO memory VALUES (?, ?)", memory.items())


def read_memory(path: Path, *, key: str) -> int:
    """Return the number stored under `key`.

    Raises:
        ValueError: Nothing is stored under it.
    """
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        row = connection.execute("SELECT value FROM memory WHERE key = ?", (key,)).fetchone()
    if row is None:
        raise ValueError("nothing is stored under this key")
    return int(row[0])


class OneArgumentTool(BaseTool):
    """A verl tool that maps one string argument to an equation.

    Attributes:
        function_name: The name that the model calls.
        argument: The name of the argument.
        description: What the model is told about the tool.
        argument_description: What the model is told about the argument.
    """

    function_name: str
    argument: str
    description: str
    argument_description: str

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        with contextlib.redirect_stdout(io.StringIO()):  # verl prints the schema of every tool that it makes
            super().__init__(config, tool_schema or self.get_openai_tool_schema())

    @override
    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        argument = {"type": "string", "description": self.argument_description}
        parameters = {"type": "object", "properties": {self.argument: argument}, "required": [self.argument]}
        function = {"name": self.function_name, "description": self.description, "parameters": parameters}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    def compute(self, argument: str) -> int:
        """Return the value of the argument; raise `ValueError` with the cause to tell the model."""
        raise NotImplementedError

    def answer(self, parameters: dict[str, Any]) -> str:
        """Return the tool's text for one call's `parameters`, whatever the model put there."""
        value = parameters.get(self.argument)
        if not isinstance(value, str):
            return f"error: {self.argument} must be given as a string"
        try:
            return f"{value} = {self.compute(value)}"
        except ValueError as error:
            return f"error: {error}"

    @override
    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        # In a thread, so that the calls of a turn overlap. The tool itself gives no reward.
        text = await asyncio.to_thread(self.answer, parameters)
        return ToolResponse(text=text), 0.0, {}


class Calculator(OneArgumentTool):
    """Adds, subtracts and multiplies integers."""

    function_name = "calculator"
    argument = "expression"
    description = "Evaluates an expression of integers with +, - and *."
    argument_description = "The expression, for example 84 + 23"

    @override
    def compute(self, argument: str) -> int:
        return calculate(argument)


class LookupMemory(OneArgumentTool):
    """Gives the number stored under a key; ``config["database"]`` is the path of the SQLite file."""

    function_name = "lookup"
    argument = "key"
    description = "Gives the number stored under a key."
    argument_description = "The key, for example k41"

    @override
    def compute(self, argument: str) -> int:
        return read_memory(Path(self.config["database"]), key=argument)


def make_tools(database: Path) -> tuple[Calculator, LookupMemory]:
    """Return both tools; the lookup reads `database`."""
    return Calculator({"type": "native"}), LookupMemory({"type": "native", "database": str(database)})


def write_tools(folder: Path, tools: Iterable[BaseTool]) -> None:
    """Write ``tools.yaml``, verl's tool config."""
    entries = [
        {"class_name": f"{type(tool).__module__}.{type(tool).__qualname__}", "config": tool.config} for tool in tools
    ]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": entries}))


def _evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_evaluate(left), _evaluate(right))
        case _:
            raise ValueError("only integers with +, - and * are allowed")
    if abs(result) > _MAX_MAGNITUDE:
        raise ValueError("the result is too large")
    return result
