"""Make the folder that a recipe's run reads, once.

    python -m recipes.NAME.prepare                  with the small model, warm-started in a minute or two
    python -m recipes.NAME.prepare --model PATH     with a Hugging Face model folder of yours

prints the folder; progress goes to stderr. The folder is named by a hash of the settings, the path of your model and
the code that it is made with, so a second call only prints it, and a change makes a new folder.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipes.demo.settings import Settings


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"  {text}", file=sys.stderr, flush=True)


def prepare_once(
    parent: Path,
    *,
    settings: Settings,
    model: Path | None,
    code: Iterable[Path] = (),
    build: Callable[[Path, Path], None],
) -> Path:
    """Return the prepared folder for these arguments, made unless it is there.

    Args:
        parent: The folder that holds it.
        settings: What to make.
        model: A Hugging Face model folder to train instead of a new one.
        code: Files that it is made with, beside those of this package.
        build: Fills a folder; also gets the path that this folder will have.

    Raises:
        ValueError: `model` is not such a folder, or neither a model nor a warm start is given.
    """
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"model={model}: it has no config.json; give a Hugging Face model folder")
    if model is None and settings.warm_start is None:
        remedy = "give the folder recipes.smollm.prepare prints"
        raise ValueError(f"--model: none is given, and warm_start=None makes none; {remedy}")
    described = {"settings": asdict(settings), "model": None if model is None else str(model.resolve())}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for path in (*sorted(Path(__file__).parent.glob("*.py")), *code):
        digest.update(path.read_bytes())
    return build_once(parent.resolve() / digest.hexdigest()[:12], build=build)


def build_once(folder: Path, *, build: Callable[[Path, Path], None]) -> Path:
    """Return `folder`, filled by `build` unless it exists; `build` gets another path, which becomes `folder`."""
    if folder.exists():
        say(f"prepared before: {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and moved in one step: an interrupted build leaves nothing that looks complete.
    building = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        build(building, folder)
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
    chat: Callable[[Any], list[dict[str, str]]],
    extra_info: Callable[[Any], dict[str, Any]] = lambda _: {},
) -> None:
    """Write ``train.parquet`` and ``validation.parquet``, tasks as verl reads them.

    Args:
        folder: Where to write.
        settings: Seeds and sizes.
        data_source: verl's name of the reward.
        make_tasks: `make_tasks(number, *, seed)` gives tasks with an `answer`.
        chat: Gives a task's first messages.
        extra_info: Gives what a row says beside its split and index.
    """
    import pandas as pd

    for split, num_tasks, seed in settings.splits:
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


def run_command_line(
    prepare: Callable[..., Path], *, settings: Settings, folders: Mapping[str, str] | None = None
) -> None:
    """Run `prepare(cache_dir, settings=..., model=...)` with the arguments of the command line; print the folder.

    `folders` are more arguments of `prepare`, each an option of its name that takes a folder: name to help.
    """
    folders = folders or {}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache"), help="where prepared folders are kept")
    parser.add_argument("--model", type=Path, help="Hugging Face model folder to train instead of a new small model")
    for name, text in folders.items():
        parser.add_argument(f"--{name}", type=Path, help=text)
    arguments = parser.parse_args()
    if arguments.model is not None:
        settings = replace(settings, warm_start=None)
    try:
        given = {name: vars(arguments)[name] for name in folders}
        print(prepare(arguments.cache_dir, settings=settings, model=arguments.model, **given))
    except ValueError as error:
        sys.exit(str(error))
