"""An agent tried without a training run: scripted answers, the tree that they make, and the agent's traceback."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from scripted_llm import tokenizer
from transformers import Qwen3Config
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from rollout_hooks.loops import register_built_in
from rollout_hooks.trial.clients import read_answers
from rollout_hooks.try_agent import main

LOOPS = """\
- {name: guess, _target_: tried_loops.Guess, num_forks: 2}
- {name: broken, _target_: tried_loops.Broken}
- {name: asked, _target_: rollout_hooks.loops.blackbox.BlackboxAgentLoop, agent: 'tried_loops:ask'}
"""
MODULE = """\
import openai

from rollout_hooks.loops.base import BranchingAgentLoop


class Guess(BranchingAgentLoop):
    def __init__(self, *args, num_forks, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_forks = num_forks

    async def run_branches(self, root, **row):
        await root.generate()
        root.add_reward(0.5)
        for number, branch in enumerate(root.fork(self.num_forks)):
            await branch.generate()
            branch.finish(number * row["extra_info"]["worth"])


class Broken(BranchingAgentLoop):
    async def run_branches(self, root, **row):
        await root.generate()
        root.finish(row["no_such_column"])


async def ask(*, base_url, api_key, model, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=row["raw_prompt"])
    return float(len(answer.choices[0].message.content))
"""
PROMPT = r"'<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model without weights, rows, loops and answers."""
    folder = tmp_path_factory.mktemp("tried")
    # The settings of weights that nobody makes.
    Qwen3Config(vocab_size=len(tokenizer()), architectures=["Qwen3ForCausalLM"]).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    row = {"prompt": [{"role": "user", "content": "q"}], "data_source": "test"}
    rows = [{**row, "extra_info": {"worth": worth}} for worth in (0.0, 2.0)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    (folder / "tried_loops.py").write_text(MODULE)
    (folder / "loops.yaml").write_text(LOOPS)
    (folder / "answers.txt").write_text("plan\n---\nyes\n---\nno\n")
    return folder


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the command's arguments; the loops are known to this process for one test only."""
    monkeypatch.syspath_prepend(folder)
    model, answers = str(folder / "model"), str(folder / "answers.txt")
    rows = f"{folder}/rows.parquet:1"
    register_built_in()
    before = dict(_agent_loop_registry)
    yield [str(folder / "loops.yaml"), "--row", rows, "--model", model, "--answers", answers]
    _agent_loop_registry.clear()
    _agent_loop_registry.update(before)


def test_a_session_is_drawn_with_its_calls_and_rewards(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--agent", "guess", "actor_rollout_ref.rollout.response_length=64"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-9:] == [
        f"loop guess, row 1 of {command[2].rpartition(':')[0]}",
        "3 calls, 2 rows to train, 4 nodes, 32 tree tokens, 57 flat tokens",
        "",
        f"prompt, 20 tokens: {PROMPT}",
        "call 0 (root), 5 tokens, reward +0.5: 'plan<|im_end|>'",
        "├─ call 1 (continuation), 4 tokens: 'yes<|im_end|>'",
        "│  leaf 0: reward 0",
        "└─ call 2 (fork), 3 tokens: 'no<|im_end|>'",
        "   leaf 1: reward 2",
    ]


def test_answers_are_cut_to_the_room_that_is_left(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--agent", "guess", "actor_rollout_ref.rollout.response_length=7"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert "├─ call 1 (continuation), 2 tokens: 'ye'" in out
    assert "└─ call 2 (fork), 2 tokens: 'no'" in out


def test_an_agent_that_raises_is_shown_with_its_line(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--agent", "broken"]) == 1
    out = capfd.readouterr().out.splitlines()
    line = MODULE.splitlines().index('        root.finish(row["no_such_column"])') + 1
    assert out[-6:] == [
        "call 0 (root), 5 tokens: 'plan<|im_end|>'",
        "not trained",
        "",
        "The session failed: KeyError: 'no_such_column'",
        f'  File "{Path(command[0]).parent}/tried_loops.py", line {line}, in run_branches',
        '    root.finish(row["no_such_column"])',
    ]


def test_an_agent_behind_the_gateway(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--agent", "asked"]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[-3:] == [
        f"prompt, 20 tokens: {PROMPT}",
        "call 0 (root), 5 tokens: 'plan<|im_end|>'",
        "leaf 0: reward 4",
    ]


def test_wrong_arguments_are_told_in_a_line(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    loops, _, row, *others = command
    file = row.rpartition(":")[0]
    wrong = {
        (loops, "--row", "rows.parquet", *others): "--row rows.parquet: give a file and the number of a row",
        ("no.yaml", "--row", row, *others): "no.yaml: no such file",
        (loops, "--row", f"{file}:2", *others, "--agent", "guess"): f"row 2 of {file}: it has 2; give a number below",
        (*command,): "the file has 3 loops: choose one by --agent guess | broken | asked",
        (*command, "--agent", "gues"): "no agent loop gues; did you mean guess? choose one of",
        (*command, "--agent", "guess", "data.prompt_kay=q"): "Could not override 'data.prompt_kay'",
    }
    for arguments, message in wrong.items():
        assert main(list(arguments)) == 2
        assert message in capfd.readouterr().err


def test_answers_are_what_stands_between_the_lines() -> None:
    assert read_answers("one\n---\ntwo\nlines\n\n---\n\nthree") == ["one", "two\nlines", "three"]
    assert read_answers("a --- b") == ["a --- b"]
    for text in ("", "\n", "---\n"):
        with pytest.raises(ValueError, match="has no answer"):
            read_answers(text)
