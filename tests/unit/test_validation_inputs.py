"""What is not there, or no text, is refused before Ray starts: data, models, agent loops, tools, folders."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from input_cases import resolved, write_model, write_rows

from verl_tree.validation import validate

MODEL = "actor_rollout_ref.model.path"
AGENT = "actor_rollout_ref.rollout.agent"
LOOPS = f"{AGENT}.agent_loop_config_path"
DEFAULT = f"{AGENT}.default_agent_loop"
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


def refusal(*overrides: str) -> str:
    with pytest.raises(ValueError) as error:
        validate(resolved(*overrides))
    return str(error.value)


def test_missing_data_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, missing = write_rows(tmp_path / "rows.parquet"), tmp_path / "typo.parquet"
    for good in (here, f"[{here},{here}]", "rows.parquet", "ro*.parquet", "hdfs://x/y.parquet", "s3://x/y.parquet"):
        validate(resolved(f"data.train_files={good}", f"data.val_files={good}"))
    assert f"data.train_files={missing}: no such file: {missing}" in refusal(f"data.train_files={missing}")
    assert f"no such file: {missing}" in refusal(f"data.val_files=[{here},{missing}]")
    assert f"data.val_files=rows.json: no such file in {tmp_path}" in refusal("data.val_files=rows.json")
    assert "data.val_files=None: names no file" in refusal("data.val_files=null")
    validate(resolved(f"data.train_files={missing}", "data.custom_cls.path=mine.py"))


def test_tilde_is_written_out_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither datasets nor transformers expand it, so a folder that exists would not be found either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "rows.parquet")
    write_model(tmp_path / "model")
    message = refusal("data.train_files=~/rows.parquet")
    assert f"data.train_files=~/rows.parquet: ~ is not expanded; give {tmp_path}/rows.parquet" in message
    assert f"{MODEL}=~/model: ~ is not expanded; give {tmp_path}/model" in refusal(f"{MODEL}=~/model")


@pytest.mark.parametrize("key", [MODEL, "critic.model.path"])
def test_missing_model_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    write_model(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    for good in ("good", f"{tmp_path}/good", "Qwen/Qwen3-0.6B", "gpt2", "hdfs://x/y"):
        validate(resolved("critic.enable=true", f"{key}={good}"))
    for missing in (f"{tmp_path}/typo", "./typo", "../typo", "a/b/typo"):
        message = refusal("critic.enable=true", f"{key}={missing}")
        assert f"{key}={missing}: no such folder" in message
        assert "owner/model" in message
    assert f"{key}=empty: the folder has no config.json" in refusal("critic.enable=true", f"{key}=empty")
    assert f"{key}=good/: " in refusal("critic.enable=true", f"{key}=good/")


def test_model_of_a_critic_that_is_not_used_may_be_missing() -> None:
    validate(resolved("critic.enable=false", "critic.model.path=/no/such/folder"))


def test_hub_model_that_is_not_cached_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert f"{MODEL}=owner/model: no such folder, and HF_HUB_OFFLINE is set" in refusal(f"{MODEL}=owner/model")
    revision = tmp_path / "models--owner--model" / "refs" / "main"
    revision.parent.mkdir(parents=True)
    revision.write_text("0" * 40)
    write_model(tmp_path / "models--owner--model" / "snapshots" / ("0" * 40))
    validate(resolved(f"{MODEL}=owner/model"))


@pytest.mark.parametrize("tower", ["vision_config", "audio_config"])
def test_multimodal_model_is_refused(tmp_path: Path, tower: str) -> None:
    assert tower in refusal(f"{MODEL}={write_model(tmp_path, **{tower: {}})}")
    validate(resolved(f"{MODEL}={write_model(tmp_path)}"))


def test_multimodal_rows_are_refused(tmp_path: Path) -> None:
    text, images = write_rows(tmp_path / "text.parquet"), write_rows(tmp_path / "images.parquet", "images")
    validate(resolved(f"data.train_files={text}", f"data.val_files=[{text}]"))
    message = refusal(f"data.train_files={text}", f"data.val_files=[{text},{images}]")
    assert message.startswith(f"data.image_key=images: {images}")


def test_file_of_loops_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"{LOOPS}=loops.yaml: no such file in {tmp_path}" in refusal(f"{LOOPS}=loops.yaml")
    assert f"{LOOPS}=/no/loops.yaml: no such file" in refusal(f"{LOOPS}=/no/loops.yaml")
    loops = tmp_path / "loops.yaml"
    target = "_target_: rollout_hooks.memory.MemoryAgentLoop"
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


def test_unknown_loop_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    for known in ("single_turn_agent", "tool_agent", "parallel_tools", "tree_search", "blackbox"):
        validate(resolved(f"{DEFAULT}={known}"))
    message = refusal(f"{DEFAULT}=paralel_tools")
    assert f"{DEFAULT}=paralel_tools: no such agent loop; did you mean parallel_tools?" in message
    assert "single_turn_agent, subagents, tool_agent, tree_search" in message
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: note_taker\n  _target_: rollout_hooks.memory.MemoryAgentLoop\n")
    assert "did you mean note_taker?" in refusal(f"{LOOPS}={loops}", f"{DEFAULT}=notetaker")


def test_rows_may_name_their_loops(tmp_path: Path) -> None:
    """Then the default counts only where rows without a name are left."""
    rows = {}
    for name, loops in (("good", ["tool_agent", "mine"]), ("bad", ["tool_agent", "tool_agnt"])):
        rows[name] = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "agent_name": loops}), rows[name])
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: rollout_hooks.memory.MemoryAgentLoop\n")
    mine, train, val = f"{LOOPS}={loops}", f"data.train_files={rows['good']}", f"data.val_files={rows['good']}"
    validate(resolved(mine, train, val, f"{DEFAULT}=nothing"))
    assert refusal(mine, train, f"{DEFAULT}=nothing").startswith(f"{DEFAULT}=nothing: no such agent loop")
    message = refusal(mine, f"data.train_files={rows['bad']}", val)
    assert message.startswith("data.train_files=") and "agent_name has 'tool_agnt': no such agent loop;" in message
    assert "did you mean tool_agent?" in message


def test_loops_of_a_manager_of_the_users_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registers = "from verl.experimental.agent_loop.agent_loop import register\n@register('theirs')\nclass Loop: ...\n"
    (tmp_path / "their_manager.py").write_text(f"{registers}class Manager: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    key = f"{AGENT}.agent_loop_manager_class"
    validate(resolved(f"{key}=their_manager.Manager", f"{DEFAULT}=theirs"))
    message = refusal(f"{key}=their_manager.Manger")
    assert f"{key}=their_manager.Manger: {tmp_path}/their_manager.py has no Manger" in message


LOOP_TARGETS = {
    "my_loops.Missing": "my_loops.py has no Missing",
    "my_lops.MyLoop": "no module named my_lops",
    "my_package.sub.MyLoop": "my_package/__init__.py has no sub",
    "my_folder.sub.MyLoop": "no module named my_folder.sub",
    "my_loops.inner.MyLoop": "my_loops.py has no inner",
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


def test_folder_of_trees_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/trees"):
        assert f"tree.dump_dir={tmp_path}/{name}: {tmp_path}/file is a file" in refusal(
            f"tree.dump_dir={tmp_path}/{name}"
        )
    assert "tree.dump_dir=s3://x/trees: trees are written to a local folder" in refusal("tree.dump_dir=s3://x/trees")
    validate(resolved(f"tree.dump_dir={tmp_path}/a/b"))
    assert not (tmp_path / "a").exists(), "a check makes nothing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_of_trees_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert f"{tmp_path} cannot be written to" in refusal(f"tree.dump_dir={tmp_path}/trees")


ELSEWHERE = ["trainer.nnodes=2", "+ray_kwargs.ray_init.address=auto"]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_missing_files_are_warned_of_where_other_machines_may_have_them(
    elsewhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    missing = ["data.train_files=/no/rows.parquet", f"{MODEL}=/no/model", f"{LOOPS}=/no/loops.yaml"]
    with caplog.at_level(logging.WARNING):
        validate(resolved(elsewhere, *missing))
    for each in missing:
        assert f"{each}: no such" in caplog.text


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
    assert "data.train_files=/no: no such file" in refusal(runtime_env, "data.train_files=/no")


def test_looking_up_loops_leaves_vllm_alone(tmp_path: Path) -> None:
    """vLLM belongs to the workers; imported by the driver it costs seconds, and memory for the whole run."""
    (tmp_path / "loops.yaml").write_text("- name: mine\n  _target_: rollout_hooks.async_llm.AsyncLLM\n")
    program = (
        "import sys, verl_tree.plugin; from input_cases import resolved; from verl_tree.validation import validate\n"
        f"validate(resolved('{DEFAULT}=parallel_tools', '{LOOPS}={tmp_path}/loops.yaml'))\n"
        "assert not {'vllm', 'rollout_hooks.worker'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_loop_that_a_worker_knows_is_known_here() -> None:
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    import rollout_hooks.worker  # noqa: F401 - registers its loops

    known = [name for name, entry in _agent_loop_registry.items() if entry["_target_"].startswith("rollout_hooks.")]
    program = (
        "import verl_tree.plugin; from input_cases import resolved\n"
        "from verl_tree.validation_inputs import _registered_loops; print(','.join(_registered_loops(resolved())))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert set(known) <= set(done.stdout.split()[-1].split(","))
    assert len(known) >= 6
