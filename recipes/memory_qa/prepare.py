"""Prepares a run of the recipe: tasks, the loop's options and, unless you bring one, the model.

    python -m recipes.memory_qa.prepare                  the small model, warm-started in a minute or less
    python -m recipes.memory_qa.prepare --model PATH     a Hugging Face model folder of yours

prints the folder that holds them; progress goes to stderr. The folder is named by a hash of the settings and of
the code that it is made with: a second call only prints, and a change makes a new folder::

    train.parquet validation.parquet    tasks as verl reads them
    loops.yaml                          verl's agent loop config
    model/                              a Hugging Face model folder with its tokenizer
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recipes.arithmetic_tools.prepare import build_once, say
from recipes.memory_qa.settings import MAX_NOTES, Settings, WarmStartSettings

DEFAULT_CACHE_DIR = Path(".cache/memory_qa")
_RECIPES = Path(__file__).parents[1]
_CODE = (
    *(f"memory_qa/{name}.py" for name in ("prepare", "settings", "solver", "tasks", "tokenizer", "warm_start")),
    *(f"arithmetic_tools/{name}.py" for name in ("settings", "tokenizer", "warm_start")),
)
_LOOP_OPTIONS = {"max_notes": MAX_NOTES, "call_timeout_s": 120.0}


def cache_key(settings: Settings, *, model: Path | None) -> str:
    """Returns a short hash of the settings, the given model's path and the code that is used."""
    described = {"settings": asdict(settings), "model": None if model is None else str(model.resolve())}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name in _CODE:
        digest.update((_RECIPES / name).read_bytes())
    return digest.hexdigest()[:12]


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
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"model={model}: it has no config.json; give a Hugging Face model folder")
    if model is None and settings.warm_start is None:
        raise ValueError("warm_start=None: without a model folder of your own a warm start has to make the model")
    folder = cache_dir.resolve() / cache_key(settings, model=model)
    return build_once(folder, build=lambda building: _build(building, settings=settings, model=model))


def _build(folder: Path, *, settings: Settings, model: Path | None) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    import yaml

    from recipes.memory_qa.tasks import make_tasks

    say("tasks")
    for name, num_tasks, seed in (
        ("train", settings.num_train_tasks, settings.train_seed),
        ("validation", settings.num_validation_tasks, settings.validation_seed),
    ):
        _write_rows(folder / f"{name}.parquet", make_tasks(num_tasks, seed=seed), split=name)
    loops = [{"name": "memory_qa", "_target_": "recipes.memory_qa.loop.MemoryQALoop", **_LOOP_OPTIONS}]
    (folder / "loops.yaml").write_text(yaml.safe_dump(loops))
    if model is not None:
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
    else:
        _make_model(folder / "model", settings=settings)


def _write_rows(path: Path, tasks: Sequence[Any], *, split: str) -> None:
    import pandas as pd

    from recipes.memory_qa.tasks import DATA_SOURCE

    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": task.messages,
            "reward_model": {"style": "rule", "ground_truth": task.answer},
            "extra_info": {"split": split, "index": index, "inputs": list(task.inputs)},
        }
        for index, task in enumerate(tasks)
    ]
    pd.DataFrame(rows).to_parquet(path)


def _make_model(folder: Path, *, settings: Settings) -> None:
    from recipes.memory_qa.tokenizer import build_tokenizer
    from recipes.memory_qa.warm_start import warm_start

    tokenizer = build_tokenizer()
    say("warm start of the model (once; kept for later runs)")
    warm_start(tokenizer, settings=settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
