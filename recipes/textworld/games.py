"""Games of TextWorld: a few rooms, and a task of a few commands that the first message words in its own way.

    First of all, you could, like, make an attempt to take a trip south. And then, lift the passkey from the floor ...

`scripts/setup.sh --extra textworld` installs the package, and what it needs, into a folder beside the others.
"""

import copy
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Self

PACKAGES = Path(sys.prefix) / "textworld"
LEVELS = {"three_rooms": (3, 4, 4), "five_rooms": (5, 6, 6)}
"""Rooms and objects of a game, and how many commands its task takes."""
TRAINED = "three_rooms"
"""The level of the solved games and of reinforcement. Validations ask every level."""
NUM_KEPT = 3
"""Commands after which the history is rewritten."""
SYSTEM_PROMPT = (
    "You play a text game. Reply with one of the commands that you are told you can give, and with nothing else. "
    "Do what the task says, step by step, until it is done."
)
_LOCK = threading.Lock()  # games of several threads share the package's parser, which keeps a state
_IDLE = re.compile(r"examine |inventory$|look$")
_END = re.compile(r"\n\s*(?:\*\*\*|>).*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what the player saw before it."""

    seen: str
    command: str


def make_game(path: Path, *, seed: int, level: str = TRAINED) -> list[str]:
    """Write a game, a function of seed and level, to a file ``*.z8``; return the commands that solve it."""
    textworld = _package()
    options = textworld.GameOptions()
    options.nb_rooms, options.nb_objects, num_commands = LEVELS[level]
    options.quest_length = options.chaining.min_depth = options.chaining.max_depth = num_commands
    options.seeds = seed
    options.path, options.force_recompile = str(path), True
    game = textworld.generator.make_game(options)
    textworld.generator.compile_game(game, options)
    return list(game.metadata["walkthrough"])


class Play:
    """One play of a game.

    Attributes:
        task: What is to be done.
        seen: What the player sees now, with the commands that can be given.
        is_won: Whether the task is done.
    """

    def __init__(self, path: Path) -> None:
        textworld = _package()
        wanted = textworld.EnvInfos(admissible_commands=True, description=True, objective=True, won=True)
        with _LOCK:
            self._game = textworld.start(str(path), wanted)
            state = self._game.reset()
        self.task = str(state.objective).strip()
        self.seen, self.is_won = _shown(state.description, state.admissible_commands), False

    def give(self, command: str) -> None:
        """Give a command; the game says itself what is wrong with one."""
        with _LOCK:
            state, _, _ = self._game.step(command)
        self.seen, self.is_won = _shown(state.feedback, state.admissible_commands), bool(state.won)

    def copy(self) -> Self:
        """Return the play as it is now, to go on from in another way."""
        other = copy.copy(self)
        with _LOCK:
            other._game = self._game.copy()
        return other

    def close(self) -> None:
        self._game.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def chat(task: str, steps: Sequence[Step], *, seen: str) -> list[dict[str, str]]:
    """Return the messages before the next command: of earlier steps only the commands, of the last ones all.

    The first user message changes after every `NUM_KEPT` commands, and the context begins anew there.
    """
    num_told = len(steps) // NUM_KEPT * NUM_KEPT
    told = f"So far you did: {'; '.join(step.command for step in steps[:num_told])}.\n\n" if num_told else ""
    shown = [step.seen for step in steps[num_told:]] + [seen]
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"Task: {task}\n\n{told}{shown[0]}"},
    ]
    for step, after in zip(steps[num_told:], shown[1:], strict=True):
        messages += [{"role": "assistant", "content": step.command}, {"role": "user", "content": after}]
    return messages


def _shown(text: str, commands: Sequence[str]) -> str:
    text = re.sub(r"\n{2,}", "\n", _END.sub("", f"\n{text}")).strip()
    return f"{text}\nYou can: {', '.join(each for each in commands if not _IDLE.match(each))}."


def _package() -> ModuleType | Any:
    if str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    try:
        import textworld
    except ImportError as error:
        raise ValueError(f"{PACKAGES}: textworld is not there; run scripts/setup.sh --extra textworld") from error
    return textworld
