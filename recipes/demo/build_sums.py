"""What the folder of the two sums is filled with: tasks, lookup memory, tools and the small model."""

import random
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from recipes.demo.leaves import Leaf, Renderer
from recipes.demo.prepare import say, write_rows
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, SKILLED, Solver
from recipes.demo.tasks import DATA_SOURCE, make_memory, make_tasks
from recipes.demo.tools import make_tools, write_memory, write_tools
from recipes.demo.warm_start import Loss, flat_loss, save_taught_model


def write_sums(folder: Path, *, final_folder: Path, settings: Settings, system_prompt: str) -> dict[str, int]:
    """Write tasks, lookup memory and verl's tool config; return the memory.

    Args:
        folder: Where to write.
        final_folder: Where the folder will be when the tools are used.
        settings: Seeds and sizes.
        system_prompt: What starts every chat.
    """
    say("tasks, lookup memory and tools")
    memory = make_memory(seed=settings.seed)
    write_memory(folder / "memory.sqlite", memory=memory)
    write_rows(
        folder,
        settings=settings,
        data_source=DATA_SOURCE,
        make_tasks=partial(make_tasks, memory=memory),
        chat=lambda task: task.chat(system_prompt),
    )
    write_tools(folder, make_tools(final_folder / "memory.sqlite"))
    return memory


def teach_sums(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    memory: dict[str, int],
    settings: Settings,
    solver: type[Solver],
    compute_loss: Loss = flat_loss,
) -> None:
    """Make ``model/`` by a warm start on sessions of `solver` with the real tools, which read `folder`."""
    warm = settings.warm_start
    assert warm is not None
    calculator, lookup = make_tools(folder / "memory.sqlite")
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])

    def make_batch(step: int, is_skilled: bool) -> list[Leaf]:
        habits, rng = SKILLED if is_skilled else MIXED, random.Random(step)
        demonstrator = solver(calculator=calculator, lookup=lookup, habits=habits, rng=rng)
        seed = settings.warm_start_seed + 2 * warm.num_sessions * step
        tasks = make_tasks(warm.num_sessions, memory=memory, seed=seed)
        return [leaf for task in tasks for leaf in demonstrator.demonstrate(task, renderer)]

    save_taught_model(folder / "model", tokenizer, settings=settings, make_batch=make_batch, compute_loss=compute_loss)
