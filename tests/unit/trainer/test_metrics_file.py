"""The file of verl's logger over several starts, with verl's logger itself."""

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf
from verl.utils.tracking import FileLogger

from verl_tree.trainer.starts.metrics_file import EarlierMetrics, path_of


def log(path: Path, steps: range, monkeypatch: pytest.MonkeyPatch, *, last_step: int) -> None:
    """Log as one start does, which goes on from a step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(path))
    earlier = EarlierMetrics.take(path, last_step=last_step)
    logger = FileLogger("project", "name")
    if earlier is not None:
        earlier.write_back(logger.fp)
    for step in steps:
        logger.log({"first": steps[0]}, step=step)
    logger.finish()


def logged(path: Path) -> list[tuple[int, int]]:
    """Return the step and the first step of the start of each line."""
    return [(line["step"], line["data"]["first"]) for line in map(json.loads, path.read_text().splitlines())]


def test_a_resumed_run_goes_on_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, range(1, 6), monkeypatch, last_step=0)
    with path.open("a") as file:
        file.write('{"step":6,"da')  # killed while it wrote
    log(path, range(4, 7), monkeypatch, last_step=3)
    assert logged(path) == [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4)]
    later = tmp_path / "metrics.earlier_1.jsonl"
    assert logged(later) == [(4, 1), (5, 1)]
    assert f"now in {later}" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == [later.name, "metrics.jsonl"]


def test_a_start_that_dies_before_the_lines_are_back_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log(path, range(1, 4), monkeypatch, last_step=0)
    EarlierMetrics.take(path, last_step=3)
    FileLogger("project", "name").finish()
    assert logged(path) == []
    log(path, range(4, 6), monkeypatch, last_step=3)
    assert logged(path) == [(1, 1), (2, 1), (3, 1), (4, 4), (5, 4)]


def test_a_new_beginning_keeps_the_old_file_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    for start in (1, 2, 3):
        log(path, range(start, 5), monkeypatch, last_step=0)
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files == ["metrics.earlier_1.jsonl", "metrics.earlier_2.jsonl", "metrics.jsonl"]
    assert [logged(tmp_path / name)[0] for name in files] == [(1, 1), (2, 2), (3, 3)]
    assert f"now in {tmp_path}/metrics.earlier_2.jsonl" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", None])
def test_it_is_the_file_that_verls_logger_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(each, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, str(tmp_path / "there"))
    names = {"project_name": "project", "experiment_name": "name"}
    config = OmegaConf.create({"trainer": {**names, "logger": ["console", "file"]}})
    logger = FileLogger("project", "name")
    logger.finish()
    assert path_of(config) == Path(logger.filepath)
    assert path_of(OmegaConf.merge(config, {"trainer": {"logger": "file"}})) == Path(logger.filepath)
    assert path_of(OmegaConf.merge(config, {"trainer": {"logger": ["console"]}})) is None
