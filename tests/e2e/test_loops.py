"""Three steps of real training whose rows name the agent loops; every batch has rows of every loop.

What they log is also read back from wandb.
"""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tiny_run import make_inputs, run
from wandb_file import read_history

from verl_tree.dashboards.panels import TOPICS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

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
def metrics(folder: Path) -> dict[int, dict[str, Any]]:
    """Train; Ray's processes have the variables of this one."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_MODE", "offline")
        environment.setenv("WANDB_DIR", str(folder))
        return run(
            folder, "loops", *RUN, f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder}/echo_tool.py"
        )


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


def test_wandb_has_what_the_panels_show(folder: Path, metrics: dict[int, dict[str, Any]]) -> None:
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = read_history(path)
    assert set(metrics) <= set(history)
    # The run has no critic, validates nothing, relays nothing and is synchronous.
    of_others = re.compile(r"perf/mfu/critic|tree/async/|tree/store_gib$")
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
    assert f"pages of training trees, to be opened in a browser: {page}" in (folder / "loops.log").read_text()
