"""Prepare a run: rows and, unless you bring one, the small model, taught by scripted turns of the real agent."""

from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line, write_rows
from recipes.demo.settings import Settings, WarmStartSettings

SETTINGS = Settings(warm_start=WarmStartSettings(num_skilled_steps=200), num_train_tasks=512, num_validation_tasks=32)
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "solver", "bugs", "agent"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: `prepare_once` refuses the model; or the package mini-swe-agent is missing.
    """

    def build(folder: Path, _: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        from recipes.coding_agent.agent import TEMPLATES
        from recipes.coding_agent.bugs import TASK, make_bugs
        from recipes.coding_agent.solver import teach

        # The agent writes its messages itself; these are the first two.
        prompt = [{"role": "system", "content": TEMPLATES["system_template"]}, {"role": "user", "content": TASK}]
        write_rows(
            folder,
            settings=settings,
            data_source="coding_agent",
            make_tasks=make_bugs,
            chat=lambda _: prompt,
            extra_info=lambda bug: {"seed": bug.seed},
        )
        if model is not None:
            (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
        else:
            teach(folder / "model", settings=settings)

    return prepare_once(cache_dir / "coding_agent", settings=settings, model=model, code=_CODE, build=build)


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
