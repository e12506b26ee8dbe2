"""Prepare the two sums, which several recipes train on.

train.parquet validation.parquet    tasks as verl reads them
memory.sqlite                       what the lookup tool reads
tools.yaml                          verl's tool config
model/                              a Hugging Face model folder with its tokenizer
"""

from pathlib import Path

from recipes.demo.prepare import prepare_once
from recipes.demo.settings import Settings


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`."""

    def build(folder: Path, final_folder: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        from recipes.demo.build_sums import teach_sums, write_sums
        from recipes.demo.solver import Solver
        from recipes.demo.tasks import SYSTEM_PROMPT
        from recipes.demo.tokenizer import build_tokenizer

        memory = write_sums(folder, final_folder=final_folder, settings=settings, system_prompt=SYSTEM_PROMPT)
        if model is not None:
            (folder / "model").symlink_to(model.resolve(), target_is_directory=True)
        else:
            teach_sums(folder, build_tokenizer(), memory=memory, settings=settings, solver=Solver)

    return prepare_once(cache_dir / "demo", settings=settings, model=model, build=build)
