"""Prepare a run of the recipe: the demo's sums with this recipe's prompt, model and template.

Of a model of yours the files are linked; only its chat template is written anew, so that it drops earlier thinking.
"""

from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line
from recipes.demo.settings import Settings, WarmStartSettings

SETTINGS = Settings(warm_start=WarmStartSettings(num_sessions=10, num_skilled_steps=300))
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "solver", "template"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: As `prepare_once` does, or because the tokenizer of `model` has no chat template.
    """

    def build(folder: Path, final_folder: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        from recipes.demo.build_sums import teach_sums, write_sums
        from recipes.demo.warm_start import tree_loss
        from recipes.multi_turn_thinking.solver import SYSTEM_PROMPT, ThinkingSolver, build_thinking_tokenizer

        memory = write_sums(folder, final_folder=final_folder, settings=settings, system_prompt=SYSTEM_PROMPT)
        if model is not None:
            _link_model(folder / "model", model=model.resolve())
        else:
            tokenizer = build_thinking_tokenizer()
            # The leaves of a session share all but the thinking: on trees the steps take less than half the time.
            teach_sums(
                folder, tokenizer, memory=memory, settings=settings, solver=ThinkingSolver, compute_loss=tree_loss
            )

    return prepare_once(cache_dir / "multi_turn_thinking", settings=settings, model=model, code=_CODE, build=build)


def _link_model(folder: Path, *, model: Path) -> None:
    from transformers import AutoTokenizer

    from recipes.multi_turn_thinking.template import drop_thinking

    template = AutoTokenizer.from_pretrained(model).chat_template
    if not isinstance(template, str):
        raise ValueError(f"model={model}: its tokenizer has {type(template).__name__} for a chat template; give it one")
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    # transformers prefers this file to the template in tokenizer_config.json.
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(drop_thinking(template))


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
