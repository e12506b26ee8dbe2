"""Prepare a run: links to the demo's sums and model, validation rows that name the loop `plain`, and a small judge."""

import hashlib
from dataclasses import replace
from pathlib import Path

from recipes.demo import sums
from recipes.demo.prepare import build_once, run_command_line
from recipes.demo.settings import Settings, WarmStartSettings

JUDGE = WarmStartSettings(num_sessions=8, num_skilled_steps=200, num_mixed_steps=0)
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "judge", "teach_judge"))


def prepare(
    cache_dir: Path, *, settings: Settings, model: Path | None = None, judge: WarmStartSettings = JUDGE
) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Where a warm start makes the model, ``judge/`` is made as well, as `judge` says. A judge for a model of yours is
    yours, too: the small one reads the small model's texts only.
    """
    given = sums.prepare(cache_dir, settings=settings, model=model)

    def build(folder: Path, _: Path) -> None:
        # Imported here, so that a second call, which makes nothing, takes no time.
        import pandas as pd

        for name in ("train.parquet", "memory.sqlite", "tools.yaml", "model"):
            (folder / name).symlink_to(given / name)
        # verl reports the last leaf of a session, and that of a search is whatever was expanded last.
        validation = pd.read_parquet(given / "validation.parquet")
        validation.assign(agent_name="plain").to_parquet(folder / "validation.parquet")
        if settings.warm_start is not None:
            from recipes.tree_search_reasoning.teach_judge import teach_judge

            teach_judge(folder / "judge", memory=given / "memory.sqlite", settings=replace(settings, warm_start=judge))

    code = hashlib.sha256(f"{given} {judge}".encode())
    for path in _CODE:
        code.update(path.read_bytes())
    return build_once(cache_dir.resolve() / "tree_search_reasoning" / code.hexdigest()[:12], build=build)


if __name__ == "__main__":
    run_command_line(prepare, settings=Settings())
