"""Prepare a run of the recipe: tasks and, unless you bring one, the model."""

from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line, write_rows
from recipes.demo.settings import Settings, WarmStartSettings

SETTINGS = Settings(seed_step=1, warm_start=WarmStartSettings(num_skilled_steps=140))
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "solver", "tasks"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`."""

    def build(folder: Path, _: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        from recipes.memory_qa.solver import teach
        from recipes.memory_qa.tasks import DATA_SOURCE, make_tasks

        write_rows(
            folder,
            settings=settings,
            data_source=DATA_SOURCE,
            make_tasks=make_tasks,
            chat=lambda task: task.messages,
            extra_info=lambda task: {"inputs": list(task.inputs)},
        )
        if model is not None:
            (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
        else:
            teach(folder / "model", settings=settings)

    return prepare_once(cache_dir / "memory_qa", settings=settings, model=model, code=_CODE, build=build)


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
