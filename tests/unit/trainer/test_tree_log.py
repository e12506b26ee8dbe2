"""What the tree log writes, and when."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

from omegaconf import OmegaConf

from verl_tree.records import StoredLeaf, StoredTree, read_trees
from verl_tree.trainer.told.tree_log import NUM_SHOWN, TreeLog, When


def tree_of(uid: str) -> StoredTree:
    """Make a tree of one leaf: the prompt 1 2, and one token that names the group."""
    mask = np.array([False, False, True])
    leaf = StoredLeaf(0, 0, np.array([1, 2, ord(uid)]), 2, is_trained=mask, log_probs=np.array([np.nan, np.nan, -1.0]))
    return StoredTree(step=0, uid=uid, leaves=(leaf,))


TRAINED = [tree_of(uid) for uid in "abcdef"]
VALIDATED = [tree_of(uid) for uid in "xy"]


def log_of(tmp_path: Path, **options: Any) -> TreeLog:
    trainer = {"default_local_dir": str(tmp_path / "checkpoints")}
    return TreeLog.from_config(
        OmegaConf.create({"tree": {"dump_dir": None, "show_every": 0} | options, "trainer": trainer})
    )


def log_run(log: TreeLog, steps: range, *, validates: bool) -> None:
    """Log what is wanted of the steps of a training run, as the trainer does. A step takes longer than its files."""
    for step in steps:
        for trees, is_validation in ((TRAINED, False), (VALIDATED, True)):
            when = When(step=step, is_last=step == steps[-1], is_validation=is_validation)
            if log.wants(when) and (validates or not is_validation):
                log.log(trees, when, tokenizer=None, wandb=None)
        log.files.wait()


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_folder_gets_a_file_a_step_and_a_validation(tmp_path: Path) -> None:
    log_run(log_of(tmp_path, dump_dir=str(tmp_path / "trees")), range(10, 11), validates=True)
    assert names(tmp_path) == ["trees/step_000010.parquet", "trees/val_000010.parquet"]
    assert [tree.uid for tree in read_trees(tmp_path / "trees/step_000010.parquet")] == list("abcdef")
    assert [tree.uid for tree in read_trees(tmp_path / "trees/val_000010.parquet")] == ["x", "y"]


def test_without_options_nothing_is_wanted(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    assert not any(log.wants(When(5, is_last, is_validation)) for is_last in (0, 1) for is_validation in (0, 1))


def test_pages_are_shown_first_then_rarely_then_last(tmp_path: Path) -> None:
    """Training and validations are counted apart; each show has at most `NUM_SHOWN` pages."""
    log = log_of(tmp_path, show_every=20)
    log_run(log, range(0, 49, 8), validates=True)
    shown = ["000000", "000024", "000048"]
    assert names(tmp_path) == [
        *(f"checkpoints/trees/step_{step}_{n}.html" for step in shown for n in range(NUM_SHOWN)),
        *(f"checkpoints/trees/val_{step}_{n}.html" for step in shown for n in range(2)),
    ]
    assert "123" not in (tmp_path / "checkpoints/trees/val_000000_0.html").read_text().split('id="content">')[0]


def test_a_validation_hides_no_training_step(tmp_path: Path) -> None:
    """A validation before training, as verl's default is, and then one at the end."""
    log = log_of(tmp_path, show_every=3)
    before = When(step=0, is_last=False, is_validation=True)
    assert log.wants(before)
    log.log(VALIDATED, before, tokenizer=None, wandb=None)
    log_run(log, range(1, 6), validates=False)
    last = When(step=5, is_last=True, is_validation=True)
    log.log(VALIDATED, last, tokenizer=None, wandb=None)
    log.files.wait()
    assert [name.rsplit("/")[-1] for name in names(tmp_path)] == [
        *(f"step_{step}_{n}.html" for step in ("000001", "000004", "000005") for n in range(NUM_SHOWN)),
        *(f"val_{step}_{n}.html" for step in ("000000", "000005") for n in range(2)),
    ]


def test_wandb_gets_a_table_with_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    wandb.init(project="test", mode="offline", dir=tmp_path, settings=wandb.Settings(console="off"))
    try:
        when = When(step=7, is_last=False, is_validation=False)
        log_of(tmp_path, show_every=1).log(TRAINED, when, tokenizer=None, wandb=wandb)
        media = Path(wandb.run.dir) / "media"
        (table,) = media.rglob("*.table.json")
        content = json.loads(table.read_text())
        assert content["columns"][:2] == ["step", "uid"]
        assert content["columns"][-1] == "tree"
        assert [row[:4] for row in content["data"]] == [[7, uid, 1, 3] for uid in "abcd"]
        # wandb keeps what is in a table's cells in the table's artifact.
        staged = [path.read_text() for path in (tmp_path / "artifacts" / "staging").iterdir()]
        pages = [text for text in staged if text.startswith("<!DOCTYPE html>")]
        assert len(pages) == NUM_SHOWN
        assert all("default-src 'none'" in page for page in pages)
    finally:
        wandb.finish()


def test_a_folder_that_cannot_be_written_to_ends_no_training_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file stands where the folder of trees and pages was."""
    (tmp_path / "trees").write_text("")
    log = log_of(tmp_path, dump_dir=str(tmp_path / "trees" / "run"), show_every=1)
    log_run(log, range(5, 7), validates=True)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 8, "trees and pages of two steps and of two validations"
    assert messages[0].startswith(f"{tmp_path}/trees/run/step_000005.parquet: not written ([Errno 20] Not a directory")
    assert "tree.dump_dir" in messages[0]
    assert "tree.show_every=0" in messages[1]
    assert capsys.readouterr().out == ""


def test_the_log_says_once_where_the_pages_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log_run(log_of(tmp_path, show_every=1), range(1, 4), validates=True)
    pages = {name: tmp_path / f"checkpoints/trees/{name}_000001_0.html" for name in ("step", "val")}
    assert capsys.readouterr().out.splitlines() == [
        f"pages of training trees, to be opened in a browser: {pages['step']} and more beside it",
        f"pages of validation trees, to be opened in a browser: {pages['val']} and more beside it",
    ]
    assert all(page.exists() for page in pages.values())
