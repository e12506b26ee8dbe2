"""What router replay relies on in verl 0.9.1 and transformers 5: where routes are written, and what nobody adds."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

pytest.importorskip("verl")

from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.padding_utils import build_padding_routed_experts
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig
from verl.workers.engine_workers import _with_routing_replay_flag


def test_rows_carry_a_route_for_each_token_and_zeros_where_none_is_known():
    routes = np.array([[[3, 1]], [[2, 4]], [[1, 2]]])  # of three tokens; the engine never computes the last one
    output = AgentLoopOutput(
        prompt_ids=[5, 6], response_ids=[7, 8], response_mask=[1, 1], routed_experts=routes, metrics=AgentLoopMetrics()
    )
    column = output.as_dict()["routed_experts"]
    assert column.dtype == torch.int16
    assert column.tolist() == [[[3, 1]], [[2, 4]], [[1, 2]], [[0, 0]]]


def test_padding_rows_have_routes_of_zeros():
    assert build_padding_routed_experts(torch.ones(7, 3, 2, dtype=torch.int16), 2).tolist() == [[[0, 0]] * 3] * 2


def test_selecting_rows_keeps_their_routes():
    rows = [torch.arange(size * 6, dtype=torch.int16).view(size, 3, 2) for size in (2, 4, 1)]
    batch = TensorDict({"routed_experts": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[3])
    chosen = tu.index_select_tensor_dict(batch, torch.tensor([2, 1]))["routed_experts"]
    assert chosen.values().shape == (5, 3, 2)
    for found, wanted in zip(chosen.unbind(), (rows[2], rows[1]), strict=True):
        assert torch.equal(found, wanted)


def test_engine_configs_have_a_mode():
    assert FSDPEngineConfig(strategy="fsdp2").router_replay.mode == "disabled"
    assert EngineRouterReplayConfig(mode="R2").mode == "R2"
    with pytest.raises(ValueError, match="R4"):
        EngineRouterReplayConfig(mode="R4")


@pytest.mark.parametrize(("is_on", "flag"), [(False, None), (True, False)])
def test_workers_say_which_pass_replays(is_on, flag):
    """Only for Megatron and VeOmni. Where it is off, as for FSDP, a batch says nothing."""
    run = _with_routing_replay_flag(enabled=False)(lambda _worker, data: tu.get(data, "enable_routing_replay"))
    assert run(SimpleNamespace(enable_routing_replay=is_on), TensorDict({}, batch_size=[])) is flag


def test_transformers_names_the_routers():
    recorder = tiny_model("qwen3 moe").can_record_outputs["router_logits"]
    assert recorder.target_class.__name__ == "Qwen3MoeTopKRouter"
    assert "router_logits" not in tiny_model("qwen3").can_record_outputs


def test_transformers_adds_the_auxiliary_loss_to_its_own_loss_only():
    """Verl's FSDP engine gives no labels and reads logits only, so it trains without an auxiliary loss."""
    model = tiny_model("qwen3 moe")
    token_ids = torch.tensor([[3, 4, 5]])
    out = model(input_ids=token_ids, output_router_logits=True)
    assert out.loss is None
    assert torch.equal(out.logits, model(input_ids=token_ids).logits)
    assert model(input_ids=token_ids, labels=token_ids, output_router_logits=True).loss > 0
