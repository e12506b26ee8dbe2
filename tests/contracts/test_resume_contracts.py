"""What the starts and ends of a run rely on in verl 0.9.1: its tracker and its file logger."""

import os
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.utils.tracking import FileLogger

from verl_tree.trainer.starts.checkpoints import TRACKER


def test_verl_starts_from_the_beginning_where_its_tracker_names_nothing(tmp_path: Path) -> None:
    """If it refuses by itself one day, `choose_start` need not."""
    assert get_checkpoint_tracker_filename(str(tmp_path)) == os.path.join(tmp_path, TRACKER)
    assert find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / TRACKER).write_text("4")
    assert find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ValueError, match="invalid literal"):
        find_latest_ckpt_path(str(tmp_path))
    (tmp_path / TRACKER).write_text("4\n")
    (tmp_path / "global_step_4").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_4")


def test_verls_file_logger_empties_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it appends one day, `metrics_file` must not write lines back."""
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    path.write_text("old\n")
    logger = FileLogger("project", "name")
    assert path.read_bytes() == b""
    logger.fp.write(b"kept\n")
    logger.log({"a": 1}, step=3)
    logger.finish()
    assert path.read_bytes() == b'kept\n{"step":3,"data":{"a":1}}\n'
