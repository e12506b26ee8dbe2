"""The recipe gsm8k: the stand-in's problems, verl's reward, search at lines, preparation, and the README's commands."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from input_cases import write_model
from loop_cases import ASSISTANT, response, rewards, run
from recipe_cases import ROOT, check_given_model, check_prepared, loop_of
from scripted_llm import row as dataset_row
from scripted_llm import tokenizer
from verl.workers.rollout.replica import TokenOutput

from recipes.demo.leaves import Renderer
from recipes.demo.tokenizer import build_tokenizer
from recipes.gsm8k.loop import LineSearch, line_starts
from recipes.gsm8k.prepare import SETTINGS, prepare
from recipes.gsm8k.problems import DATA_SOURCE, INSTRUCTION, MOST, PHRASES, Problem, make_problems, solve
from recipes.gsm8k.reward import compute_score
from verl_tree.check import report

PROBLEM = Problem(names=("Ada", "Ben", "Cleo", "Dora"), start=3, changes=(4, -2, 8))
SOLUTION = "Ben: 3 + 4 = 7\nCleo: 7 - 2 = 5\nDora: 5 + 8 = 13\n#### 13"

# Problems and reward


def test_a_problem_reads_like_a_row_of_gsm8k_and_its_solution_ends_with_the_answer() -> None:
    ((message),) = PROBLEM.messages
    assert message["role"] == "user"
    assert message["content"] == (
        "Ada has 3 pens. Ben has 4 more than Ada. Cleo has 2 fewer than Ben. Dora has 8 more than Cleo. "
        'How many has Dora? Let\'s think step by step and output the final answer after "####".'
    )
    assert PROBLEM.answer == "13"
    assert solve(PROBLEM, slip_rate=0.0, rng=random.Random(0)) == SOLUTION


def test_problems_are_drawn_by_their_seed_and_nobody_has_too_few_or_too_many() -> None:
    problems = make_problems(300, seed=7)
    assert problems == make_problems(300, seed=7)
    assert problems != make_problems(300, seed=8)
    for problem in problems:
        held = np.cumsum([problem.start, *problem.changes])
        assert 1 <= held.min() <= held.max() <= MOST
        assert len(set(problem.names)) == 4
    assert {change > 0 for problem in problems for change in problem.changes} == {True, False}


def test_a_line_that_slips_is_one_or_two_too_high_and_the_next_goes_on_from_it() -> None:
    for seed in range(50):
        *lines, last = solve(PROBLEM, slip_rate=1.0, rng=random.Random(seed)).splitlines()
        value = 3
        for line, name, change in zip(lines, ("Ben", "Cleo", "Dora"), (4, -2, 8), strict=True):
            before, result = re.fullmatch(rf"{name}: (\d+) [+-] {abs(change)} = (\d+)", line).groups()
            assert int(before) == value
            assert int(result) - value - change in (1, 2)
            value = int(result)
        assert last == f"#### {value}"


def test_the_reward_is_that_of_verl_for_gsm8k() -> None:
    for solution, truth, expected in (
        (SOLUTION, "13", 1.0),
        ("It is #### 1,234", "1234", 1.0),
        ("#### 12 or rather #### 13", "13", 1.0),
        ("#### 12", "13", 0.0),
        ("It is 13.", "13", 0.0),
    ):
        assert compute_score(data_source=DATA_SOURCE, solution_str=solution, ground_truth=truth) == expected


def test_texts_are_as_many_tokens_as_the_limits_of_the_configuration_assume() -> None:
    small = build_tokenizer(PHRASES)
    prompt = Renderer(small, []).read(PROBLEM.messages)
    shown = f"<|im_start|>user\n{PROBLEM.question} {INSTRUCTION}<|im_end|>\n{ASSISTANT}"
    assert small.decode(prompt.token_ids) == shown
    assert len(prompt.token_ids) == 34
    assert len(Renderer(small, []).write(prompt, SOLUTION).token_ids) == 34 + 27


# Search


def test_a_line_begins_behind_an_end_of_line_but_not_with_another_one() -> None:
    token_ids = tokenizer().encode("ab\n\ncd\ne\n", add_special_tokens=False)
    assert line_starts(token_ids, tokenizer=tokenizer()) == [0, 4, 7]


Script = list[tuple[str, list[tuple[float, float]]]]
"""Answers, and for each of their lines the log-probs of its tokens: the first, and all others."""


def scripted(script: Script) -> Callable[[str], TokenOutput]:
    """Make a model that gives these answers, whatever it is asked."""
    replies = iter(script)

    def reply(_: str) -> TokenOutput:
        text, log_probs = next(replies)
        lines = text.splitlines(keepends=True)
        values = [
            value
            for line, (first, rest) in zip(lines, log_probs, strict=True)
            for value in (first, *[rest] * (len(line) - 1))
        ]
        token_ids = tokenizer().encode(text, add_special_tokens=False)
        return TokenOutput(token_ids=token_ids, log_probs=values, stop_reason="completed")

    return reply


def search(script: Script, *, num_rounds: int) -> tuple[list, list[str]]:
    """Run the search on a question whose answer is 3; return the leaves, and what was there of each answer before."""
    options = {"select": "entropy", "num_expansions": 2, "num_rounds": num_rounds}
    row = dataset_row(data_source="openai/gsm8k", reward_model={"ground_truth": "3"})
    outputs, client = run(LineSearch, scripted(script), row=row, options=options)
    return outputs, [prompt.split(ASSISTANT)[-1] for prompt in client._client.prompts]


def test_the_least_certain_lines_are_sampled_anew_and_every_leaf_has_its_reward() -> None:
    """A line counts by the mean over its tokens, so the third, with the least certain first token, comes last.

    ──┬── 1+1=2 ──┬── 2+1=4 ── #### 4        first chain; lines of means 1, 2.5 and 0.6
      │           └── 2+1=3 ── #### 3        round 1; means 0.1 and 1.5
      └── 1+2=3 ──┬── #### 3                 round 1; means 0.2 and 2
                  └── #### 5                 round 2, at the line of mean 2; the other one is that of 1.5
    """
    script = [
        ("1+1=2\n2+1=4\n#### 4", [(-1.0, -1.0), (-0.1, -3.0), (-3.0, -0.1)]),
        ("2+1=3\n#### 3", [(-0.1, -0.1), (-1.5, -1.5)]),
        ("1+2=3\n#### 3", [(-0.2, -0.2), (-2.0, -2.0)]),
        ("#### 5", [(-0.1, -0.1)]),
        ("#### 3", [(-0.1, -0.1)]),
    ]
    outputs, begun = search(script, num_rounds=2)
    assert begun == ["", "1+1=2\n", "", "1+2=3\n", "1+1=2\n2+1=3\n"]
    by_text = dict(zip(map(response, outputs), rewards(outputs), strict=True))
    assert by_text == {
        "1+1=2\n2+1=4\n#### 4": 0.0,
        "1+1=2\n2+1=3\n#### 3": 1.0,
        "1+2=3\n#### 3": 1.0,
        "1+2=3\n#### 5": 0.0,
    }
    assert len(outputs) == 5  # one was sampled twice


def test_where_there_are_too_few_lines_the_first_tokens_follow() -> None:
    _, begun = search([("#### 4", [(-9.0, -1.0)]), ("#### 3", [(-1.0, -1.0)]), ("??", [(-1.0, -1.0)])], num_rounds=1)
    assert begun == ["", "", "#"]


def test_the_loop_of_plain_samples_and_of_validation_is_one_chain() -> None:
    entry = loop_of("gsm8k", "one_chain")
    assert entry["_target_"].endswith(".TreeSearchAgentLoop")
    assert entry["num_rounds"] == 0
    assert loop_of("gsm8k", "lines") == {
        "name": "lines",
        "_target_": f"{LineSearch.__module__}.{LineSearch.__name__}",
        "select": "entropy",
        "num_expansions": 3,
    }


# Preparation


def write_gsm8k(folder: Path, *, num_rows: int = 2) -> Path:
    """Write rows with the columns of verl's examples/data_preprocess/gsm8k.py, but not of GSM8K."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": PROBLEM.messages,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": PROBLEM.answer},
                "extra_info": {"split": split, "index": index, "answer": SOLUTION, "question": PROBLEM.question},
            }
            for index in range(num_rows)
        ]
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    return folder


