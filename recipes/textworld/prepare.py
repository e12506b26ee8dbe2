"""Prepare a run: games, rows, and a pretrained model that was fine-tuned on trees of solved games.

train.parquet validation.parquet    a row for each game, as verl reads them
games/                              the games
solved.parquet                      the trees
model/                              the fine-tuned model
"""

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.demo.fine_tuning import TREES, fine_tune
from recipes.demo.prepare import prepare_once, run_command_line, say
from recipes.demo.settings import Settings

if TYPE_CHECKING:
    from recipes.demo.leaves import Leaf, Renderer

SETTINGS = Settings(warm_start=None, num_train_tasks=48, num_validation_tasks=16)
"""Numbers of games of each level."""
NUM_SOLVED = 24
"""Solved games, which are others than those of the rows."""
_CODE = tuple(Path(__file__).with_name(f"{name}.py") for name in ("prepare", "games"))


def prepare(cache_dir: Path, *, settings: Settings, model: Path | None) -> Path:
    """Return the prepared folder, made unless it is there; see `prepare_once`.

    Raises:
        ValueError: `prepare_once` refuses the model, or there is none; or the package textworld is missing.
    """

    def build(folder: Path, final_folder: Path) -> None:
        assert model is not None, "prepare_once refuses it"
        say("games (a second each)")
        (folder / "games").mkdir()
        write_rows(folder, final_folder=final_folder, settings=settings)
        write_solved(folder, model, settings=settings)
        fine_tune(folder, model, batch_size=12, num_epochs=2)

    return prepare_once(cache_dir / "textworld", settings=settings, model=model, code=_CODE, build=build)


def write_rows(folder: Path, *, final_folder: Path, settings: Settings) -> None:
    """Write the games of both splits, and their rows, which name them where `final_folder` will be."""
    # Imported here, so that a second call, which makes nothing, takes no time.
    import pandas as pd

    from recipes.textworld.games import LEVELS, TRAINED, Play, chat, make_game

    for split, num_games, seed in settings.splits:
        levels = (TRAINED,) if split == "train" else LEVELS
        rows = []
        for index, (level, number) in enumerate(product(levels, range(num_games))):
            name = f"games/{split}_{index}.z8"
            commands = make_game(folder / name, seed=seed + number, level=level)
            with Play(folder / name) as play:
                prompt = chat(play.task, [], seen=play.seen)
            row = {"data_source": level, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ""}}
            told = {"game": str(final_folder / name), "max_commands": 2 * len(commands)}
            rows.append({**row, "extra_info": {"split": split, "index": index, **told}})
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")


def write_solved(folder: Path, model: Path, *, settings: Settings) -> None:
    """Write a tree of each solved game, in the tokens of a model."""
    from recipes.demo.leaves import Renderer
    from recipes.demo.solved_trees import stored_leaf
    from recipes.textworld.games import make_game
    from verl_tree.records import StoredTree, write_trees

    renderer = Renderer.of_model(model, [])
    trees = []
    for index in range(NUM_SOLVED):
        game = folder / "games" / f"solved_{index}.z8"
        commands = make_game(game, seed=settings.warm_start_seed + index)
        leaves = solved_leaves(game, commands, renderer=renderer)
        stored = [
            stored_leaf(leaf, session=0, number=number, prompt_len=leaf.trained.index(1), reward=1.0)
            for number, leaf in enumerate(leaves)
        ]
        trees.append(StoredTree(step=0, uid=str(index), leaves=tuple(stored)))
    write_trees(folder / TREES, trees)


def solved_leaves(game: Path, commands: list[str], *, renderer: "Renderer") -> "list[Leaf]":
    """Give commands to a game that solve it; return a leaf for each context."""
    from recipes.textworld.games import NUM_KEPT, Play, Step, chat

    leaves: list[Leaf] = []
    steps: list[Step] = []
    with Play(game) as play:
        for command in commands:
            messages = chat(play.task, steps, seen=play.seen)
            if len(steps) % NUM_KEPT == 0:
                leaves.append(renderer.read(messages))
            else:
                leaves[-1] = renderer.read_on(leaves[-1], messages[:-1], messages[-1:])
            leaves[-1] = renderer.write(leaves[-1], command)
            steps.append(Step(play.seen, command))
            play.give(command)
        assert play.is_won, f"{game}: {commands} do not solve it"
    return leaves


if __name__ == "__main__":
    run_command_line(prepare, settings=SETTINGS)
