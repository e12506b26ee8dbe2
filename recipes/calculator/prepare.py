"""Prepare a run: rows, the tool, and a pretrained model that was fine-tuned on trees of solved tasks.

train.parquet validation.parquet    tasks as verl reads them
solved.parquet                      the trees
tools.yaml                          verl's tool config
model/                              the fine-tuned model
"""

from pathlib import Path

from recipes.demo.fine_tuning import TREES, fine_tune
from recipes.demo.prepare import prepare_once, run_command_line, say
from recipes.demo.settings import Settings

SETTINGS = Settings(warm_start=None, num_train_tasks=256, num_validation_tasks=32)
"""Numbers of tasks of each level."""
NUM_SOLVED = 128
"""Solved tasks of each level. After 80 or fewer, reinforcement taught it to call once (docs/log.md)."""
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "tasks", "system_prompt"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: `prepare_once` refuses the model, or there is none.
    """

    def build(folder: Path, _: Path) -> None:
        assert model is not None, "prepare_once refuses it"
        write_rows(folder, settings=settings)
        write_solved(folder, model, settings=settings)
        fine_tune(folder, model, batch_size=24)

    return prepare_once(cache_dir / "calculator", settings=settings, model=model, code=_CODE, build=build)


def write_rows(folder: Path, *, settings: Settings) -> None:
    """Write the rows of both splits and verl's tool config."""
    # Imported here, so that a second call, which makes nothing, takes no time.
    import pandas as pd

    from recipes.calculator.tasks import LEVELS, TRAINED, make_tasks
    from recipes.demo.tools import Calculator, write_tools

    for split, num_tasks, seed in settings.splits:
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
    write_tools(folder, [Calculator({"type": "native"})])


def write_solved(folder: Path, model: Path, *, settings: Settings) -> None:
    """Write a tree of each solved task, in the tokens of a model."""
    from recipes.calculator.tasks import TRAINED, make_tasks, solve
    from recipes.demo.leaves import Renderer
    from recipes.demo.solved_trees import stored_tree
    from recipes.demo.tools import Calculator
    from verl_tree.records import write_trees

    say(f"trees of {NUM_SOLVED} solved tasks of each of {len(TRAINED)} levels")
    calculator = Calculator({"type": "native"})
    renderer = Renderer.of_model(model, [calculator.tool_schema])
    seed = settings.warm_start_seed
    tasks = [task for level in TRAINED for task in make_tasks(NUM_SOLVED, level=level, seed=seed)]
    write_trees(
        folder / TREES,
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


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
