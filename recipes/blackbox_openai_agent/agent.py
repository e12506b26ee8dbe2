"""A tool-calling agent on the public `openai` client; it knows nothing of verl, of training or of tokens.

It asks for a turn, runs the tool calls of that turn at once and sends the results back, until the model answers. Where
a turn made several calls it also asks for a conclusion of each result alone, in parallel requests: each is the same
history with one result instead of all. (Servers of OpenAI itself want a result for every call; vLLM's and the gateway
take the history as it is.)
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        schema: As Chat Completions takes it.
        run: Maps the arguments of a call to the text that the model is told; it runs in a thread.
    """

    schema: dict[str, Any]
    run: Callable[[dict[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What the model said to one result alone: the id of that response, its text, and the result."""

    response_id: str
    text: str
    result: str


@dataclass(frozen=True, slots=True)
class Solution:
    """How a task ended.

    Attributes:
        answer: The text of the last turn; empty where that turn only made calls or the context was full before it.
        conclusions: Of all turns, in the order of the calls.
    """

    answer: str
    conclusions: tuple[Conclusion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAgent:
    """The agent.

    Attributes:
        client: Of any server that speaks Chat Completions.
        model: The model's name there.
        tools: By the names in their schemas, in the order in which the model is told of them.
        max_turns: Turns of the model; calls in the last one are not run.
    """

    client: AsyncOpenAI
    model: str
    tools: Mapping[str, Tool]
    max_turns: int = 4

    async def solve(self, messages: Sequence[Message]) -> Solution:
        """Work on the task that `messages` put."""
        history = list(messages)
        conclusions: list[Conclusion] = []
        answer = ""
        for number in range(1, self.max_turns + 1):
            response = await self._ask(history)
            if response is None:
                answer = ""
                break
            message = response.choices[0].message
            answer = message.content or ""
            if not message.tool_calls or number == self.max_turns:
                break
            history.append(message.model_dump(exclude_none=True))
            calls = [call for call in message.tool_calls if isinstance(call, ChatCompletionMessageFunctionToolCall)]
            results = await asyncio.gather(*(self._run(call) for call in calls))
            if len(results) > 1:
                asked = await asyncio.gather(*(self._conclude(history, result) for result in results))
                conclusions += [conclusion for conclusion in asked if conclusion is not None]
            history += results
        return Solution(answer, tuple(conclusions))

    async def _ask(self, messages: Sequence[Message], **options: Any) -> ChatCompletion | None:
        """Return the response to one request, or None if the messages fill the model's context."""
        schemas = [tool.schema for tool in self.tools.values()]
        try:
            return await self.client.chat.completions.create(
                model=self.model,
                messages=cast(Sequence[ChatCompletionMessageParam], messages),
                tools=cast(Sequence[ChatCompletionToolParam], schemas),
                **options,
            )
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            return None

    async def _conclude(self, history: Sequence[Message], result: Message) -> Conclusion | None:
        response = await self._ask([*history, result], tool_choice="none")
        if response is None:
            return None
        return Conclusion(response.id, response.choices[0].message.content or "", result["content"])

    async def _run(self, call: ChatCompletionMessageFunctionToolCall) -> Message:
        """Run a call; tell the model what is wrong with it."""
        tool = self.tools.get(call.function.name)
        arguments = _read_arguments(call.function.arguments)
        if tool is None:
            text = f"error: there is no tool {call.function.name}"
        elif arguments is None:
            text = "error: arguments must be a JSON object"
        else:
            text = await asyncio.to_thread(tool.run, arguments)
        return {"role": "tool", "tool_call_id": call.id, "content": text}


def _read_arguments(text: str) -> dict[str, Any] | None:
    try:
        arguments = json.loads(text)
    except json.JSONDecodeError:
        return None
    return arguments if isinstance(arguments, dict) else None
