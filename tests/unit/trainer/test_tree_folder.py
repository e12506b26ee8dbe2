"""A folder of trees: whose it is, and what becomes of files of earlier starts."""

import json
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_tree.trainer.starts.tree_folder import OWNER, other_owner, take_over

NAMES = ["step_000001.parquet", "step_000002.parquet", "step_000003.parquet", "val_000002.parquet", "val_000003_0.html"]


def config_of(checkpoints: Path) -> DictConfig:
    names = {"project_name": "project", "experiment_name": "name", "default_local_dir": str(checkpoints)}
    return OmegaConf.create({"trainer": names})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with what a run of three steps has stored and shown, and a file of the user's."""
    folder = tmp_path / "trees"
    take_over(folder, config=config_of(tmp_path / "checkpoints"), last_step=0)
    for name in [*NAMES, "notes.txt"]:
        (folder / name).write_text("first")
    return folder


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.is_file() and each.name != OWNER)


def test_a_resumed_run_moves_the_later_steps_aside(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = (folder / OWNER).read_text()
    take_over(folder, config=config_of(tmp_path / "checkpoints"), last_step=2)
    assert names_in(folder) == ["notes.txt", "step_000001.parquet", "step_000002.parquet", "val_000002.parquet"]
    assert names_in(folder / "earlier_1") == ["step_000003.parquet", "val_000003_0.html"]
    assert f"after 2, of an earlier start, are now in {folder}/earlier_1" in capsys.readouterr().out
    assert (folder / OWNER).read_text() == owner, "its first start stays"


def test_a_new_beginning_moves_all_steps_aside(folder: Path, tmp_path: Path) -> None:
    take_over(folder, config=config_of(tmp_path / "checkpoints"), last_step=2)
    take_over(folder, config=config_of(tmp_path / "checkpoints"), last_step=0)
    assert names_in(folder) == ["notes.txt"]
    assert len(names_in(folder / "earlier_2")) == 3
    assert names_in(folder / "earlier_1") == ["step_000003.parquet", "val_000003_0.html"]


def test_the_folder_says_whose_it_is(folder: Path, tmp_path: Path) -> None:
    assert other_owner(folder, config=config_of(tmp_path / "checkpoints")) is None
    owner = other_owner(folder, config=config_of(tmp_path / "others"))
    assert owner is not None
    assert owner["checkpoints"] == f"{tmp_path}/checkpoints"
    assert (owner["project"], owner["experiment"]) == ("project", "name")
    assert other_owner(tmp_path, config=config_of(tmp_path)) is None, "a folder that nobody owns"
    (folder / OWNER).write_text("[")
    assert other_owner(folder, config=config_of(tmp_path / "others")) is None


def test_a_folder_of_another_run_becomes_this_ones(folder: Path, tmp_path: Path) -> None:
    """The check before the start refuses it; where that could not look, files do not mix."""
    take_over(folder, config=config_of(tmp_path / "others"), last_step=0)
    assert names_in(folder) == ["notes.txt"]
    assert json.loads((folder / OWNER).read_text())["checkpoints"] == f"{tmp_path}/others"


def test_a_folder_that_cannot_be_written_to_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    take_over(tmp_path / "file" / "trees", config=config_of(tmp_path), last_step=0)
    assert f"{tmp_path}/file/trees: files of an earlier start may be among this one's" in caplog.text
