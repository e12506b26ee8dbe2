"""Three steps of a job on a running Ray cluster: `ray job submit -- python -m verl_tree.main_ppo ...`.

Actor and critic train on two ranks, and the rows name the agent loops; every batch has rows of every loop. What the run
logs is also read back from wandb.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from process_groups import free_port
from tiny_run import command, environment, make_inputs, read_metrics
from wandb_file import read_history

from verl_tree.dashboards.panels import TOPICS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RAY = str(Path(sys.executable).with_name("ray"))

NUM_SESSIONS = 2
OPTIONS = {
    "memory": {"_target_": "calling_loops.Memory", "max_notes": 2},
    "compaction": {
        "_target_": "calling_loops.Compaction",
        "max_context_len": 45,
        "max_summary_len": 5,
        "request": "sum up",
        "preface": "so far ",
    },
    "subagents": {"_target_": "calling_loops.Subagents", "max_children": 3, "child_system_prompt": "help"},
    "search_at_random": {"_target_": "calling_loops.TreeSearch", "num_trees": 2},
    "search_by_entropy": {"_target_": "calling_loops.TreeSearch", "select": "entropy", "num_rounds": 2},
    "parallel": {"_target_": "calling_loops.ParallelTools"},
}
RUN = (
    f"data.train_batch_size={len(OPTIONS)}",
    f"actor_rollout_ref.rollout.n={NUM_SESSIONS}",
    "actor_rollout_ref.rollout.agent.default_agent_loop=memory",  # for the validation rows, which name none
    "data.max_prompt_length=128",
    "data.max_response_length=96",
    "actor_rollout_ref.rollout.max_model_len=224",
    "actor_rollout_ref.rollout.multi_turn.format=anything",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    # A mini-batch of one group is cut to feed both ranks.
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "algorithm.adv_estimator=gae",
    "critic.ppo_mini_batch_size=1",
    "critic.ppo_max_token_len_per_gpu=256",
    "critic.optim.lr=1e-2",
    "trainer.n_gpus_per_node=2",
    "trainer.total_training_steps=3",
    "trainer.logger=[console,file,wandb]",
)
TOOL = '''
from verl.tools.function_tool import function_tool


@function_tool("echo")
def echo(text: str) -> str:
    """Say it again.

    Args:
        text: What to say.
    """
    return text[:4]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, a tool, the options of the loops, and rows that name them in turn."""
    folder = tmp_path_factory.mktemp("loops")
    make_inputs(folder)
    (folder / "echo_tool.py").write_text(TOOL)
    loops = [
        {"name": name, **options, "log": f"{folder}/sessions.jsonl", "max_turn_len": 5, "call_timeout_s": 60.0}
        for name, options in OPTIONS.items()
    ]
    (folder / "loops.yaml").write_text(json.dumps(loops))
    rows = pd.read_parquet(folder / "train.parquet").iloc[: 2 * len(OPTIONS)]
    rows.assign(agent_name=[*OPTIONS, *OPTIONS]).to_parquet(folder / "train.parquet")
    return folder


