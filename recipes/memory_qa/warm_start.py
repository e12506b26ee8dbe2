"""Makes the recipe's model: the Qwen3 of `arithmetic_tools` from random weights, taught by this recipe's solver.

Two stages as there: first the skill (keep the fact, read the answer off the notes), then mixed habits, so that sampled
sessions succeed now and then.
"""

import asyncio
import random
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipes.arithmetic_tools.solver import Leaf
from recipes.arithmetic_tools.warm_start import teach
from recipes.memory_qa.settings import Habits, Settings
from recipes.memory_qa.solver import Solver, Turn, trace_leaves
from recipes.memory_qa.tasks import make_tasks
from rollout_hooks.loops.memory import MemoryAgentLoop


def tool_schemas() -> list[dict[str, Any]]:
    """Returns the schemas of the memory loop's tools, as its prompts show them."""
    return [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in MemoryAgentLoop.own_schemas]


def warm_start(tokenizer: PreTrainedTokenizerFast, *, settings: Settings) -> Qwen3ForCausalLM:
    """Makes the model and trains it, with a line of progress on stderr now and then.

    Args:
        tokenizer: The recipe's tokenizer.
        settings: With a warm start.

    Returns:
        The trained model, in evaluation mode.
    """
    warm = settings.warm_start
    assert warm is not None
    builder = create_continuous_token_builder(tokenizer, hf_model_type=Qwen3Config.model_type)
    schemas = tool_schemas()

    def make_batch(step: int, habits: Habits) -> list[Leaf]:
        """Of every session the answer and a share of the turns before it."""
        solver = Solver(habits=habits, rng=random.Random(step))
        sessions = asyncio.run(_solve(solver, seed=settings.warm_start_seed + step, num_tasks=warm.num_sessions))
        chosen: list[Turn] = []
        for *before, answer in sessions:
            chosen += [turn for turn in before if solver.rng.random() < warm.branch_fraction]
            chosen.append(answer)
        return list(trace_leaves(chosen, builder=builder, tokenizer=tokenizer, tools=schemas))

    return teach(tokenizer, make_batch=make_batch, settings=warm, seed=settings.seed)


async def _solve(solver: Solver, *, seed: int, num_tasks: int) -> list[list[Turn]]:
    return [await solver.solve(task) for task in make_tasks(num_tasks, seed=seed)]
