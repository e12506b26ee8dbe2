"""An agent tried without a training run: scripted answers, the tree that they make, and the agent's traceback."""

import os
import subprocess
import sys
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
from verl_tree.commands import __main__ as commands

LOOPS = """\
- {name: guess, _target_: tried_loops.Guess, num_forks: 2}
- {name: broken, _target_: tried_loops.Broken}
- {name: unscored, _target_: tried_loops.Guess, num_forks: 1, reward: null}
- {name: held, _target_: tried_hangs.Hangs, holds_the_loop: true}
- {name: hangs, _target_: tried_hangs.Hangs, holds_the_loop: false}
- {name: asked, _target_: rollout_hooks.loops.blackbox.BlackboxAgentLoop, agent: 'tried_loops:ask'}
"""
MODULE = """\
import openai

from rollout_hooks.loops.base import BranchingAgentLoop


class Guess(BranchingAgentLoop):
    def __init__(self, *args, num_forks, reward=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.num_forks, self.reward = num_forks, reward

    async def run_branches(self, root, **row):
        await root.generate()
        root.add_reward(0.5)
        for number, branch in enumerate(root.fork(self.num_forks)):
            await branch.generate()
            role = "attempt" if number else None
            branch.finish(self.reward and number * row["extra_info"]["worth"], role=role)


class Broken(BranchingAgentLoop):
    async def run_branches(self, root, **row):
        await root.generate()
        root.finish(row["no_such_column"])


async def ask(*, base_url, api_key, model, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=row["raw_prompt"])
    return float(len(answer.choices[0].message.content))
"""
RUN = """\
defaults:
  - ppo_trainer
  - _self_

data:
  max_response_length: 7

actor_rollout_ref:
  rollout:
    agent:
      default_agent_loop: guess

tree:
  shared_tokens: sum
"""
# Without openai, whose import alone would take seconds of the time that its agent has.
HANGS = """\
import asyncio
import time

from rollout_hooks.loops.base import BranchingAgentLoop


class Hangs(BranchingAgentLoop):
    def __init__(self, *args, holds_the_loop, **kwargs):
        super().__init__(*args, **kwargs)
        self.wait = time.sleep if holds_the_loop else asyncio.sleep

    async def run_branches(self, root, **row):
        await root.generate()
        await (self.wait(1000) or asyncio.sleep(0))
"""
ROOT = Path(__file__).parents[3]
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
    (folder / "tried_hangs.py").write_text(HANGS)
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
        "   leaf 1 (attempt): reward 2",
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


def test_an_agent_that_does_not_end_is_shown_with_its_line(command: list[str]) -> None:
    """Whether it waits or holds the event loop. The process ends, so each is one of its own."""
    folder = Path(command[0]).parent
    run = [sys.executable, "-m", "rollout_hooks.try_agent", *command, "--timeout", "5"]
    paths = [str(ROOT), str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    started = [
        subprocess.Popen([*run, "--agent", agent], env=environment, stdout=subprocess.PIPE, text=True)
        for agent in ("hangs", "held")
    ]
    line = next(number for number, each in enumerate(HANGS.splitlines(), start=1) if "self.wait(1000)" in each)
    for each in started:
        out, _ = each.communicate(timeout=250)
        assert each.returncode == 1
        assert out.splitlines()[-4:] == [
            "call 0 (root), 5 tokens: 'plan<|im_end|>'",
            "not trained",
            "",
            f"The session failed: no end after 5 s (--timeout); it waits at {folder}/tried_hangs.py:{line}",
        ]


def test_a_leaf_that_nobody_may_score_is_told(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--agent", "unscored"]) == 0
    *_, warning = capfd.readouterr().out.splitlines()
    assert warning.startswith("Warning: the last leaf has no reward: a training run asks verl's reward function")
    assert "data_source='test'" in warning
    assert main([*command, "--agent", "unscored", "reward.num_workers=0"]) == 0
    *_, warning = capfd.readouterr().out.splitlines()
    assert warning.endswith("with reward.num_workers=0 a training run refuses the session")


def test_the_limits_of_a_run_hold(command: list[str], folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its configuration may name the loop, too; further arguments win."""
    (folder / "run.yaml").write_text(RUN)
    tried = [*command, "--config", str(folder / "run.yaml")]
    assert main(tried) == 0
    out = capfd.readouterr().out.splitlines()
    assert f"loop guess, row 1 of {folder}/rows.parquet" in out
    assert "├─ call 1 (continuation), 2 tokens: 'ye'" in out
    assert main([*tried, "data.max_response_length=64"]) == 0
    assert "├─ call 1 (continuation), 4 tokens: 'yes<|im_end|>'" in capfd.readouterr().out.splitlines()


def test_a_file_may_build_on_the_projects_configuration(
    command: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "run.yaml").write_text(RUN.replace("ppo_trainer", "tree_ppo"))
    assert commands.main(["try-agent", *command, "--config", str(folder / "run.yaml")]) == 0
    assert "└─ call 2 (fork), 2 tokens: 'no'" in capfd.readouterr().out.splitlines()


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
        (*command, "--timeout", "0"): "--timeout 0.0: give seconds above 0",
        (*command, "--config", "no.yaml"): "no.yaml: no such file",
        (loops, "--row", row, "--model", f"{file}.no/", *others[2:]): "no such folder, and the hub gave no such model",
        (loops, "--row", row, "--model", str(Path(file).parent), *others[2:]): "the folder has no config.json; give",
        (*command,): "the file has 6 loops: choose one by --agent guess | broken | unscored | held | hangs | asked",
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
