"""Fine-tune a model on stored trees before its reinforcement: what recipes with a pretrained model have in common."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.demo.prepare import say

TREES = "solved.parquet"
"""The file of a prepared folder."""
_OPTIONS = (
    "optim.lr=5e-5",
    "optim.lr_scheduler_type=cosine",
    "optim.min_lr_ratio=0.1",
    "trainer.save_freq=after_each_epoch",
    "trainer.max_ckpt_to_keep=1",
    "checkpoint.save_contents=[hf_model]",
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
)
_STEP = re.compile(r"step:(\d+) .*train/loss:([\d.e-]+)")


def fine_tune(folder: Path, model: Path, *, batch_size: int, num_epochs: int = 1) -> None:
    """Train a copy of a Hugging Face model folder on `TREES` of the folder, and write it as `model` beside it.

    Args:
        folder: Being prepared.
        model: Stays as it is.
        batch_size: Rows of a step, on average.
        num_epochs: Over all trees.

    Raises:
        ValueError: The training failed; with the end of what it said.
    """
    say("fine-tuning on trees (once; kept for later runs)")
    checkpoints = folder / "checkpoints"
    given = (
        f"data.train_files={folder / TREES}",
        f"data.train_batch_size={batch_size}",
        f"model.path={model.resolve()}",
        f"trainer.total_epochs={num_epochs}",
        f"trainer.default_local_dir={checkpoints}",
    )
    command = [sys.executable, "-m", "verl_tree.main_sft", *given, *_OPTIONS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as training:
        assert training.stdout is not None
        lines = []
        for line in training.stdout:
            lines.append(line)
            if found := _STEP.search(line):
                say(f"  step {found[1]}: loss {float(found[2]):.3f}")
    if training.returncode:
        raise ValueError(f"model={model}: the fine-tuning ended with {training.returncode}:\n{''.join(lines[-40:])}")
    last = max(checkpoints.glob("global_step_*/huggingface"), key=lambda path: path.stat().st_mtime)
    last.rename(folder / "model")
    shutil.rmtree(checkpoints)