def test_the_stand_in_is_prepared_once_under_a_name_of_its_own(tmp_path: Path) -> None:
    first, *_ = make_problems(8, seed=SETTINGS.train_seed)
    folder, rows = check_prepared(prepare, tmp_path, settings=SETTINGS, first=first)
    assert list(rows.prompt[0]) == first.messages
    assert set(rows.data_source) == {DATA_SOURCE}
    assert "agent_name" not in rows
    assert set(pd.read_parquet(folder / "validation.parquet").agent_name) == {"one_chain"}
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["vocab_size"] == len(build_tokenizer(PHRASES))
    check_given_model(prepare, tmp_path / "given", model=folder / "model", settings=SETTINGS)


def test_rows_of_verl_are_taken_as_they_are_but_for_the_loop_of_validation(tmp_path: Path) -> None:
    data, model = write_gsm8k(tmp_path / "data"), write_model(tmp_path / "model")
    folder = prepare(tmp_path / "cache", settings=SETTINGS, model=model, data=data)
    assert (folder / "train.parquet").resolve() == data / "train.parquet"
    given, validation = pd.read_parquet(data / "test.parquet"), pd.read_parquet(folder / "validation.parquet")
    assert set(validation.pop("agent_name")) == {"one_chain"}
    pd.testing.assert_frame_equal(validation, given)
    with pytest.raises(ValueError, match="give a model as well"):
        prepare(tmp_path / "cache", settings=SETTINGS, data=data)
    (data / "test.parquet").unlink()
    with pytest.raises(ValueError, match=r"no .*/test\.parquet; verl's examples/data_preprocess/gsm8k\.py"):
        prepare(tmp_path / "cache", settings=SETTINGS, model=model, data=data)


