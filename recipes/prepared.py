"""Prepared folders: what the recipes' `prepare` modules have in common. Free of heavy imports, so a cache hit is quick.

A folder is named by a hash of the settings, the given model's path and the code that it is made with: a second call
only prints it, and a change makes a new folder.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.arithmetic_tools.settings import Settings


def say(text: str) -> None:
    """Prints a line of progress on stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def cache_key(settings: Settings, *, model: Path | None, code: Iterable[Path]) -> str:
    """Returns a short hash of the settings, the given model's path and the files of code."""
    described = {"settings": asdict(settings), "model": None if model is None else str(model.resolve())}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for path in (*code, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def check_model(model: Path | None, *, settings: Settings) -> None:
    """Checks that there is a model to train.

    Raises:
        ValueError: when `model` is not a Hugging Face model folder, or neither a model nor a warm start is given.
    """
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"model={model}: it has no config.json; give a Hugging Face model folder")
    if model is None and settings.warm_start is None:
        raise ValueError("warm_start=None: without a model folder of your own a warm start has to make the model")


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
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has prepared the same meanwhile
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def write_rows(
    folder: Path,
    *,
    settings: Settings,
    data_source: str,
    make_tasks: Callable[..., Sequence[Any]],
    chat: Callable[[Any], list[dict[str, Any]]],
    extra_info: Callable[[Any], dict[str, Any]] = lambda task: {},
) -> None:
    """Writes ``train.parquet`` and ``validation.parquet``, tasks as verl reads them.

    Args:
        folder: where to write.
        settings: seeds and sizes.
        data_source: verl's name of the reward.
        make_tasks: `make_tasks(number, *, seed)`, tasks with an `answer`.
        chat: a task's first messages.
        extra_info: what a row says beside its split and index.
    """
    import pandas as pd

    for split, num_tasks, seed in (
        ("train", settings.num_train_tasks, settings.train_seed),
        ("validation", settings.num_validation_tasks, settings.validation_seed),
    ):
        rows = [
            {
                "data_source": data_source,
                "prompt": chat(task),
                "reward_model": {"style": "rule", "ground_truth": task.answer},
                "extra_info": {"split": split, "index": index, **extra_info(task)},
            }
            for index, task in enumerate(make_tasks(num_tasks, seed=seed))
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def write_loop(folder: Path, *, name: str, target: str, **options: Any) -> None:
    """Writes verl's agent loop config, with one loop: its name, the import path of its class, and its options."""
    import yaml

    (folder / "loops.yaml").write_text(yaml.safe_dump([{"name": name, "_target_": target, **options}]))


def save_model(folder: Path, *, make: Callable[[Any], Any], tokenizer: Any) -> None:
    """Makes the model for the tokenizer by a warm start and writes both as a Hugging Face model folder."""
    say("warm start of the model (once; kept for later runs)")
    make(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run_command_line(description: str, *, cache_dir: Path, prepare: Callable[[Path, Path | None], Path]) -> None:
    """Parses the command line of a `prepare` module, prepares and prints the folder.

    Args:
        description: the module's docstring.
        cache_dir: where prepared folders are kept by default.
        prepare: the cache folder and the given model, if any, to the prepared folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=cache_dir)
    parser.add_argument("--model", type=Path, help="Hugging Face model folder to train instead of a new small model")
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.cache_dir, arguments.model))
    except ValueError as error:
        sys.exit(str(error))
