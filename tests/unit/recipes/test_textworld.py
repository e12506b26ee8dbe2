"""The recipe textworld: what a player sees, how the history is rewritten, and sessions of its loop on real games.

The games are left to `scripts/test.sh --long`, as the package is compiled (`scripts/setup.sh --extra textworld`).
"""

import asyncio
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from input_cases import write_model
from loop_cases import rewards, run
from scripted_llm import decode
from scripted_llm import row as dataset_row

from recipes.demo.leaves import Renderer
from recipes.demo.settings import Settings
from recipes.demo.tokenizer import END_OF_TURN, build_tokenizer
from recipes.textworld.games import LEVELS, NUM_KEPT, TRAINED, Play, Step, _shown, chat, make_game
from recipes.textworld.loop import TextWorldLoop
from recipes.textworld.prepare import SETTINGS, prepare, solved_leaves
from rollout_hooks.environments import CopiedEnvironment

*_, NUM_COMMANDS = LEVELS[TRAINED]
MAX_COMMANDS = 7


@pytest.fixture
def game(tmp_path: Path) -> tuple[Path, list[str]]:
    """Make a game; return it with the commands that solve it."""
    return tmp_path / "game.z8", make_game(tmp_path / "game.z8", seed=1)


def played(path: Path, commands: Iterable[str]) -> tuple[list, Any]:
    """Let a session give these commands; return its rows and what was asked."""
    with Play(path) as play:
        game = {"game": str(path), "max_commands": MAX_COMMANDS}
        row = dataset_row(raw_prompt=chat(play.task, [], seen=play.seen), extra_info=game)
    given = iter(commands)
    options = {"max_command_len": 80}
    return run(TextWorldLoop, lambda _: next(given), row=row, options=options, prompt_length=2048, response_length=2048)


def test_the_history_begins_anew_after_some_commands() -> None:
    steps = [Step(f"room {number}", f"go {number}") for number in range(NUM_KEPT + 1)]
    *_, last = chat("win", steps[:2], seen="room 2")
    assert last == {"role": "user", "content": "room 2"}
    _, user, command, now = chat("win", steps, seen="here")
    assert user["content"] == "Task: win\n\nSo far you did: go 0; go 1; go 2.\n\nroom 3"
    assert (command["content"], now["content"]) == ("go 3", "here")
    for number in range(1, NUM_KEPT):
        before = chat("win", steps[: number - 1], seen=f"room {number - 1}")
        assert chat("win", steps[:number], seen=f"room {number}")[: len(before)] == before


def test_a_player_sees_neither_the_banner_nor_commands_that_do_nothing() -> None:
    text = "\n\n-= Attic =-\nDusty.\n\n\n\n>                         -= Attic =-0/2"
    assert _shown(text, ["look", "examine box", "go south", "open box"]) == (
        "-= Attic =-\nDusty.\nYou can: go south, open box."
    )


def test_without_a_model_the_answer_is_where_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--model: .* give the folder recipes\.smollm\.prepare prints$"):
        prepare(tmp_path, settings=SETTINGS, model=None)


def test_without_the_package_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ValueError, match=r"run scripts/setup\.sh --extra textworld"):
        prepare(tmp_path, settings=Settings(), model=write_model(tmp_path / "model"))
    assert not list((tmp_path / "textworld").iterdir())


@pytest.mark.long
def test_a_session_that_does_the_task_is_rewarded_and_has_a_leaf_for_each_context(game: tuple[Path, list[str]]) -> None:
    path, commands = game
    assert len(commands) == NUM_COMMANDS
    outputs, client = played(path, commands)
    assert rewards(outputs) == [None, 1.0]
    first, last = (decode([*output.prompt_ids, *output.response_ids]) for output in outputs)
    assert [first.count(f"{command}<|im_end|>") for command in commands] == [1, 1, 1, 0]
    assert f"So far you did: {'; '.join(commands[:NUM_KEPT])}." in last
    assert last.endswith(f"{commands[-1]}<|im_end|>")
    assert len(client.tree.calls) == NUM_COMMANDS


@pytest.mark.long
def test_a_session_that_does_nothing_ends_without_a_reward(game: tuple[Path, list[str]]) -> None:
    outputs, client = played(game[0], repeat("fly away"))
    assert rewards(outputs) == [None, None, 0.0]
    assert len(client.tree.calls) == MAX_COMMANDS


@pytest.mark.long
def test_solved_games_are_leaves_as_sessions_have_them(game: tuple[Path, list[str]]) -> None:
    path, commands = game
    tokenizer = build_tokenizer()
    leaves = solved_leaves(path, commands, renderer=Renderer(tokenizer, []))
    trained = [
        tokenizer.decode([token for token, is_trained in zip(leaf.token_ids, leaf.trained, strict=True) if is_trained])
        for leaf in leaves
    ]
    assert [text.split(END_OF_TURN)[:-1] for text in trained] == [commands[:NUM_KEPT], commands[NUM_KEPT:]]


@pytest.mark.long
def test_sessions_play_at_the_same_time(game: tuple[Path, list[str]]) -> None:
    path, commands = game

    def win(_: int) -> bool:
        with Play(path) as play:
            for command in commands:
                play.give(command)
            return play.is_won

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(win, range(32)))


@pytest.mark.long
def test_a_game_forks_in_the_middle(game: tuple[Path, list[str]]) -> None:
    """Two plays go on from the second command, and the one that is left alone can still be won."""
    path, commands = game

    async def run() -> None:
        environment = CopiedEnvironment(Play(path), copy=Play.copy, free=Play.close)
        for command in commands[:2]:
            environment.state.give(command)
        before = environment.state.seen
        snapshot = await environment.snapshot()
        for command in commands[2:]:
            environment.state.give(command)
        left, right = await environment.fork(snapshot), await environment.fork(snapshot)
        left.state.give("inventory")
        assert [each.state.is_won for each in (environment, left, right)] == [True, False, False]
        assert right.state.seen == before
        inner = await left.fork(await left.snapshot())
        for play in (right.state, inner.state):
            for command in commands[2:]:
                play.give(command)
        assert [each.state.is_won for each in (left, right, inner)] == [False, True, True]
        for each in (environment, left, right, inner):
            await each.release()

    asyncio.run(run())
