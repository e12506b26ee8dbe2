"""The agent loops for a random model: a tool parser that reads every text as calls, and rewards.

The model never writes a tool call by itself. Turns, tools, branches and contexts are the loops' own.
"""

import json
from pathlib import Path
from typing import Any

from typing_extensions import override
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser

from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.loops.compaction import CompactionAgentLoop
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop
from rollout_hooks.loops.subagents import SubagentsAgentLoop
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop


@ToolParser.register("anything")
class AnythingParser(ToolParser):
    """A parser that makes two calls of every text: its tokens choose the tools, and the text is the argument."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        """Return the text and the calls."""
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        chosen = [tools[(sum(responses_ids) + k) % len(tools)].function for k in range(2)] if tools else []
        arguments = [json.dumps({function.parameters.required[0]: text[:6]}) for function in chosen]
        calls = [FunctionCall(name=f.name, arguments=a) for f, a in zip(chosen, arguments, strict=True)]
        return text, calls


def score(text: str) -> float:
    """Return the share of letters that are in the first half of the alphabet."""
    return sum("a" <= character <= "m" for character in text) / max(len(text), 1)


class Logged(ToolTurnsLoop):
    """A base that rewards the final leaf and logs per session its loop and each row's prompt and trained lengths."""

    def __init__(self, *args: Any, log: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log = Path(log)

    @override
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[TreeAgentLoopOutput]:
        outputs = await super().run(sampling_params, **row)
        rows = [(len(output.prompt_ids), sum(output.response_mask)) for output in outputs]
        with self.log.open("a") as file:
            file.write(json.dumps({"loop": type(self).__name__, "rows": rows}) + "\n")
        return outputs

    @override
    async def final_reward(self, *, row: dict[str, Any], answer: str) -> float:
        return score(answer)


class Memory(Logged, MemoryAgentLoop):
    """`memory`: turns get the final leaf's reward."""


class Compaction(Logged, CompactionAgentLoop):
    """`compaction` with a reward for the summary."""

    @override
    async def summary_reward(self, *, row: dict[str, Any], summary: str, number: int) -> float:
        return score(summary)


class Subagents(Logged, SubagentsAgentLoop):
    """`subagents` with a reward for each child."""

    @override
    async def child_reward(self, *, row: dict[str, Any], task: str, answer: str, depth: int) -> float:
        return score(answer)


class TreeSearch(Logged, TreeSearchAgentLoop):
    """`tree_search` with a reward for every leaf."""

    @override
    async def leaf_reward(self, *, row: dict[str, Any], answer: str) -> float:
        return score(answer)


class ParallelTools(Logged, ParallelToolsAgentLoop):
    """`parallel_tools`: branches get the final leaf's reward."""
