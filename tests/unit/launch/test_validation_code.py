"""Code that is not there is refused before Ray starts: agent loops, tools, rewards, data set classes."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from input_cases import refusal, resolved

from verl_tree.launch.checks import find, validate

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
DEFAULT = f"{AGENT}.default_agent_loop"
MANAGER = f"{AGENT}.agent_loop_manager_class"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
MESSAGES = [{"role": "user", "content": "a"}]


def test_file_of_loops_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{LOOPS}=loops.yaml: no such file in {tmp_path}" in refusal(f"{LOOPS}=loops.yaml")
    assert f"{LOOPS}=/no/loops.yaml: no such file" in refusal(f"{LOOPS}=/no/loops.yaml")
    loops = tmp_path / "loops.yaml"
    target = "_target_: rollout_hooks.loops.memory.MemoryAgentLoop"
    wrong = {
        "": "YAML list",
        f"name: mine\n{target}\n": "YAML list",
        f"- {target}\n": "entry 1 lacks name",
        f"- name: mine\n  {target}\n- name: other\n": "entry 2 lacks _target_",
        "- mine\n": "entry 1 lacks name, _target_",
        "- name: [\n": "not YAML",
    }
    for text, part in wrong.items():
        loops.write_text(text)
        message = refusal(f"{LOOPS}={loops}")
        assert message.startswith(f"{LOOPS}={loops}")
        assert part in message
    loops.write_text(f"- name: mine\n  {target}\n")
    validate(resolved(f"{LOOPS}=loops.yaml", f"{DEFAULT}=mine"))


def test_unknown_loop_is_refused_with_the_known_names(tmp_path: Path) -> None:
    for known in ("single_turn_agent", "tool_agent", "parallel_tools", "tree_search"):
        validate(resolved(f"{DEFAULT}={known}"))
    message = refusal(f"{DEFAULT}=paralel_tools")
    assert (
        f"{DEFAULT}=paralel_tools: no such agent loop; did you mean parallel_tools? choose one of blackbox, " in message
    )
    assert "single_turn_agent, subagents, tool_agent, tree_search" in message
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: note_taker\n  _target_: rollout_hooks.loops.memory.MemoryAgentLoop\n")
    assert "memory, note_taker, parallel_tools" in refusal(f"{LOOPS}={loops}", f"{DEFAULT}=notetaker")


def test_a_format_of_tool_calls_is_looked_up_where_loops_read_it(tmp_path: Path) -> None:
    nonsense, agent = f"{MULTI_TURN}.format=nonsense", f"{DEFAULT}=tool_agent"
    message = refusal(nonsense, agent)
    assert message.startswith(f"{nonsense}: no such format of tool calls; choose one of hermes, gpt-oss, qwen3_coder")
    validate(resolved(nonsense, f"{DEFAULT}=single_turn_agent"))
    validate(resolved(f"{MULTI_TURN}.format=qwen3_coder", agent))
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: rollout_hooks.loops.memory.MemoryAgentLoop\n")
    (finding,) = find(resolved(nonsense, f"{LOOPS}={loops}", f"{DEFAULT}=mine"))
    assert finding.is_warning, "the module of a loop of the user's may register a format"


def test_rows_may_name_their_loops(tmp_path: Path) -> None:
    """Then the default counts only where rows without a name are left."""
    rows = {}
    for name, loops in (("good", ["tool_agent", "mine"]), ("bad", ["tool_agent", "tool_agnt"])):
        rows[name] = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [MESSAGES] * 2, "agent_name": loops}), rows[name])
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: rollout_hooks.loops.memory.MemoryAgentLoop\n")
    mine, train, val = f"{LOOPS}={loops}", f"data.train_files={rows['good']}", f"data.val_files={rows['good']}"
    batch = "data.train_batch_size=2"
    validate(resolved(mine, train, val, batch, f"{DEFAULT}=nothing"))
    assert refusal(mine, train, batch, f"{DEFAULT}=nothing").startswith(f"{DEFAULT}=nothing: no such agent loop")
    message = refusal(mine, f"data.train_files={rows['bad']}", val, batch)
    assert message.startswith("data.train_files=")
    assert (
        "agent_name has 'tool_agnt': no such agent loop; did you mean tool_agent? choose one of blackbox, " in message
    )


def test_loops_of_a_manager_of_the_users_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If its workers are verl's; a manager of another kind may have any loops."""
    (tmp_path / "their_manager.py").write_text(
        "from verl.experimental.agent_loop.agent_loop import AgentLoopManager, register\n"
        "@register('theirs')\nclass Loop: ...\n"
        "class Manager(AgentLoopManager): ...\n"
        "class Adapter: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    validate(resolved(f"{MANAGER}=their_manager.Manager", f"{DEFAULT}=theirs"))
    message = refusal(f"{MANAGER}=their_manager.Manager", f"{DEFAULT}=thiers")
    assert f"{DEFAULT}=thiers: no such agent loop; did you mean theirs? choose one of" in message
    assert "theirs" in message
    validate(resolved(f"{MANAGER}=their_manager.Adapter", f"{DEFAULT}=anything"))
    assert f"{MANAGER}=thier_manager.Manager: no module named thier_manager" in refusal(
        f"{MANAGER}=thier_manager.Manager"
    )


@pytest.mark.parametrize("manager", ["os.system", "json.dumps", "json.Nope"])
def test_a_manager_that_is_no_class_is_refused(manager: str) -> None:
    """Also where a loop is looked up, which asks whether the manager's workers are verl's."""
    for overrides in ([], [f"{DEFAULT}=anything"]):
        message = refusal(f"{MANAGER}={manager}", *overrides)
        assert message.startswith(f"{MANAGER}={manager}: ")
        assert "name one" in message or "has no Nope" in message


@pytest.mark.parametrize("loop", ["parallel_tools", "tool_agent"])
def test_loops_without_the_tools_that_they_call_are_warned_of(loop: str, tmp_path: Path) -> None:
    (finding,) = find(resolved(f"{DEFAULT}={loop}"))
    assert finding.is_warning
    assert finding.message.startswith(f"{DEFAULT}={loop}: it has no tools to call")
    assert f"{MULTI_TURN}.tool_config_path" in finding.message
    (tmp_path / "tools.py").write_text("")
    assert not list(find(resolved(f"{DEFAULT}={loop}", f"{MULTI_TURN}.function_tool_path={tmp_path}/tools.py")))
    loops = tmp_path / "loops.yaml"
    loops.write_text(f"- name: {loop}\n  _target_: rollout_hooks.loops.memory.MemoryAgentLoop\n")
    assert not list(find(resolved(f"{DEFAULT}={loop}", f"{LOOPS}={loops}"))), "a loop of the user's"


def test_sessions_that_nobody_rewards_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Our manager's workers say so themselves, session by session; verl's draw a reward worker from an empty list."""
    no_workers = ["reward.num_workers=0", f"{DEFAULT}=single_turn_agent"]
    with caplog.at_level(logging.WARNING):
        validate(resolved(*no_workers))
        assert caplog.text == ""
        validate(resolved(*no_workers, f"{MANAGER}=null"))
    assert "reward.num_workers=0: verl's agent loop workers fail" in caplog.text
    assert "set 1 or more" in caplog.text


@pytest.mark.parametrize("manager", ["null", "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopManagerTQ"])
def test_another_manager_passes_and_the_log_says_what_is_lost(manager: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        validate(resolved(f"{MANAGER}={manager}", f"{DEFAULT}=single_turn_agent"))
    (line,) = [record.getMessage() for record in caplog.records if MANAGER in record.getMessage()]
    assert line.startswith(f"{MANAGER}={'None' if manager == 'null' else manager}: the rows that it writes are trained")
    assert "calls are not recorded" in line
    caplog.clear()
    validate(resolved())
    assert MANAGER not in caplog.text


LOOP_TARGETS = {
    "my_lops.MyLoop": "no module named my_lops",
    "my_package.sub.MyLoop": "no module named my_package.sub",
    "my_folder.sub.MyLoop": "no module named my_folder.sub",
    "my_broken.loops.MyLoop": "No module named 'no_such_dependency'",
    "MyLoop": "full name of a class",
}


@pytest.mark.parametrize(("target", "part"), LOOP_TARGETS.items())
def test_class_of_a_loop_that_is_not_there_is_refused(
    target: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is not run: what it needs may be in the environment of Ray's processes only."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loops.py").write_text("import os\nMEMORY = os.environ['ONLY_IN_RAY']\nclass MyLoop: ...\n")
    for folder in ("my_package", "my_folder"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "loops.py").write_text("class MyLoop: ...\n")
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_broken").mkdir()
    (tmp_path / "my_broken" / "__init__.py").write_text("import no_such_dependency\n")
    loops = tmp_path / "loops.yaml"
    for good in ("my_loops.MyLoop", "my_loops.MyLoop.Nested", "my_package.loops.MyLoop", "my_folder.loops.MyLoop"):
        loops.write_text(f"- name: mine\n  _target_: {good}\n")
        validate(resolved(f"{LOOPS}={loops}"))
    loops.write_text(f"- name: mine\n  _target_: {target}\n")
    message = refusal(f"{LOOPS}={loops}")
    assert f"_target_={target} of the loop mine: " in message
    assert part in message
    assert "PYTHONPATH" in message


def test_missing_tool_files_are_refused(tmp_path: Path) -> None:
    for name in ("tool_config_path", "function_tool_path"):
        key = f"{MULTI_TURN}.{name}"
        assert f"{key}={tmp_path}/tools: no such file" in refusal(f"{key}={tmp_path}/tools")
    (tmp_path / "tools").write_text("tools: []\n")
    validate(resolved(f"{MULTI_TURN}.tool_config_path={tmp_path}/tools"))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("- class_name: json.JSONDecoder", "it must have `tools`"),
        ("tools: [", "it is not YAML"),
        ("calculator", "it must have `tools`"),
        ("tools: [config: {type: native}]", "entry 1 lacks it"),
        # The tool of verl's earlier GSM8K examples.
        ("tools: [class_name: verl.tools.gsm8k_tool.Gsm8kTool]", "verl.tools.gsm8k_tool; the installed release lacks"),
        (
            "tools: [class_name: my_tools.Gsm8kTool]",
            "no module named my_tools; correct it, or add its folder",
        ),
        ("tools: [class_name: Gsm8kTool]", "not the full name of a class"),
    ],
)
def test_the_classes_of_tools_must_exist(content: str, part: str, tmp_path: Path) -> None:
    key, file = f"{MULTI_TURN}.tool_config_path", tmp_path / "tools.yaml"
    file.write_text("tools: [class_name: json.JSONDecoder]")
    validate(resolved(f"{key}={file}"))
    file.write_text(content)
    message = refusal(f"{key}={file}")
    assert f"{key}={file}: " in message
    assert part in message


NAMED = [
    ("reward.custom_reward_function.path", "reward.custom_reward_function.name"),
    ("reward.reward_manager.module.path", "reward.reward_manager.name"),
    ("data.custom_cls.path", "data.custom_cls.name"),
]


@pytest.mark.parametrize(("path_key", "name_key"), NAMED)
def test_what_verl_loads_by_its_path_must_be_there(
    path_key: str, name_key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `verl.utils.import_utils.load_extern_object` will look for it; the file is not run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    source = ["reward.reward_manager.source=importlib"] if path_key.startswith("reward.reward_manager") else []
    (tmp_path / "mine.py").write_text("import os\nSCALE = os.environ['ONLY_IN_RAY']\ndef graded(): ...\n")
    for good in ("mine.py", f"{tmp_path}/mine.py", "file://mine.py", "pkg://mine"):
        validate(resolved(*source, f"{path_key}={good}", f"{name_key}=graded"))
    for missing in ("yours.py", "file://yours.py"):
        message = refusal(*source, f"{path_key}={missing}", f"{name_key}=graded")
        assert f"{path_key}={missing}: no such file in {tmp_path}: yours.py" in message
    assert f"{path_key}=pkg://yours: no module named yours" in refusal(
        *source, f"{path_key}=pkg://yours", f"{name_key}=graded"
    )
    assert f"{name_key}=None: give the name" in refusal(*source, f"{path_key}=mine.py", f"{name_key}=null")


def test_reward_managers_that_nobody_registered_are_refused() -> None:
    for known in ("naive", "dapo"):
        validate(resolved(f"reward.reward_manager.name={known}"))
    message = refusal("reward.reward_manager.name=prime")
    assert "reward.reward_manager.name=prime: no such reward manager; choose one of dapo, " in message
    assert "module.path=None" in refusal(
        "reward.reward_manager.source=importlib", "reward.reward_manager.module.path=null"
    )
    message = refusal("reward.reward_manager.source=importlib")
    assert "reward.reward_manager.module.path=None: source=importlib reads a class from it" in message


@pytest.mark.parametrize("brings", ["env_vars.PYTHONPATH=/mine", "working_dir=/mine", "pip=[mine]"])
def test_modules_that_ray_brings_along_are_warned_of(
    brings: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: my_loops.MyLoop\n")
    with caplog.at_level(logging.WARNING):
        validate(resolved(f"{LOOPS}={loops}", f"+ray_kwargs.ray_init.runtime_env.{brings}"))
    assert "no module named my_loops" in caplog.text
    runtime_env = f"+ray_kwargs.ray_init.runtime_env.{brings}"
    with caplog.at_level(logging.WARNING):
        validate(resolved("reward.custom_reward_function.path=rewards.py", runtime_env))
    assert "reward.custom_reward_function.path=rewards.py: no such file" in caplog.text
    assert "/no/rewards.py: no such file" in refusal("reward.custom_reward_function.path=/no/rewards.py", runtime_env)
    assert "data.train_files=/no: no such file" in refusal(runtime_env, "data.train_files=/no")


def test_every_loop_that_a_worker_knows_is_known_here_without_vllm(tmp_path: Path) -> None:
    """The workers of verl's own manager know only verl's loops.

    The workers need vLLM; imported by the driver it costs seconds, and memory for the whole training run.
    """
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    importlib.import_module("rollout_hooks.worker")  # registers its loops
    ours = {name for name, entry in _agent_loop_registry.items() if entry["_target_"].startswith("rollout_hooks.")}
    assert len(ours) >= 6
    (tmp_path / "loops.yaml").write_text("- name: mine\n  _target_: rollout_hooks.capture.async_llm.AsyncLLM\n")
    program = (
        "import json, sys, verl_tree.cpu.platform; from input_cases import resolved\n"
        "from verl_tree.launch.checks import validate\n"
        "from verl_tree.launch.checks.code import _registered_loops\n"
        f"of_verl = _registered_loops(resolved('{MANAGER}=null'))\n"
        f"validate(resolved('{DEFAULT}=parallel_tools', '{LOOPS}={tmp_path}/loops.yaml'))\n"
        "assert not {'vllm', 'rollout_hooks.worker'} & set(sys.modules)\n"
        "print(json.dumps([list(of_verl), list(_registered_loops(resolved()))]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    of_verl, of_ours = map(set, json.loads(done.stdout.splitlines()[-1]))
    assert "single_turn_agent" in of_verl & of_ours
    assert (ours & of_verl, ours & of_ours) == (set(), ours)
