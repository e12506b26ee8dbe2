"""Prepare a run: rows, the tool, and a pretrained model that was fine-tuned on trees of solved tasks.

train.parquet validation.parquet    tasks as verl reads them
solved.parquet                      the trees
tools.yaml                          verl's tool config
model/                              the fine-tuned model
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from recipes.demo.prepare import prepare_once, run_command_line, say
from recipes.demo.settings import Settings

SETTINGS = Settings(warm_start=None, num_train_tasks=256, num_validation_tasks=16)
"""Numbers of tasks of each level."""
NUM_SOLVED = 48
"""Solved tasks of each level: few, so that the format is learnt and the choices are not."""
FINE_TUNING = (
    "data.train_batch_size=24",
    "optim.lr=5e-5",
    "optim.lr_scheduler_type=cosine",
    "optim.min_lr_ratio=0.1",
    "trainer.total_epochs=1",
    "trainer.save_freq=after_each_epoch",
    "checkpoint.save_contents=[hf_model]",
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
)
_STEP = re.compile(r"step:(\d+) .*train/loss:([\d.e-]+)")
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "tasks", "system_prompt"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: No model is given, or `prepare_once` refuses it.
    """
    if model is None:
        raise ValueError("--model: the task needs a pretrained model; give the folder recipes.smollm.prepare prints")

    def build(folder: Path, _: Path) -> None:
        write_rows(folder, settings=settings)
        write_solved(folder, model, settings=settings)
        _fine_tune(folder, model)

    return prepare_once(cache_dir / "calculator", settings=settings, model=model, code=_CODE, build=build)


def write_rows(folder: Path, *, settings: Settings) -> None:
    """Write the rows of both splits and verl's tool config."""
    # Imported here, so that a second call, which makes nothing, takes no time.
    import pandas as pd
    import yaml

    from recipes.calculator.tasks import LEVELS, TRAINED, make_tasks
    from recipes.demo.tools import Calculator

    for split, num_tasks, seed in (
        ("train", settings.num_train_tasks, settings.train_seed),
        ("validation", settings.num_validation_tasks, settings.validation_seed),
    ):
        levels = TRAINED if split == "train" else LEVELS
        tasks = [task for level in levels for task in make_tasks(num_tasks, level=level, seed=seed)]
        rows = [
            {
                "data_source": task.level,
                "prompt": task.messages,
                "reward_model": {"style": "rule", "ground_truth": task.answer},
                "extra_info": {"split": split, "index": index},
            }
            for index, task in enumerate(tasks)
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    tool = {"class_name": f"{Calculator.__module__}.{Calculator.__qualname__}", "config": {"type": "native"}}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool]}))


def write_solved(folder: Path, model: Path, *, settings: Settings) -> None:
    """Write a tree of each solved task, in the tokens of a model."""
    from transformers import AutoConfig, AutoTokenizer

    from recipes.calculator.tasks import FINE_TUNED, make_tasks, solve
    from recipes.demo.leaves import Renderer
    from recipes.demo.solved_trees import stored_tree
    from recipes.demo.tools import Calculator
    from verl_tree.records import write_trees

    say(f"trees of {NUM_SOLVED} solved tasks of each of {len(FINE_TUNED)} levels")
    calculator = Calculator({"type": "native"})
    model_type = AutoConfig.from_pretrained(model).model_type
    renderer = Renderer(AutoTokenizer.from_pretrained(model), [calculator.tool_schema], model_type=model_type)
    seed = settings.warm_start_seed
    tasks = [task for level in FINE_TUNED for task in make_tasks(NUM_SOLVED, level=level, seed=seed)]
    write_trees(
        folder / "solved.parquet",
        [
            stored_tree(
                task.messages,
                [solve(task, calculator=calculator)],
                answer=task.answer,
                uid=str(number),
                renderer=renderer,
            )
            for number, task in enumerate(tasks)
        ],
    )


def _fine_tune(folder: Path, model: Path) -> None:
    say("fine-tuning on the trees (once; kept for later runs)")
    given = (f"data.train_files={folder}/solved.parquet", f"model.path={model.resolve()}")
    checkpoints = folder / "checkpoints"
    command = [sys.executable, "-m", "verl_tree.main_sft", *given, f"trainer.default_local_dir={checkpoints}"]
    with subprocess.Popen(
        [*command, *FINE_TUNING], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as training:
        assert training.stdout is not None
        lines = []
        for line in training.stdout:
            lines.append(line)
            if found := _STEP.search(line):
                say(f"  step {found[1]}: loss {float(found[2]):.3f}")
    if training.returncode:
        raise ValueError(f"the fine-tuning ended with {training.returncode}:\n{''.join(lines[-40:])}")
    (saved,) = checkpoints.glob("global_step_*/huggingface")
    saved.rename(folder / "model")
    shutil.rmtree(checkpoints)


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
