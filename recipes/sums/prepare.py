"""Prepare a run: rows of reasoning-gym's `chain_sum` from easy to hard, and a pretrained model."""

from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line
from recipes.demo.settings import Settings

SETTINGS = Settings(warm_start=None, num_train_tasks=128, num_validation_tasks=32)
"""Numbers of tasks of each level."""
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "tasks"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: `prepare_once` refuses the model, or there is none.
    """

    def build(folder: Path, _: Path) -> None:
        assert model is not None, "prepare_once refuses it"
        # Imported here, so that a second call, which makes nothing, takes no time.
        import pandas as pd

        from recipes.sums.tasks import make_rows

        for split, num_rows, seed in settings.splits:
            pd.DataFrame(make_rows(num_rows, seed=seed, split=split)).to_parquet(folder / f"{split}.parquet")
        (folder / "model").symlink_to(model.resolve(), target_is_directory=True)

    return prepare_once(cache_dir / "sums", settings=settings, model=model, code=_CODE, build=build)


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
