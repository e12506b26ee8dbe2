"""The recipes that reuse arithmetic_tools: the openai agent behind a real gateway, and the searched trees.

The model is scripted; tools, tool parser, gateway, loops, verifier and configuration files are the real ones.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pandas as pd
import pytest
import yaml
from hydra import compose, initialize_config_dir
from input_cases import write_model
from loop_cases import ASSISTANT, call, rewards, trained
from omegaconf import OmegaConf
from scripted_llm import END, ScriptedClient, run_loop, tokenizer
from scripted_llm import row as dataset_row

from recipes.arithmetic_tools.prepare import prepare as prepare_tasks
from recipes.arithmetic_tools.settings import Settings
from recipes.arithmetic_tools.tasks import Part, Task
from recipes.arithmetic_tools.tools import Calculator, LookupMemory, write_memory
from recipes.blackbox_openai_agent.session import MEMORY_VARIABLE
from recipes.tree_search_reasoning.prepare import LOOPS, PLAIN
from recipes.tree_search_reasoning.prepare import prepare as prepare_search
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree
from verl_tree.launch.composition import prepare_hydra
from verl_tree.launch.validation import validate
from verl_tree.trainer.advantages import intra_tree_advantages

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}
TASK = Task(
    parts=(
        Part(shown="84 + 23", expression="84 + 23", answer="107", key=None),
        Part(shown="k41 - 17", expression="53 - 17", answer="36", key="k41"),
    )
)
BOTH_CALLS = call("calculator", expression="84 + 23") + "\n" + call("lookup", key="k41")
LAST_CALL = call("calculator", expression="53 - 17")
BRANCHING_LOOP = {"_target_": "recipes.arithmetic_tools.loop.ArithmeticToolsLoop"}
(OPENAI_AGENT,) = OmegaConf.to_container(OmegaConf.load(ROOT / "recipes/blackbox_openai_agent/loops.yaml"))


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lookup memory, named in the environment as the recipe's configuration does."""
    path = tmp_path / "memory.sqlite"
    write_memory(path, memory={"k41": 53})
    monkeypatch.setenv(MEMORY_VARIABLE, str(path))
    return path


def right(prompt: str) -> str:
    """A model that does everything right."""
    has_sum, has_stored = "[84 + 23 = 107]" in prompt, "[k41 = 53]" in prompt
    if "[53 - 17 = 36]" in prompt:
        return "<answer>107 36</answer>"
    if has_sum and has_stored:
        return LAST_CALL
    if has_sum:
        return "Partial result: 107"
    return "Partial result: 53" if has_stored else BOTH_CALLS


def instead(said: str, wrong: str):
    """The same model, which says `wrong` for `said`."""
    return lambda prompt: wrong if right(prompt) == said else right(prompt)


def play(entry: dict[str, Any], reply: Any, **rollout: Any) -> tuple[list, ScriptedClient]:
    """Runs an entry of a loop configuration on the task, as verl's worker makes it."""

    def make(**kwargs: Any) -> Any:
        reward = OmegaConf.load(ROOT / "recipes/tree_search_reasoning/configs/tree_search_reasoning.yaml").reward
        kwargs["trainer_config"].config.reward.custom_reward_function = reward.custom_reward_function
        loop = hydra.utils.instantiate(config=OmegaConf.create(entry), **kwargs)
        if "agent" not in entry:
            config = {"type": "native", "database": os.environ[MEMORY_VARIABLE]}
            loop.tools = {tool.name: tool for tool in (Calculator({"type": "native"}), LookupMemory(config))}
        return loop

    client = RecordingClient(ScriptedClient(reply), tree=SessionTree(decode=tokenizer().decode))
    row = dataset_row(
        raw_prompt=TASK.messages, data_source="arithmetic_tools", reward_model={"ground_truth": TASK.answer}
    )
    limits = {"prompt_length": 1024, "response_length": 1024, "multi_turn__max_assistant_turns": 4, **rollout}
    return run_loop(make, client, SAMPLING, row=row, **limits), client._client


