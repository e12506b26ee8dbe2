"""Scripted turns of the real agent, right and wrong ones, from which the small model learns before reinforcement.

The agent runs in a folder, so the model reads what commands print there, also of a check that fails.
"""

import random
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recipes.coding_agent.agent import TEMPLATES, find_package, solve
from recipes.coding_agent.bugs import CHECK, EXPRESSIONS, MODULE, NAMES, TASK, Bug, make_bugs
from recipes.demo.leaves import Leaf, Message, Renderer
from recipes.demo.prepare import say
from recipes.demo.settings import Settings
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.warm_start import save_taught_model

SHARE_RIGHT = 0.4
"""Of the sessions that are learnt from. The others write the wrong line again as it stood there."""
NUM_BUGS = 240
"""Modules that the agent works on, each in a session of either kind."""


def said(thought: str, command: str) -> str:
    """Return a turn in the form that the agent reads."""
    return f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```"


READS = said("I read the module.", f"cat -n {MODULE}")
SUBMITS = said("The work is done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def repairs(line: object, text: str) -> str:
    """Return the turn that changes a line and runs the check."""
    return said(f"Line {line} should be: {text}", f"sed -i '{line}s|return.*|{text}|' {MODULE} && python {CHECK}")


PHRASES = (
    TEMPLATES["system_template"],
    TASK,
    READS,
    SUBMITS,
    *re.split(r"\{line\}| \{text\}", repairs("{line}", "return {text}")),
    *(f"<returncode>{code}</returncode>\n<output>\n" for code in (0, 1)),
    "\n</output>",
    "     1\tdef ",
    '\n     2\t    """Return ',
    '."""\n     3\t    return ',
    *(part for told in EXPRESSIONS.values() for text in told for part in re.split(r"\{[ab]\}", text) if len(part) > 1),
    *EXPRESSIONS,
    *(name for pair in NAMES for name in pair if len(name) > 1),
    'Traceback (most recent call last):\n  File "',
    "AssertionError: ",
)
"""One token each, so a session whose repair is right is some 70 tokens long."""


def session(bug: Bug, text: str) -> list[Message]:
    """Let the agent read a module, write a line and submit; return the messages that it sent and read."""
    find_package()
    from minisweagent.models.test_models import DeterministicModel, make_output

    outputs = [
        make_output(turn, [{"command": re.search(r"\n(.*)\n```$", turn)[1]}])  # type: ignore[index]
        for turn in (READS, repairs(bug.line, text), SUBMITS)
    ]
    with tempfile.TemporaryDirectory(prefix="coding_agent-") as name:
        bug.write(Path(name))
        told = solve(DeterministicModel(outputs=outputs), Path(name))
    return [{key: message[key] for key in ("role", "content")} for message in told if message["role"] != "exit"]


def as_leaf(messages: Sequence[Message], renderer: Renderer) -> Leaf:
    """Return messages in the tokens that the gateway would record: every prompt is the whole history."""
    leaf = Leaf([], [])
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = renderer.read(messages[:number]).token_ids
            assert prompt[: len(leaf.token_ids)] == leaf.token_ids, "the template writes a history as it was generated"
            read = Leaf(prompt, leaf.trained + [0] * (len(prompt) - len(leaf.trained)))
            leaf = renderer.write(read, message["content"])
    return leaf


def teach(folder: Path, *, settings: Settings) -> None:
    """Make the model by a warm start on sessions of the agent."""
    warm = settings.warm_start
    assert warm is not None
    tokenizer = build_tokenizer(PHRASES)
    renderer = Renderer(tokenizer, [])
    rng = random.Random(settings.warm_start_seed)
    bugs = make_bugs(min(NUM_BUGS, 20 * warm.num_sessions), seed=settings.warm_start_seed)
    say(f"the agent works on {len(bugs)} modules, twice each")
    with ThreadPoolExecutor(2) as threads:
        right = list(threads.map(session, bugs, [bug.answer for bug in bugs]))
        wrong = list(threads.map(session, bugs, [bug.written for bug in bugs]))
    leaves = [[as_leaf(messages, renderer) for messages in each] for each in (wrong, right)]

    def make_batch(_step: int, _is_skilled: bool) -> list[Leaf]:
        return [rng.choice(leaves[rng.random() < SHARE_RIGHT]) for _ in range(warm.num_sessions)]

    save_taught_model(folder, tokenizer, settings=settings, make_batch=make_batch)
