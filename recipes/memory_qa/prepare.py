"""Prepares a run of the recipe: tasks, the loop's options and, unless you bring one, the model.

    python -m recipes.memory_qa.prepare                  the small model, warm-started in a minute or less
    python -m recipes.memory_qa.prepare --model PATH     a Hugging Face model folder of yours

prints the folder that holds them; progress goes to stderr. The folder is named by a hash of the settings and of
the code that it is made with: a second call only prints, and a change makes a new folder::

    train.parquet validation.parquet    tasks as verl reads them
    loops.yaml                          verl's agent loop config
    model/                              a Hugging Face model folder with its tokenizer
"""

from functools import partial
from pathlib import Path

from recipes.arithmetic_tools.prepare import CODE as ARITHMETIC_CODE
from recipes.memory_qa.settings import MAX_NOTES, Settings, WarmStartSettings
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

DEFAULT_CACHE_DIR = Path(".cache/memory_qa")
_OWN_CODE = ("prepare", "settings", "solver", "tasks", "tokenizer", "warm_start")
_CODE = (
    *(Path(__file__).with_name(f"{name}.py") for name in _OWN_CODE),
    *(path for path in ARITHMETIC_CODE if path.stem in ("settings", "tokenizer", "warm_start")),
)
_LOOP_OPTIONS = {"max_notes": MAX_NOTES, "call_timeout_s": 120.0}


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Makes what a run needs unless `cache_dir` has it.

    Args:
        cache_dir: Where prepared folders are kept.
        settings: What to make.
        model: A Hugging Face model folder to train instead of a new one; linked, not copied.

    Returns:
        The prepared folder, an absolute path.

    Raises:
        ValueError: When `model` is not such a folder, or neither a model nor a warm start is given.
    """
    check_model(model, settings=settings)
    folder = cache_dir.resolve() / cache_key(settings, model=model, code=_CODE)
    return build_once(folder, build=lambda building: _build(building, settings=settings, model=model))


def _build(folder: Path, *, settings: Settings, model: Path | None) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    from recipes.memory_qa.tasks import DATA_SOURCE, make_tasks
    from recipes.memory_qa.tokenizer import build_tokenizer

    say("tasks")
    write_rows(
        folder,
        settings=settings,
        data_source=DATA_SOURCE,
        make_tasks=make_tasks,
        chat=lambda task: task.messages,
        extra_info=lambda task: {"inputs": list(task.inputs)},
    )
    write_loop(folder, name="memory_qa", target="recipes.memory_qa.loop.MemoryQALoop", **_LOOP_OPTIONS)
    if model is not None:
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    else:
        from recipes.memory_qa.warm_start import warm_start

        save_model(folder / "model", make=partial(warm_start, settings=settings), tokenizer=build_tokenizer())


def prepare_default(cache_dir: Path, model: Path | None) -> Path:
    """Prepares with the default settings: the given model, or the small one."""
    settings = Settings(warm_start=WarmStartSettings() if model is None else None)
    return prepare(cache_dir, settings=settings, model=model)


if __name__ == "__main__":
    run_command_line(__doc__, cache_dir=DEFAULT_CACHE_DIR, prepare=prepare_default)