# blackbox_openai_agent


def test_the_agent_makes_the_tree_of_the_branching_loop() -> None:
    """Tokens, masks, log-probs and rewards; the picture is in the recipe's README."""
    rows, scripted = play(OPENAI_AGENT, right)
    assert [trained(each) for each in rows] == [
        [BOTH_CALLS + END, "Partial result: 107" + END],
        [BOTH_CALLS + END, "Partial result: 53" + END],
        [BOTH_CALLS + END, LAST_CALL + END, "<answer>107 36</answer>" + END],
    ]
    assert rewards(rows) == [1.0, 1.0, 1.0]
    assert len(scripted.prompts) == 5
    expected, _ = play(BRANCHING_LOOP, right)
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "leaf_reward"):
        assert [getattr(each, name) for each in rows] == [getattr(each, name) for each in expected], name


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (instead("Partial result: 53", "Partial result: 35"), [1.0, 0.0, 1.0]),
        (instead("<answer>107 36</answer>", "<answer>36 107</answer>"), [0.0, 0.0, 0.0]),
        (instead("Partial result: 53", LAST_CALL), [1.0, 0.0, 1.0]),
        # The same call twice, concluded in the same words: two samples, two leaves.
        (instead(BOTH_CALLS, BOTH_CALLS + call("lookup", key="k41")), [1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_rewards_of_leaves(reply: Any, expected: list[float]) -> None:
    rows, _ = play(OPENAI_AGENT, reply)
    assert rewards(rows) == expected


def test_a_single_call_has_no_conclusion_and_wrong_calls_are_told() -> None:
    wrong = call("divide", x=1)
    script = iter([wrong, call("lookup", key="k99"), "<answer>107 36</answer>"])
    rows, scripted = play(OPENAI_AGENT, lambda _: next(script))
    assert [trained(each) for each in rows] == [
        [wrong + END, call("lookup", key="k99") + END, "<answer>107 36</answer>" + END]
    ]
    assert "[error: there is no tool divide]" in scripted.prompts[1]
    assert "[error: nothing is stored under this key]" in scripted.prompts[2]
    assert rewards(rows) == [1.0]


def test_sessions_that_do_not_answer_lose_their_reward_and_stay() -> None:
    """Turns are used up; the context is full."""
    rows, scripted = play(OPENAI_AGENT, lambda _: LAST_CALL)
    assert len(scripted.prompts) == 4
    assert rewards(rows) == [0.0]
    prompt_len = len(rows[0].prompt_ids)
    room = len(BOTH_CALLS) + 5
    rows, _ = play(OPENAI_AGENT, right, prompt_length=prompt_len, response_length=room)
    assert [trained(each) for each in rows] == [[BOTH_CALLS + END]]
    assert rewards(rows) == [0.0]


def test_the_agent_needs_nothing_but_the_openai_client() -> None:
    code = "import sys, recipes.blackbox_openai_agent.agent; print({'verl', 'torch', 'ray', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# tree_search_reasoning


def loop_named(name: str) -> dict[str, Any]:
    (entry,) = (entry for entry in LOOPS if entry["name"] == name)
    return dict(entry)


def giving(answers: list[str]):
    """The right model, whose answers, given its results, are scripted."""
    given = iter(answers)
    return lambda prompt: next(given) if "[53 - 17 = 36]" in prompt else right(prompt)


def rest_of_right(prompt: str) -> str:
    """The right model, which may be asked in the middle of a turn."""
    before, head, begun = prompt.rpartition(ASSISTANT)
    return right(before + head)[len(begun) :]


def test_one_tree_of_the_search_its_rewards_and_advantages() -> None:
    """Chain, then twice two expansions at turns behind a result; all answer behind the last call."""
    answers = [f"<answer>{text}</answer>" for text in ("107 36", "1 1", "107 36", "2 2", "3 3")]
    rows, _ = play(loop_named("tree_grpo"), giving(answers))
    assert len(rows) == 5
    # Which leaf comes when depends on the places that were drawn.
    assert sorted(trained(each)[-1] for each in rows) == sorted(text + END for text in answers)
    assert rewards(rows) == [float("107 36" in trained(each)[-1]) for each in rows]
    assert all(trained(each)[:2] == [BOTH_CALLS + END, LAST_CALL + END] for each in rows)

    # With a second tree, all wrong. Group: mean 1/5, variance (2 (4/5)² + 8 (1/5)²) / 9. Tree: mean 2/5, variance 3/10.
    values = np.array([*rewards(rows), *[0.0] * 5])
    sessions = [0] * 5 + [1] * 5
    group_std, tree_std = np.sqrt(1.6 / 9), np.sqrt(0.3)
    first = [(r - 0.2) / group_std + (r - 0.4) / tree_std for r in rewards(rows)]
    actual = intra_tree_advantages(values, groups=["u"] * 10, sessions=sessions)
    np.testing.assert_allclose(actual[:5], first, rtol=1e-5)
    np.testing.assert_allclose(actual[5:], -0.2 / group_std, rtol=1e-5)


def test_entropy_search_and_the_plain_agent() -> None:
    rows, scripted = play(loop_named("treerl"), rest_of_right)
    assert rewards(rows) == [1.0] * 5
    assert not scripted.prompts[-1].endswith(ASSISTANT)
    (row,), scripted = play(loop_named(PLAIN), right)
    assert trained(row) == [BOTH_CALLS + END, LAST_CALL + END, "<answer>107 36</answer>" + END]
    assert len(scripted.prompts) == 3


def test_prepared_folder(tmp_path: Path) -> None:
    model = tmp_path / "given"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = Settings(num_train_tasks=8, num_validation_tasks=4, warm_start=None)
    tasks = prepare_tasks(tmp_path / "tasks", settings=settings, model=model)
    folder = prepare_search(tmp_path / "search", tasks=tasks)
    assert prepare_search(tmp_path / "search", tasks=tasks) == folder
    assert (folder / "model").resolve() == model
    rows, given = (pd.read_parquet(each / "validation.parquet") for each in (folder, tasks))
    assert set(rows.agent_name) == {PLAIN}
    pd.testing.assert_frame_equal(rows.drop(columns="agent_name"), given)
    assert "agent_name" not in pd.read_parquet(folder / "train.parquet")
    assert OmegaConf.load(folder / "loops.yaml") == list(LOOPS)


# Configuration


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("blackbox_openai_agent", [f"recipe.root={ROOT}"], ("openai_agent", "tree_grpo", 8)),
        ("tree_search_reasoning", [], ("tree_grpo", "tree_grpo_intra", 4)),
    ],
)
def test_configuration_is_that_of_arithmetic_tools_with_another_agent(
    recipe: str, overrides: list[str], expected: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # where launch.sh starts: the search path of the configuration is relative
    prepare_hydra()
    with initialize_config_dir(config_dir=str(ROOT / "recipes" / recipe / "configs"), version_base=None):
        config = compose(recipe, overrides=["profile=cpu", f"recipe.folder={tmp_path}", *overrides])
    OmegaConf.resolve(config)
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "train.parquet")
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "validation.parquet")
    write_model(tmp_path / "model")
    (tmp_path / "tools.yaml").write_text("tools: []\n")
    (tmp_path / "loops.yaml").write_text(yaml.safe_dump(list(LOOPS)))
    validate(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.agent.default_agent_loop, config.algorithm.adv_estimator, rollout.n) == expected
    assert (config.data.max_response_length, config.actor_rollout_ref.actor.optim.lr) == (192, 3e-4)
    assert config.trainer.experiment_name == recipe
    if recipe == "blackbox_openai_agent":
        assert Path(rollout.agent.agent_loop_config_path).exists()
        assert config.ray_kwargs.ray_init.runtime_env.env_vars[MEMORY_VARIABLE] == f"{tmp_path}/memory.sqlite"
