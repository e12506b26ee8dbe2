"""One training session: the agent on a row of the data, and its rewards. This is what the loop `blackbox` runs.

The last turn earns the verifier's reward. A conclusion that states its tool's value earns the same reward, any other
conclusion 0: `recipes/demo/loop.py` says why conclusions have no reward of their own.
"""

import functools
import os
import ssl
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from recipes.blackbox_openai_agent.agent import Solution, Tool, ToolAgent
from recipes.demo.tasks import score_answer, score_conclusion
from recipes.demo.tools import make_tools

MEMORY_VARIABLE = "LOOKUP_MEMORY"
"""Environment variable with the path of the SQLite file that the lookup tool reads."""


async def run(*, base_url: str, api_key: str, model: str, row: dict[str, Any]) -> dict[str, Any]:
    """Run the agent on one task.

    Args:
        base_url: Of the session at the gateway.
        api_key: The gateway's token.
        model: The gateway's name for the policy.
        row: The row of the data; `raw_prompt` and ``reward_model.ground_truth`` are read.

    Returns:
        What the loop `blackbox` reads, see `rewards`.
    """
    http_client = DefaultAsyncHttpxClient(verify=_certificates())
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        agent = ToolAgent(client=client, model=model, tools=_tools(Path(os.environ[MEMORY_VARIABLE])))
        solution = await agent.solve(row["raw_prompt"])
    return rewards(solution, answer=row["reward_model"]["ground_truth"])


def rewards(solution: Solution, *, answer: str) -> dict[str, Any]:
    """Return the session's `reward`, and as `leaf_rewards` those of its conclusions by response."""
    reward = score_answer(solution.answer, answer=answer)
    of_conclusions = {
        conclusion.response_id: reward * score_conclusion(conclusion.text, result=conclusion.result)
        for conclusion in solution.conclusions
    }
    return {"reward": reward, "leaf_rewards": of_conclusions}


@functools.cache
def _tools(memory: Path) -> dict[str, Tool]:
    return {
        tool.name: Tool(tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True), tool.answer)
        for tool in make_tools(memory)
    }


@functools.cache
def _certificates() -> ssl.SSLContext:
    # Reading them takes a client longer than a turn of the small model; all sessions share one reading.
    return ssl.create_default_context()
