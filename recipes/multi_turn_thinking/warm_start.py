"""Makes the recipe's model: the small Qwen3 of `arithmetic_tools`, taught by the thinking solver, on token trees.

A session gives one sequence for each of its turns, and these share all but the thinking: as trees, the supervised steps
take less than half the time.
"""

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from recipes.arithmetic_tools.settings import Habits, Settings
from recipes.arithmetic_tools.solver import Leaf
from recipes.arithmetic_tools.tasks import make_tasks
from recipes.arithmetic_tools.tools import OneArgumentTool
from recipes.arithmetic_tools.warm_start import teach
from recipes.multi_turn_thinking.solver import ThinkingSolver, trace_leaves
from verl_tree.functional import tree_log_probs


def warm_start(
    tokenizer: PreTrainedTokenizerFast,
    *,
    memory: dict[str, int],
    calculator: OneArgumentTool,
    lookup: OneArgumentTool,
    settings: Settings,
) -> Qwen3ForCausalLM:
    """Makes the model and trains it; the arguments are those of `arithmetic_tools`."""
    warm = settings.warm_start
    assert warm is not None
    builder = create_continuous_token_builder(tokenizer, hf_model_type=Qwen3Config.model_type)
    schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in (calculator, lookup)]

    def make_batch(step: int, habits: Habits) -> list[Leaf]:
        solver = ThinkingSolver(calculator=calculator, lookup=lookup, habits=habits, rng=random.Random(step))
        seed = settings.warm_start_seed + 2 * warm.num_sessions * step
        return [
            leaf
            for task in make_tasks(warm.num_sessions, memory=memory, seed=seed)
            for leaf in trace_leaves(task, solver.solve(task), builder=builder, tokenizer=tokenizer, tools=schemas)
        ]

    return teach(tokenizer, make_batch=make_batch, settings=warm, seed=settings.seed, compute_loss=tree_loss)


def tree_loss(model: Qwen3ForCausalLM, *, leaves: Sequence[Leaf], padding: int) -> torch.Tensor:
    """Returns what `flat_loss` of `arithmetic_tools` returns; `padding` is not needed."""
    del padding
    out = tree_log_probs(model, [leaf.token_ids for leaf in leaves])
    trained = [torch.tensor(leaf.trained[1:], dtype=torch.bool) for leaf in leaves]
    return -torch.cat([values[mask] for values, mask in zip(out.log_probs, trained, strict=True)]).mean()
