"""Prepare a run: rows of GSM8K that verl has prepared, or the stand-in's problems and its small model."""

from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line, say, write_rows
from recipes.demo.settings import Settings, WarmStartSettings

SETTINGS = Settings(seed_step=1, warm_start=WarmStartSettings(num_sessions=32, num_skilled_steps=160))
VALIDATION_LOOP = "one_chain"
"""Validation rows name it: verl reports the last leaf of a session, and that of a search is whatever came last."""
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "problems", "teach"))
_FILES = ("train.parquet", "test.parquet")


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None, data: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Args:
        cache_dir: Below it the folder is made.
        settings: Sizes of the stand-in and its model.
        model: A Hugging Face model folder to train instead of the small model.
        data: The folder that verl's preparation of GSM8K wrote, instead of the stand-in.

    Raises:
        ValueError: As `prepare_once` does, a file of `data` is missing, or `data` is given without a model.
    """
    files = () if data is None else tuple(data.resolve() / name for name in _FILES)
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        made_by = "verl's examples/data_preprocess/gsm8k.py --local_save_dir writes it"
        raise ValueError(f"data={data}: no {', '.join(missing)}; {made_by}")
    if data is not None and model is None:
        raise ValueError(f"data={data}: the small model knows the stand-in's problems only; give a model as well")

    def build(folder: Path, _: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        import pandas as pd

        if files:
            train, validation = files
            (folder / "train.parquet").symlink_to(train)
        else:
            say("a stand-in for GSM8K: problems that code has drawn")
            _write_stand_in(folder, settings=settings)
            validation = folder / "validation.parquet"
        rows = pd.read_parquet(validation)
        rows.assign(agent_name=VALIDATION_LOOP).to_parquet(folder / "validation.parquet")
        if model is not None:
            (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
        else:
            from recipes.gsm8k.teach import teach

            teach(folder / "model", settings=settings)

    return prepare_once(cache_dir / "gsm8k", settings=settings, model=model, code=(*_CODE, *files), build=build)


def _write_stand_in(folder: Path, *, settings: Settings) -> None:
    from recipes.gsm8k.problems import DATA_SOURCE, make_problems

    write_rows(
        folder,
        settings=settings,
        data_source=DATA_SOURCE,
        make_tasks=make_problems,
        chat=lambda problem: problem.messages,
    )


if __name__ == "__main__":
    run_command_line(
        prepare,
        settings=SETTINGS,
        folders={"data": "what verl's preparation of GSM8K wrote (train.parquet, test.parquet), with --model"},
    )
