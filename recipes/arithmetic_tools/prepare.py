"""Prepares a run of the demo: tasks, lookup memory, tools and, unless you bring one, the model.

    python -m recipes.arithmetic_tools.prepare                  the small model, warm-started in a minute or two
    python -m recipes.arithmetic_tools.prepare --model PATH     a Hugging Face model folder of yours

prints the folder that holds them; progress goes to stderr. The folder is named by a hash of the settings and of
the code that it is made with: a second call only prints, and a change makes a new folder::

    train.parquet validation.parquet    tasks as verl reads them
    memory.sqlite                       what the lookup tool reads
    tools.yaml loops.yaml               verl's tool and agent loop configs
    model/                              a Hugging Face model folder with its tokenizer
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes.arithmetic_tools.settings import Settings, WarmStartSettings
from recipes.prepared import (
    build_once,
    cache_key,
    check_model,
    run_command_line,
    save_model,
    say,
    write_loop,
    write_rows,
)

DEFAULT_CACHE_DIR = Path(".cache/arithmetic_tools")
CODE = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("prepare", "settings", "solver", "tasks", "tokenizer", "tools", "warm_start")
)
"""What a prepared folder is made with."""


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Makes what a run needs unless `cache_dir` has it.

    Args:
        cache_dir: where prepared folders are kept.
        settings: what to make.
        model: a Hugging Face model folder to train instead of a new one; linked, not copied.

    Returns:
        The prepared folder, an absolute path.

    Raises:
        ValueError: when `model` is not such a folder, or neither a model nor a warm start is given.
    """
    check_model(model, settings=settings)
    folder = cache_dir.resolve() / cache_key(settings, model=model, code=CODE)
    return build_once(
        folder, build=lambda building: _build(building, final_folder=folder, settings=settings, model=model)
    )


def _build(folder: Path, *, final_folder: Path, settings: Settings, model: Path | None) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    from recipes.arithmetic_tools.tasks import SYSTEM_PROMPT
    from recipes.arithmetic_tools.tokenizer import build_tokenizer

    memory = write_tasks(folder, final_folder=final_folder, settings=settings, system_prompt=SYSTEM_PROMPT)
    write_loop(folder, name="arithmetic_tools", target="recipes.arithmetic_tools.loop.ArithmeticToolsLoop")
    if model is not None:
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    else:
        from recipes.arithmetic_tools.warm_start import warm_start

        teach_tools(folder, memory=memory, settings=settings, tokenizer=build_tokenizer(), warm_start=warm_start)


def write_tasks(folder: Path, *, final_folder: Path, settings: Settings, system_prompt: str) -> dict[str, int]:
    """Writes the tasks, the lookup memory and verl's tool config.

    Args:
        folder: where to write.
        final_folder: where the folder will be when the tools are used.
        settings: seeds and sizes.
        system_prompt: what starts every chat.

    Returns:
        The memory.
    """
    from recipes.arithmetic_tools.tasks import DATA_SOURCE, make_memory, make_tasks
    from recipes.arithmetic_tools.tools import write_memory

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
    _write_tools(folder, database=final_folder / "memory.sqlite")
    return memory


def teach_tools(
    folder: Path, *, memory: dict[str, int], settings: Settings, tokenizer: Any, warm_start: Callable[..., Any]
) -> None:
    """Makes ``model/`` by a warm start with the real tools, whose lookup reads ``memory.sqlite`` of the same folder."""
    from recipes.arithmetic_tools.tools import Calculator, LookupMemory

    make = partial(
        warm_start,
        memory=memory,
        calculator=Calculator({"type": "native"}),
        lookup=LookupMemory({"type": "native", "database": str(folder / "memory.sqlite")}),
        settings=settings,
    )
    save_model(folder / "model", make=make, tokenizer=tokenizer)


def _write_tools(folder: Path, *, database: Path) -> None:
    import yaml

    from recipes.arithmetic_tools.tools import Calculator, LookupMemory

    tools = [
        {"class_name": f"{tool.__module__}.{tool.__qualname__}", "config": {"type": "native", **config}}
        for tool, config in ((Calculator, {}), (LookupMemory, {"database": str(database)}))
    ]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))


def prepare_default(cache_dir: Path, model: Path | None) -> Path:
    """Prepares with the default settings: the given model, or the small one."""
    settings = Settings(warm_start=WarmStartSettings() if model is None else None)
    return prepare(cache_dir, settings=settings, model=model)


if __name__ == "__main__":
    run_command_line(__doc__, cache_dir=DEFAULT_CACHE_DIR, prepare=prepare_default)
