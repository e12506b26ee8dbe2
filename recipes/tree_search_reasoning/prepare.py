"""Prepare a run: links to the demo's sums and model, and validation rows that name the loop `plain`."""

import hashlib
from pathlib import Path

from recipes.demo import sums
from recipes.demo.prepare import build_once, run_command_line
from recipes.demo.settings import Settings


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None = None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`."""
    given = sums.prepare(cache_dir, settings=settings, model=model)

    def build(folder: Path, _: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        import pandas as pd

        for name in ("train.parquet", "memory.sqlite", "tools.yaml", "model"):
            (folder / name).symlink_to(given / name)
        # verl reports the last leaf of a session, and that of a search is whatever was expanded last.
        validation = pd.read_parquet(given / "validation.parquet")
        validation.assign(agent_name="plain").to_parquet(folder / "validation.parquet")

    code = hashlib.sha256(Path(__file__).read_bytes() + str(given).encode())
    return build_once(cache_dir.resolve() / "tree_search_reasoning" / code.hexdigest()[:12], build=build)


if __name__ == "__main__":
    run_command_line(prepare, settings=Settings())