@pytest.fixture(scope="module")
def dashboard(folder: Path) -> Iterator[str]:
    """Start a head node with two logical GPUs in a session folder of its own; return its dashboard's address."""
    temp_dir = Path("/tmp") / f"ray-{os.getpid()}"  # Ray's sockets do not fit into the length of pytest's paths
    address = f"http://127.0.0.1:{free_port()}"
    start = [RAY, "start", "--head", "--block", "--num-cpus=16", "--num-gpus=2", f"--temp-dir={temp_dir}"]
    # Jobs are submitted through the dashboard's agent, whose own port a second cluster on this machine would take.
    ports = [f"--port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
    dashboard_options = [f"--dashboard-port={address.rsplit(':', 1)[1]}", "--include-dashboard=true"]
    with pytest.MonkeyPatch.context() as variables, (folder / "head.log").open("w") as log:
        # Ray 2.60 asks for a token by default; this cluster and the job share one of their own.
        variables.setenv("RAY_AUTH_MODE", "token")
        variables.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        head = subprocess.Popen(
            start + ports + dashboard_options,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        )
        try:
            _wait_for(f"{address}/api/version", log=folder / "head.log", head=head)
            yield address
        finally:
            os.killpg(head.pid, signal.SIGTERM)
            for process in psutil.process_iter(["cmdline"]):
                if str(temp_dir) in " ".join(process.info["cmdline"] or []):
                    process.kill()
            head.wait(timeout=60)
            shutil.rmtree(temp_dir, ignore_errors=True)


def _wait_for(url: str, *, log: Path, head: subprocess.Popen, timeout_s: int = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != 401:  # it is up, and wants the token that `ray job submit` sends
                raise
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            if head.poll() is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text()[-4000:])
            time.sleep(0.5)


@pytest.fixture(scope="module")
def metrics(folder: Path, dashboard: str) -> dict[int, dict[str, Any]]:
    """Train and return the metrics of every step."""
    metrics = folder / "metrics.jsonl"
    variables = {"VERL_FILE_LOGGER_PATH": f"{metrics}", "WANDB_MODE": "offline", "WANDB_DIR": f"{folder}"}
    tool = f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder}/echo_tool.py"
    options = (*RUN, tool, f"critic.model.path={folder}/model")
    submitted = subprocess.run(
        [
            *(RAY, "job", "submit", f"--address={dashboard}"),
            f"--runtime-env-json={json.dumps({'env_vars': variables})}",
            *("--", *command(folder, *options)),
        ],
        env=environment(metrics),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    (folder / "job.log").write_text(submitted.stdout)
    assert submitted.returncode == 0, submitted.stdout[-6000:] + submitted.stderr[-2000:]
    return read_metrics(metrics)


def test_every_loop_trains(folder: Path, metrics: dict[int, dict[str, Any]]) -> None:
    assert set(metrics) == {1, 2, 3}
    for step in metrics.values():
        assert step["tree/failed_sessions"] == 0
        assert step["tree/failed_prompts"] == 0
        assert step["actor/grad_norm"] > 0
        assert step["tree/por"] > 0.2
        assert step["tree/leaves_per_session"] > 3

    sessions = defaultdict(list)
    for line in (folder / "sessions.jsonl").read_text().splitlines():
        session = json.loads(line)
        sessions[session["loop"]].append(session["rows"])
    num_each = 3 * NUM_SESSIONS
    assert {loop: len(rows) for loop, rows in sessions.items()} == {
        "Memory": num_each,
        "Compaction": num_each,
        "Subagents": num_each,
        "TreeSearch": 2 * num_each,
        "ParallelTools": num_each,
    }
    assert all(trained > 0 for rows in sessions.values() for session in rows for _, trained in session)
    # Three turns have three contexts, and the first is the root prompt.
    assert all(len(session) == 3 and len({length for length, _ in session}) > 1 for session in sessions["Memory"])
    # Two turns with their results exceed max_context_len unless the model ended them early. The third is the last.
    assert {len(session) for session in sessions["Compaction"]} <= {1, 2, 3}
    assert max(len(session) for session in sessions["Compaction"]) >= 2
    assert all(len(session) > 1 for session in sessions["Subagents"])
    # M (1 + L N T) = 2 (1 + 2) and 1 + 2 * 2.
    assert sorted({len(session) for session in sessions["TreeSearch"]}) == [5, 6]
    assert all(len(session) > 2 for session in sessions["ParallelTools"])


def test_actor_and_critic_train_on_two_ranks(metrics: dict[int, dict[str, Any]]) -> None:
    for step in metrics.values():
        assert step["critic/vf_loss"] > 0
        assert step["critic/grad_norm"] > 0
        assert step["tree/gap"] >= 0.0
        assert 0.0 < step["tree/fill"] <= 1.0
        assert step["tree/packing_s"] > 0.0
        # Both engines have the updated policy in float32, so only rounding is left. Weights of the step before would
        # differ by at least 1e-4.
        assert step["training/rollout_probs_diff_max"] < 1e-5
    # Later steps are dealt by measured times. By these, cutting a group into such small packs may not pay.
    assert metrics[1]["tree/cut_groups"] == len(OPTIONS)
    assert metrics[1]["tree/cut_tokens"] > 0
    assert metrics[1]["tree/rank_imbalance/predicted"] < 1.5
    assert 1.0 <= metrics[1]["tree/rank_imbalance/measured"] < 2.0, "a rank had nothing to do"
    assert metrics[3]["critic/vf_loss"] < metrics[1]["critic/vf_loss"]


def test_wandb_has_what_the_panels_show(folder: Path, metrics: dict[int, dict[str, Any]]) -> None:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = read_history(path)
    assert set(metrics) <= set(history)
    # The run validates nothing, relays nothing, is synchronous, and updates with all rows.
    of_others = re.compile(r"tree/async/|tree/store_gib$|actor/live_rows/")
    shown = {key for panels in TOPICS.values() for panel in panels for key in panel.keys if not of_others.match(key)}
    assert len(shown) > 40
    assert shown - {key for values in history.values() for key in values} == set()
    for step, values in metrics.items():
        for key in shown & values.keys():
            assert history[step][key] == values[key], (step, key)
    # Trees are shown although nobody asked for it.
    assert history[1]["step/trees._type"] == "table-file"
    page = folder / "checkpoints" / "trees" / "step_000001_0.html"
    assert page.exists()
    assert f"pages of training trees, to be opened in a browser: {page}" in (folder / "job.log").read_text()
