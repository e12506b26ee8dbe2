"""What `tree.living` relies on of verl 0.9.1: prompts taken apart and put together, and log-probs of a prompt."""

import ast
import inspect
import textwrap
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import NonTensorStack
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.vllm_rollout.utils import extract_prompt_logprobs


def test_rows_of_a_batch_make_a_batch_again() -> None:
    columns = {"raw_prompt": [[{"content": "a"}], [{"content": "b"}], [{"content": "c"}]], "uid": list("xyz")}
    batch = tu.get_tensordict({**columns, "index": np.array([4, 5, 6], dtype=object), "dummy": torch.arange(3)})
    rows = [tu.index_select_tensor_dict(batch, [row]) for row in (2, 0)]
    again = tu.concat_tensordict(rows)
    assert list(again["uid"]) == ["z", "x"]
    assert [each[0]["content"] for each in again["raw_prompt"]] == ["c", "a"]
    assert list(again["index"]) == [6, 4]
    assert again["dummy"].tolist() == [2, 0]


def test_a_column_of_objects_reaches_the_sessions_of_its_prompt() -> None:
    """The worker takes each value out of its stack, and None stays None."""
    batch = tu.get_tensordict({"uid": list("xy")})
    point = SimpleNamespace(token_ids=[1, 2])
    tu.assign_non_tensor_stack(batch, "starting_point", [None, point])
    assert isinstance(batch.get("starting_point"), NonTensorStack)
    assert [each.data for each in batch.get("starting_point").unbind(0)] == [None, point]
    source = inspect.getsource(AgentLoopWorkerTQ.__ray_metadata__.modified_class.generate_sequences)
    assert "prompt[k] = v[i].data" in source
    assert "self._run_prompt(prompt, sampling_params" in source


def test_every_prompt_comes_from_one_method_in_whole_batches() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(PPOTrainer._next_train_batch)))
    called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "attr")}
    assert "_fetch_one_gen_batch" in called
    assert "next" not in called


def test_log_probs_of_a_prompt_begin_with_its_second_token() -> None:
    values = [None, {7: SimpleNamespace(logprob=-0.5)}, {8: SimpleNamespace(logprob=-0.25)}]
    fields: dict = {}
    extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=values), 0, fields)
    assert fields == {"prompt_logprobs": [[-0.5], [-0.25], [0.0]], "prompt_ids": [[7], [8], [0]]}
    extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=None), None, fields := {})
    assert fields == {}
