"""Capture end to end: verl's agent loop manager and worker with Ray and TransferQueue; only the LLM server is scripted.

The batch has four prompts with three sessions each. The first runs a branching loop with rewards of its own, the second
verl's tool loop with verl's reward worker. One session of the third prompt fails, and all sessions of the fourth.
"""

import itertools
import pathlib
import time
import uuid

import numpy as np
import pytest
import ray
import transfer_queue as tq
import yaml
from omegaconf import OmegaConf, open_dict
from scripted_llm import END, ScriptedClient, call_text, config, tokenizer
from transfer_queue import KVBatchMeta
from transformers import Qwen3Config
from typing_extensions import override
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.utils import tensordict_utils as tu

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG
from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.wire_columns import read_value
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop
from rollout_hooks.worker import TreeAgentLoopManager
from verl_tree.trainer.rows.step_rows import StepRows, shapes_of_columns

pytestmark = pytest.mark.e2e
N = 3
TURN = call_text(3, "twice") + call_text(4, "twice")
TOOLS = '''
from verl.tools.function_tool import function_tool

@function_tool("twice")
def twice(x: int) -> str:
    """Double a number.

    Args:
        x: The number.
    """
    return str(2 * x)
'''


class NamedResult(ParallelToolsAgentLoop):
    """A loop whose conclusions are worth 1 if they name their result; answers are worth 2, "buggy" rows raise."""

    @override
    async def branch_reward(self, *, row, call, result, conclusion):
        return float(result.text in conclusion)

    @override
    async def final_reward(self, *, row, answer):
        return {"test": 2.0}[str(row["data_source"])]


def reward_by_verl(data_source, **_row):
    """Return a reward as verl's custom reward functions do; raise for a "buggy" row."""
    return {"score": {"test": 0.75}[str(data_source)], "acc": 1.0}


def line_of(code):
    """Return the traceback of an error that this line of this file raises, but for the function."""
    number = [each.strip() for each in pathlib.Path(__file__).read_text().splitlines()].index(code) + 1
    return f'File "{__file__}", line {number}'


class Reply:
    """Answers that depend on the prompt's question; the first session of a "flaky" prompt loses its server."""

    def __init__(self):
        self.calls = itertools.count()

    def __call__(self, prompt):
        if "dead" in prompt or ("flaky" in prompt and next(self.calls) == 0):
            return RuntimeError("server lost")
        if "[6]" in prompt:
            return "6 and 8" if "[8]" in prompt else "it is 6"
        if "[8]" in prompt:
            return "no idea"
        return TURN


@pytest.fixture
def settings(tmp_path):
    """Return verl's configuration for a tiny model, the tools of the unit tests and the two loops."""
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer()),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    ).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    loops = tmp_path / "loops.yaml"
    loops.write_text(yaml.safe_dump([{"name": "named_result", "_target_": f"{__name__}.NamedResult"}]))
    result = config(
        prompt_length=256,
        response_length=384,
        n=N,
        name="vllm",
        agent__num_workers=1,
        agent__agent_loop_config_path=str(loops),
        multi_turn__function_tool_path=str(tmp_path / "tools.py"),
    )
    with open_dict(result):
        result.actor_rollout_ref.model.path = str(tmp_path)
        result.reward.custom_reward_function.path = __file__
        result.reward.custom_reward_function.name = "reward_by_verl"
        result.transfer_queue.enable = True
        result.transfer_queue.backend.SimpleStorage.num_data_storage_units = 1
    OmegaConf.resolve(result)  # actors know no resolvers of ours, which Hydra has where another file composed with them
    return result


def start(manager, prompts, partition):
    """Submit prompts as verl's trainer does, and return their uids."""
    size = len(prompts)
    batch = tu.get_tensordict(
        {
            "raw_prompt": np.array([[{"role": "user", "content": text}] for text, _ in prompts] + [None], dtype=object)[
                :-1
            ],
            "agent_name": np.array([loop for _, loop in prompts], dtype=object),
            "uid": np.array([str(uuid.uuid4()) for _ in prompts], dtype=object),
            "index": np.array(list(range(size)), dtype=object),
            "data_source": np.array(["buggy" if text == "buggy" else "test" for text, _ in prompts], dtype=object),
            "reward_model": np.array([{"ground_truth": "7"}] * size, dtype=object),
            "extra_info": np.array([{"number": i} for i in range(size)], dtype=object),
        }
    )
    uids = list(batch["uid"])
    tu.assign_non_tensor_data(batch, "global_steps", 1)
    if partition == "val":
        tu.assign_non_tensor_data(batch, "validate", True)
    tags = [{"is_prompt": True, "status": "pending", "global_steps": 1} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=tags)
    manager.generate_sequences(batch)
    return uids


def submit(manager, prompts, partition):
    """Submit prompts, wait until all have ended, and return their uids, their statuses and the keys of the rows."""
    uids = start(manager, prompts, partition)
    deadline = time.monotonic() + 120
    while True:
        items = tq.kv_list(partition)[partition]
        statuses = [items[uid]["status"] for uid in uids]
        if not set(statuses) & {"pending", "running"}:
            return uids, statuses, sorted(set(items) - set(uids))
        assert time.monotonic() < deadline, statuses
        time.sleep(0.1)


def texts(values):
    return [tokenizer().decode(ids.tolist()) for ids in values]


