"""Three steps of real training whose rows name the agent loops; every batch has rows of every loop."""

import json
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
from tiny_run import make_inputs, run

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


def test_every_loop_trains(folder: Path) -> None:
    metrics = run(
        folder,
        "loops",
        f"data.train_batch_size={len(OPTIONS)}",
        f"actor_rollout_ref.rollout.n={NUM_SESSIONS}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=memory",  # for the validation rows, which name none
        "data.max_prompt_length=128",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.max_model_len=224",
        "actor_rollout_ref.rollout.multi_turn.format=anything",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={folder}/echo_tool.py",
        "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=3",
    )
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
