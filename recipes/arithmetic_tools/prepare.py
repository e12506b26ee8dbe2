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

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.arithmetic_tools.settings import Settings, WarmStartSettings

DEFAULT_CACHE_DIR = Path(".cache/arithmetic_tools")
_CODE = ("prepare.py", "settings.py", "solver.py", "tasks.py", "tokenizer.py", "tools.py", "warm_start.py")


def cache_key(settings: Settings, *, model: Path | None) -> str:
    """Returns a short hash of the settings, the given model's path and the recipe's code."""
    described = {"settings": asdict(settings), "model": None if model is None else str(model.resolve())}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in _CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


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
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"model={model}: it has no config.json; give a Hugging Face model folder")
    if model is None and settings.warm_start is None:
        raise ValueError("warm_start=None: without a model folder of your own a warm start has to make the model")
    folder = cache_dir.resolve() / cache_key(settings, model=model)
    return build_once(
        folder, build=lambda building: _build(building, final_folder=folder, settings=settings, model=model)
    )


def build_once(folder: Path, *, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `build` unless it exists; `build` gets another path, which becomes `folder`."""
    if folder.exists():
        say(f"prepared before: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and moved in one step: an interrupted build leaves nothing that looks complete.
    building = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        build(building)
        building.rename(folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _build(folder: Path, *, final_folder: Path, settings: Settings, model: Path | None) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    from recipes.arithmetic_tools.tasks import SYSTEM_PROMPT

    memory = write_tasks(folder, final_folder=final_folder, settings=settings, system_prompt=SYSTEM_PROMPT)
    write_loop(folder, name="arithmetic_tools", target="recipes.arithmetic_tools.loop.ArithmeticToolsLoop")
    if model is not None:
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    else:
        _make_model(folder, memory=memory, settings=settings)


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
    from recipes.arithmetic_tools.tasks import make_memory, make_tasks
    from recipes.arithmetic_tools.tools import write_memory

    say("tasks, lookup memory and tools")
    memory = make_memory(seed=settings.seed)
    write_memory(folder / "memory.sqlite", memory=memory)
    for name, num_tasks, seed in (
        ("train", settings.num_train_tasks, settings.train_seed),
        ("validation", settings.num_validation_tasks, settings.validation_seed),
    ):
        tasks = make_tasks(num_tasks, memory=memory, seed=seed)
        _write_rows(folder / f"{name}.parquet", tasks, split=name, system_prompt=system_prompt)
    _write_tools(folder, database=final_folder / "memory.sqlite")
    return memory


def _write_rows(path: Path, tasks: Sequence[Any], *, split: str, system_prompt: str) -> None:
    import pandas as pd

    from recipes.arithmetic_tools.tasks import DATA_SOURCE

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": task.chat(system_prompt),
            "reward_model": {"style": "rule", "ground_truth": task.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, task in enumerate(tasks)
    ]
    pd.DataFrame(rows).to_parquet(path)


def _write_tools(folder: Path, *, database: Path) -> None:
    import yaml

    from recipes.arithmetic_tools.tools import Calculator, LookupMemory

    tools = [
        {"class_name": f"{tool.__module__}.{tool.__qualname__}", "config": {"type": "native", **config}}
        for tool, config in ((Calculator, {}), (LookupMemory, {"database": str(database)}))
    ]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))


def write_loop(folder: Path, *, name: str, target: str) -> None:
    """Writes verl's agent loop config, with one loop: its name and the import path of its class."""
    import yaml

    (folder / "loops.yaml").write_text(yaml.safe_dump([{"name": name, "_target_": target}]))


def _make_model(folder: Path, *, memory: dict[str, int], settings: Settings) -> None:
    from recipes.arithmetic_tools.tokenizer import build_tokenizer
    from recipes.arithmetic_tools.tools import Calculator, LookupMemory
    from recipes.arithmetic_tools.warm_start import warm_start

    tokenizer = build_tokenizer()
    say("warm start of the model (once; kept for later runs)")
    model = warm_start(
        tokenizer,
        memory=memory,
        calculator=Calculator({"type": "native"}),
        lookup=LookupMemory({"type": "native", "database": str(folder / "memory.sqlite")}),
        settings=settings,
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Parses the command line, prepares and prints the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--model", type=Path, help="Hugging Face model folder to train instead of a new small model")
    arguments = parser.parse_args()
    warm_start_settings = WarmStartSettings() if arguments.model is None else None
    try:
        folder = prepare(arguments.cache_dir, settings=Settings(warm_start=warm_start_settings), model=arguments.model)
    except ValueError as error:
        sys.exit(str(error))
    print(folder)


if __name__ == "__main__":
    main()