@pytest.mark.usefixtures("queue")
def test_capture_through_verls_manager_worker_and_queue(settings):
    reward_worker = ray.remote(RewardLoopWorker).remote(settings)
    manager = TreeAgentLoopManager.create(
        config=settings, llm_client=ScriptedClient(Reply()), reward_loop_worker_handles=[reward_worker]
    )
    prompts = [("q", "named_result"), ("q", "tool_agent"), ("flaky", "named_result"), ("dead", "named_result")]
    uids, statuses, rows = submit(manager, prompts, "train")
    assert statuses == ["finished", "finished", "finished", "failure"]
    of_prompt = [[key for key in rows if key.startswith(uid)] for uid in uids]
    assert [len(keys) for keys in of_prompt] == [9, 3, 6, 0]
    assert of_prompt[0] == [f"{uids[0]}_{session}_{leaf}" for session in range(N) for leaf in range(3)]

    client = tq.get_client()
    meta = client.kv_retrieve_meta(keys=of_prompt[0], partition_id="train")
    stored = client._run_coroutine(client.storage_manager.stored(meta.global_indexes, ["input_ids"]))
    owners = [read_value(stored["input_ids", row]).owners for row in meta.global_indexes]
    assert any(owners), "rows have elements of other ones"

    data = tq.kv_batch_get(keys=of_prompt[0], partition_id="train")
    turn = TURN + END
    concluded = [text.split("assistant\n")[-1] for text in texts(data["responses"].unbind())]
    assert concluded == ["it is 6" + END, "no idea" + END, "6 and 8" + END] * N
    assert data["rm_scores"].to_padded_tensor(0.0).sum(dim=1).tolist() == [1.0, 0.0, 2.0] * N
    for response, mask, log_probs in zip(
        data["responses"].unbind(), data["response_mask"].unbind(), data["rollout_log_probs"].unbind(), strict=True
    ):
        trained = tokenizer().decode(response[mask.bool()].tolist())
        assert trained == turn + tokenizer().decode(response.tolist()).split("assistant\n")[-1]
        assert (log_probs[mask.bool()] < 0).all()
        assert (log_probs[~mask.bool()] == 0).all()

    stock = tq.kv_batch_get(keys=of_prompt[1], partition_id="train")
    assert stock["rm_scores"].to_padded_tensor(0.0).sum(dim=1).tolist() == [0.75] * N
    assert list(stock["num_turns"]) == [4] * N

    tags = tq.kv_list("train")["train"]
    told = StepRows.fetch(KVBatchMeta(partition_id="train", keys=rows, tags=[tags[key] for key in rows]))
    assert all(LEAF_SHAPE_TAG in tags[key] for key in rows), "a group without its failed sessions has its shapes, too"
    read = tq.kv_batch_get(keys=rows, partition_id="train", select_fields=["input_ids", "response_mask", "rm_scores"])
    expected = shapes_of_columns(rows, read)
    expected["reward"] = [scores.sum() for scores in read["rm_scores"].unbind()]
    np.testing.assert_array_equal(told.shapes, expected)
    assert {"prompt_len", "response_len", "seq_len", "status"} < set(tags[rows[0]]), "verl's tags are kept"
    others = [{name: value for name, value in tags[key].items() if name != LEAF_SHAPE_TAG} for key in rows]
    untold = StepRows.fetch(KVBatchMeta(partition_id="train", keys=rows, tags=others))
    np.testing.assert_array_equal(untold.shapes, expected)

    report = manager.drain_capture_report("train")
    assert (report.num_sessions, report.num_leaves, report.num_dropped_leaves) == (12, 18, 0)
    assert (report.num_calls, report.num_continuations, report.num_forks) == (5 * 4 + 3 * 2 + 1 + 3, 5 + 3, 5 * 2)
    assert (report.num_rewrites, report.num_drifts, report.num_failed_calls) == (0, 0, 4)
    assert report.failed_prompts == (uids[3],)
    causes = {(failed.uid, failed.cause, failed.num_calls) for failed in report.failed_sessions}
    assert causes == {(uid, "RuntimeError: server lost", 1) for uid in uids[2:]}
    assert len(report.failed_sessions) == 4
    assert manager.drain_capture_report("train") == CaptureReport()

    _, statuses, rows = submit(manager, prompts[:1], "val")
    assert (statuses, len(rows)) == (["finished"], 3)  # val_kwargs.n is 1
    tags = tq.kv_list("val")["val"]
    assert not any(LEAF_SHAPE_TAG in tags[key] for key in rows), "nobody balances a validation"
    assert manager.drain_capture_report("train") == CaptureReport()
    assert manager.drain_capture_report("val").num_leaves == 3

    uids, statuses, _ = submit(manager, [("buggy", "named_result"), ("buggy", "tool_agent")], "val")
    assert statuses == ["failure", "failure"]
    failed = {each.uid: each for each in manager.drain_capture_report("val").failed_sessions}
    assert [failed[uid].cause for uid in uids] == ["KeyError: 'buggy'"] * 2
    hook, function = (failed[uid].traceback for uid in uids)
    code = 'return {"test": 2.0}[str(row["data_source"])]'
    assert hook == f"in the group: KeyError: 'buggy'\n{line_of(code)}, in final_reward\n  {code}"
    code = 'return {"score": {"test": 0.75}[str(data_source)], "acc": 1.0}'
    assert function.startswith(f"{line_of(code)}, in reward_by_verl\n  {code}"), "it runs in a process of its own"
    with pytest.raises(ValueError, match="must be one of"):
        manager.drain_capture_report("test")
