"""The last line of a run that did not come to its end."""

import traceback
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.run.resume import resume_hint, saying_how_to_resume
from verl_tree.trainer.starts.checkpoints import TRACKER, mark_complete


def config_of(root: Path, *, mode: str = "auto", save_freq: int = 2) -> DictConfig:
    trainer = {"default_local_dir": str(root), "resume_mode": mode, "save_freq": save_freq}
    return OmegaConf.create({"trainer": trainer})


def save(root: Path, step: int, *, is_complete: bool) -> None:
    folder = root / f"global_step_{step}"
    folder.mkdir()
    (folder / "data.pt").write_text("data")
    if is_complete:
        (root / TRACKER).write_text(str(step))
        mark_complete(folder, step=step)


def test_it_names_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 2, is_complete=True)
    save(tmp_path, 4, is_complete=False)
    there = f"goes on from {tmp_path}/global_step_2."
    assert resume_hint(config_of(tmp_path)) == f"To resume: the same command {there}"
    for mode in ("disable", "resume_path"):
        assert resume_hint(config_of(tmp_path, mode=mode)) == (
            f"To resume: the same command with trainer.resume_mode=auto {there}"
        )


def test_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    start = "the same command starts from the beginning."
    assert resume_hint(config_of(tmp_path)) == f"To resume: there is no checkpoint in {tmp_path}; {start}"
    assert resume_hint(config_of(tmp_path, save_freq=-1)) == (
        f"To resume: there is no checkpoint in {tmp_path} (trainer.save_freq=-1 saves none); {start}"
    )


def test_a_broken_tracker_is_no_second_error(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("")
    assert resume_hint(config_of(tmp_path)).startswith(f"To resume: {tmp_path}/{TRACKER} is empty; ")


@pytest.mark.parametrize("error", [RuntimeError("cause"), KeyboardInterrupt()])
def test_it_is_the_last_line_of_an_error(tmp_path: Path, error: BaseException) -> None:
    config = config_of(tmp_path)
    with pytest.raises(type(error)) as raised, saying_how_to_resume(config):
        raise error
    assert traceback.format_exception(raised.value)[-1] == f"{resume_hint(config)}\n"


def test_it_is_printed_before_an_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    with pytest.raises(SystemExit), saying_how_to_resume(config):
        raise SystemExit(143)
    assert capsys.readouterr().err == f"{resume_hint(config)}\n"
