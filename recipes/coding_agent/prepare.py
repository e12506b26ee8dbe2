"""Prepare a run: rows, and a pretrained model that was fine-tuned on trees of solved tasks.

train.parquet validation.parquet    a row for each task, as verl reads them
solved.parquet                      the trees
model/                              the fine-tuned model
"""

import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.demo.fine_tuning import TREES, fine_tune
from recipes.demo.prepare import prepare_once, run_command_line
from recipes.demo.settings import Settings

if TYPE_CHECKING:
    from recipes.coding_agent.bugs import Bug
    from recipes.demo.leaves import Leaf, Renderer

SETTINGS = Settings(warm_start=None, num_train_tasks=256, num_validation_tasks=32)
"""Numbers of tasks of each level."""
NUM_SOLVED = 128
"""Solved tasks, which are others than those of the rows."""
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "bugs", "agent"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: `prepare_once` refuses the model, or there is none; or the package mini-swe-agent is missing.
    """

    def build(folder: Path, _: Path) -> None:
        assert model is not None, "prepare_once refuses it"
        write_rows(folder, settings=settings)
        write_solved(folder, model, settings=settings)
        fine_tune(folder, model, batch_size=12)

    return prepare_once(cache_dir / "coding_agent", settings=settings, model=model, code=_CODE, build=build)


def write_rows(folder: Path, *, settings: Settings) -> None:
    """Write the rows of both splits."""
    # Imported here, so that a second call, which makes nothing, takes no time.
    import pandas as pd

    from recipes.coding_agent.agent import TEMPLATES
    from recipes.coding_agent.bugs import LEVELS, TASK, TRAINED

    # The agent writes its messages itself; these are the first two.
    prompt = [{"role": "system", "content": TEMPLATES["system_template"]}, {"role": "user", "content": TASK}]
    for split, num_tasks, seed in settings.splits:
        levels = (TRAINED,) if split == "train" else LEVELS
        rows = [
            {
                "data_source": level,
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"split": split, "index": index, "level": level, "seed": seed + number},
            }
            for index, (level, number) in enumerate(product(levels, range(num_tasks)))
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def write_solved(folder: Path, model: Path, *, settings: Settings) -> None:
    """Write a tree of each solved task, in the tokens of a model."""
    from recipes.coding_agent.bugs import make_bug
    from recipes.demo.leaves import Renderer
    from recipes.demo.solved_trees import stored_leaf
    from verl_tree.records import StoredTree, write_trees

    renderer = Renderer.of_model(model, [])
    trees = []
    for number in range(NUM_SOLVED):
        leaf = solved_leaf(make_bug(seed=settings.warm_start_seed + number), renderer=renderer)
        stored = stored_leaf(leaf, session=0, number=0, prompt_len=leaf.trained.index(1), reward=1.0)
        trees.append(StoredTree(step=0, uid=str(number), leaves=(stored,)))
    write_trees(folder / TREES, trees)


def solved_leaf(bug: "Bug", *, renderer: "Renderer") -> "Leaf":
    """Let the agent repair a module with turns that are written beforehand; return what it sent and read."""
    from recipes.coding_agent.agent import find_package, solve
    from recipes.coding_agent.bugs import CHECK, MODULE
    from recipes.demo.leaves import Leaf

    find_package()
    from minisweagent.models.test_models import DeterministicModel, make_output

    turns = (
        ("I read the module.", f"cat -n {MODULE}"),
        (
            f"Line {bug.line} should be: {bug.repaired}",
            f"sed -i '{bug.line}s|return.*|{bug.repaired}|' {MODULE} && python {CHECK}",
        ),
        ("It prints ok.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    )
    outputs = [
        make_output(f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```", [{"command": command}])
        for thought, command in turns
    ]
    with tempfile.TemporaryDirectory() as name:
        bug.write(Path(name))
        told = solve(DeterministicModel(outputs=outputs), Path(name))
    messages = [{key: message[key] for key in ("role", "content")} for message in told if message["role"] != "exit"]
    leaf = Leaf([], [])
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            # As the gateway does: every prompt is the whole history in the chat template.
            prompt = renderer.read(messages[:number]).token_ids
            assert prompt[: len(leaf.token_ids)] == leaf.token_ids, "the template writes a history as it was generated"
            read = Leaf(prompt, leaf.trained + [0] * (len(prompt) - len(leaf.trained)))
            leaf = renderer.write(read, message["content"])
    return leaf


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
