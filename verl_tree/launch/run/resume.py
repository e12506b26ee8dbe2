"""How to go on with a training run that did not come to its end."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omegaconf import DictConfig

from verl_tree.trainer.starts.checkpoints import choose_start, folder_of


def resume_hint(config: DictConfig) -> str:
    """Return a line with the newest checkpoint of a run that was interrupted or failed, and how to go on from it."""
    root, mode = folder_of(config), config.trainer.resume_mode
    try:
        checkpoint = choose_start(root).checkpoint
    except ValueError as error:
        return f"To resume: {error}."
    if checkpoint is None:
        saves = "" if config.trainer.save_freq > 0 else f" (trainer.save_freq={config.trainer.save_freq} saves none)"
        return f"To resume: there is no checkpoint in {root}{saves}; the same command starts from the beginning."
    how = "the same command" if mode == "auto" else "the same command with trainer.resume_mode=auto"
    return f"To resume: {how} goes on from {checkpoint.folder}."


@contextmanager
def saying_how_to_resume(config: DictConfig) -> Iterator[None]:
    """Make the resume hint the last line of what the body ends with: an error, an interrupt or an exit."""
    try:
        yield
    except SystemExit:
        print(resume_hint(config), file=sys.stderr)
        raise
    except (Exception, KeyboardInterrupt) as error:
        error.add_note(resume_hint(config))
        raise
