"""Prepares a run of the recipe: what `arithmetic_tools` prepares, with this recipe's prompt, loop, model and template.

    python -m recipes.multi_turn_thinking.prepare                  the small model, warm-started in a minute or two
    python -m recipes.multi_turn_thinking.prepare --model PATH     a Hugging Face model folder of yours

prints the folder that holds them; progress goes to stderr. Of a model of yours the files are linked; only its chat
template is written anew, so that it drops earlier thinking.
"""

import argparse
import hashlib
import sys
from dataclasses import replace
from pathlib import Path

from recipes.arithmetic_tools import prepare as arithmetic_tools
from recipes.arithmetic_tools.settings import Settings
from recipes.multi_turn_thinking.settings import default_settings

DEFAULT_CACHE_DIR = Path(".cache/multi_turn_thinking")
_CODE = ("prepare.py", "settings.py", "solver.py", "tokenizer.py", "warm_start.py")


def cache_key(settings: Settings, *, model: Path | None) -> str:
    """Returns a short hash of the settings, the given model's path and the code of both recipes."""
    digest = hashlib.sha256(arithmetic_tools.cache_key(settings, model=model).encode())
    for name in _CODE:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:12]


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Makes what a run needs unless `cache_dir` has it.

    Args:
        cache_dir: where prepared folders are kept.
        settings: what to make; without a model, with a warm start.
        model: a Hugging Face model folder to train instead of a new one; its files are linked.

    Returns:
        The prepared folder, an absolute path.

    Raises:
        ValueError: when `model` is not such a folder, or its tokenizer has no chat template.
    """
    if model is not None and not (model / "config.json").exists():
        raise ValueError(f"model={model}: it has no config.json; give a Hugging Face model folder")
    folder = cache_dir.resolve() / cache_key(settings, model=model)

    def build(building: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        from recipes.multi_turn_thinking.tokenizer import SYSTEM_PROMPT

        memory = arithmetic_tools.write_tasks(
            building, final_folder=folder, settings=settings, system_prompt=SYSTEM_PROMPT
        )
        target = "recipes.multi_turn_thinking.loop.RenderedToolsLoop"
        arithmetic_tools.write_loop(building, name="rendered_tools", target=target)
        if model is not None:
            _link_model(building / "model", model=model.resolve())
        else:
            _make_model(building, memory=memory, settings=settings)

    return arithmetic_tools.build_once(folder, build=build)


def _link_model(folder: Path, *, model: Path) -> None:
    from transformers import AutoTokenizer

    from recipes.multi_turn_thinking.tokenizer import drop_thinking

    template = AutoTokenizer.from_pretrained(model).chat_template
    if not isinstance(template, str):
        raise ValueError(f"model={model}: its tokenizer has {type(template).__name__} for a chat template; give it one")
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    # transformers prefers this file to the template in tokenizer_config.json.
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(drop_thinking(template))


def _make_model(folder: Path, *, memory: dict[str, int], settings: Settings) -> None:
    from recipes.arithmetic_tools.tools import Calculator, LookupMemory
    from recipes.multi_turn_thinking.tokenizer import build_tokenizer
    from recipes.multi_turn_thinking.warm_start import warm_start

    tokenizer = build_tokenizer()
    arithmetic_tools.say("warm start of the model (once; kept for later runs)")
    model = warm_start(
        tokenizer,
        memory=memory,
        calculator=Calculator({"type": "native"}),
        lookup=LookupMemory({"type": "native", "database": str(folder / "memory.sqlite")}),
        settings=settings,
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def main() -> None:
    """Parses the command line, prepares and prints the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR)
    parser.add_argument("--model", type=Path, help="Hugging Face model folder to train instead of a new small model")
    arguments = parser.parse_args()
    settings = default_settings()
    if arguments.model is not None:
        settings = replace(settings, warm_start=None)
    try:
        folder = prepare(arguments.cache_dir, settings=settings, model=arguments.model)
    except ValueError as error:
        sys.exit(str(error))
    print(folder)


if __name__ == "__main__":
    main()
