"""Prepares a run of the recipe: what `arithmetic_tools` prepares, with this recipe's prompt, loop, model and template.

    python -m recipes.multi_turn_thinking.prepare                  the small model, warm-started in a minute or two
    python -m recipes.multi_turn_thinking.prepare --model PATH     a Hugging Face model folder of yours

prints the folder that holds them; progress goes to stderr. Of a model of yours the files are linked; only its chat
template is written anew, so that it drops earlier thinking.
"""

from dataclasses import replace
from pathlib import Path

from recipes.arithmetic_tools.prepare import CODE as ARITHMETIC_CODE
from recipes.arithmetic_tools.prepare import teach_tools, write_tasks
from recipes.arithmetic_tools.settings import Settings
from recipes.multi_turn_thinking.settings import default_settings
from recipes.prepared import build_once, cache_key, check_model, run_command_line, write_loop

DEFAULT_CACHE_DIR = Path(".cache/multi_turn_thinking")
_OWN_CODE = ("prepare", "settings", "solver", "tokenizer", "warm_start")
_CODE = (*ARITHMETIC_CODE, *(Path(__file__).with_name(f"{name}.py") for name in _OWN_CODE))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Makes what a run needs unless `cache_dir` has it.

    Args:
        cache_dir: where prepared folders are kept.
        settings: what to make; without a model, with a warm start.
        model: a Hugging Face model folder to train instead of a new one; its files are linked.

    Returns:
        The prepared folder, an absolute path.

    Raises:
        ValueError: when `model` is not such a folder, its tokenizer has no chat template, or neither a model nor a warm
            start is given.
    """
    check_model(model, settings=settings)
    folder = cache_dir.resolve() / cache_key(settings, model=model, code=_CODE)
    return build_once(
        folder, build=lambda building: _build(building, final_folder=folder, settings=settings, model=model)
    )


def _build(folder: Path, *, final_folder: Path, settings: Settings, model: Path | None) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    from recipes.multi_turn_thinking.tokenizer import SYSTEM_PROMPT, build_tokenizer

    memory = write_tasks(folder, final_folder=final_folder, settings=settings, system_prompt=SYSTEM_PROMPT)
    write_loop(folder, name="rendered_tools", target="recipes.multi_turn_thinking.loop.RenderedToolsLoop")
    if model is not None:
        _link_model(folder / "model", model=model.resolve())
    else:
        from recipes.multi_turn_thinking.warm_start import warm_start

        teach_tools(folder, memory=memory, settings=settings, tokenizer=build_tokenizer(), warm_start=warm_start)


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


def prepare_default(cache_dir: Path, model: Path | None) -> Path:
    """Prepares with the default settings: the given model, or the small one."""
    settings = default_settings()
    return prepare(cache_dir, settings=settings if model is None else replace(settings, warm_start=None), model=model)


if __name__ == "__main__":
    run_command_line(__doc__, cache_dir=DEFAULT_CACHE_DIR, prepare=prepare_default)