# The README's commands

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
"""What the published config.json of both sizes have in common."""
SIZES = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
TIED = {"Qwen3-0.6B": True, "Qwen3-8B": False}

# Stands for `python` in the path: it prepares into a folder of the test and notes what would be trained.
PYTHON = f"""#!/usr/bin/env bash
case "$2" in
    recipes.gsm8k.prepare) exec {shlex.quote(sys.executable)} "$@" --cache-dir "$CACHE" ;;
    verl_tree.main_ppo) shift 2; {{ printf '%s\\n' "$@"; echo; }} >> "$COMMANDS" ;;
esac
"""


def commands_of(folder: Path, *headings: str) -> list[list[str]]:
    """Run the shell lines below headings of the README, with files in `folder`; return what each would train."""
    readme = (ROOT / "recipes/gsm8k/README.md").read_text()
    sections = [readme.split(f"\n## {heading}\n")[1].split("\n## ")[0] for heading in headings]
    script = "\n".join(re.findall(r"```bash\n(.*?)```", "\n".join(sections), flags=re.DOTALL))
    for place in ("/data/", "/models/"):
        script = script.replace(place, f"{folder}{place}")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    noted = folder / "commands"
    environment = {
        **os.environ,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "CACHE": str(folder / "cache"),
        "COMMANDS": str(noted),
        "RUN": str(folder / "run"),
    }
    subprocess.run(["bash", "-euc", script], cwd=ROOT, env=environment, check=True)
    return [command.splitlines() for command in noted.read_text().split("\n\n") if command]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Make rows as verl prepares them, and the configurations of published models without weights."""
    write_gsm8k(tmp_path / "data" / "gsm8k")
    for name, sizes in SIZES.items():
        write_model(tmp_path / "models" / name, **QWEN3, **sizes, tie_word_embeddings=TIED[name])
    return tmp_path


def what_runs(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ask the check about a command on a machine with GPUs; return its lines by their first word."""
    monkeypatch.chdir(ROOT)  # where launch.sh starts
    is_valid, text = report([*arguments, "profile=gpu"])
    assert is_valid, text
    lines = text.split("What runs where\n")[1].split("\n\n")[0].splitlines()
    return dict(line.strip().split(": ", maxsplit=1) for line in lines)


def test_the_commands_of_verl_are_accepted(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (what_runs(each, monkeypatch) for each in commands_of(published, "verl's command"))
    assert large["trainer"].startswith("sync, 1 x 8 ranks")
    assert small["trainer"].startswith("sync, 1 x 1 ranks")
    assert small["actor"].endswith("/Qwen3-0.6B")
    for each in (large, small):
        assert "default single_turn_agent" in each["agents"]
        assert each["step"].startswith("1024 x 8 sessions")
        assert each["objective"].startswith("advantages grpo")


def test_the_commands_of_the_recipe_are_accepted(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [what_runs(each, monkeypatch) for each in commands_of(published, "On GPUs")]
    assert [re.search(r"default (\w+)", each["agents"])[1] for each in found] == ["lines", "one_chain"] * 2
    assert [each["step"].split(" sessions")[0] for each in found] == ["256 x 2", "256 x 8", "1024 x 2", "1024 x 8"]
    assert [each["objective"].split(",")[0].split()[1] for each in found] == ["treepo", "grpo"] * 2
    assert ["1 x 8 ranks" in each["trainer"] for each in found] == [False, False, True, True]


def test_the_command_with_a_tool_is_accepted(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is of another repository, of which only the place of the class matters here."""
    package = published / "data" / "recipe" / "partial_rollout"
    for each in (package / "tools", package / "run"):
        each.mkdir(parents=True)
    (package / "tools" / "gsm8k_tool.py").touch()
    named = "class_name: recipe.partial_rollout.tools.gsm8k_tool.Gsm8kTool"
    (package / "run" / "gsm8k_tool_config.yaml").write_text(f"tools:\n- {named}\n  config: {{type: native}}\n")
    monkeypatch.syspath_prepend(published / "data")
    write_gsm8k(published / "data" / "gsm8k_tool")
    *_, command = commands_of(published, "verl's command", "With verl's tool agent")
    assert "default tool_agent" in what_runs(command, monkeypatch)["agents"]
