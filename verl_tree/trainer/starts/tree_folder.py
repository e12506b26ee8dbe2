"""The folder of a run's trees and pages: whose it is, and what earlier starts left there.

A file `run.json` says which run writes there. What it is compared by is the folder of the run's checkpoints.
"""

import json
import logging
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from omegaconf import DictConfig

from verl_tree.trainer.starts.checkpoints import folder_of

logger = logging.getLogger(__name__)

OWNER = "run.json"
_FILE = re.compile(r"(?:step|val)_(\d+)(?:_\d+)?\.(?:parquet|html)")


def other_owner(folder: Path, *, config: DictConfig) -> Mapping[str, str] | None:
    """Return what `run.json` says of the other run that writes to a folder; None if there is none."""
    owner = _read_owner(folder)
    return None if owner is None or owner.get("checkpoints") == str(folder_of(config)) else owner


def _read_owner(folder: Path) -> dict[str, str] | None:
    try:
        owner = json.loads((folder / OWNER).read_text())
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def take_over(folder: Path, *, config: DictConfig, last_step: int) -> None:
    """Make a folder the run's own before it writes there; a failure is only warned of.

    Files of steps after `last_step`, which the run goes on from, are those of an earlier start. They are moved into a
    folder `earlier_1`, or the next number that is free, so that no step has two meanings. 0 is a new beginning: then
    all files are.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        moved = _move_aside(folder, last_step=last_step)
        owner = _read_owner(folder)
        if last_step == 0 or owner is None or other_owner(folder, config=config) is not None:
            names = {
                "project": config.trainer.project_name,
                "experiment": config.trainer.experiment_name,
                "checkpoints": str(folder_of(config)),
                "first_start": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            (folder / OWNER).write_text(json.dumps(names, indent=1))
    except OSError as error:
        logger.warning("%s: files of an earlier start may be among this one's (%s)", folder, error)
        return
    if moved is not None:
        print(f"trees: files of steps after {last_step}, of an earlier start, are now in {moved}", flush=True)


def _move_aside(folder: Path, *, last_step: int) -> Path | None:
    """Move the files of later steps, and return where they are; None if there are none."""
    files = [(path, match) for path in sorted(folder.iterdir()) if (match := _FILE.fullmatch(path.name))]
    later = [path for path, match in files if last_step == 0 or int(match[1]) > last_step]
    if not later:
        return None
    number = 1
    while (aside := folder / f"earlier_{number}").exists():
        number += 1
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    return aside
