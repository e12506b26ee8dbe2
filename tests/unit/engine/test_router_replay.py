"""Routes of rows: recorded (R2), imposed on trees (R2, R3), and what becomes of rows that disagree or do not know."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tiny_models import TINY_SETTINGS, tiny_model

pytest.importorskip("verl")

from float64_mode import Float64
from process_groups import group_of_one
from relay_cases import LossCase
from replay_cases import (
    NUM_TOKENS,
    PROMPTS,
    RESPONSES,
    batch,
    drawn_routes,
    gradients_of,
    oracle,
    recorded,
    save_mixtures,
)
from transformers import AutoModelForCausalLM, ExaoneMoeConfig
from tree_cases import flat_scores, gradients, layout_of, relative_error
from verl.utils import tensordict_utils as tu

from verl_tree.config import TREE_STRATEGY
from verl_tree.engine.canary import METRIC
from verl_tree.engine.routes.route_conflicts import first_known
from verl_tree.engine.routes.router_replay import RouterReplay, routers_of
from verl_tree.functional import tree_log_probs
from verl_tree.testing.local_worker import local_worker
from verl_tree.trainer.worker import TreeTrainingWorker

TOLERANCE = 1e-5
"""Relative, float32 against float32."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Save two models, as before and after some updates, in a process group of this process."""
    with pytest.MonkeyPatch.context() as variables, group_of_one():
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            variables.setenv(name, value)  # what verl's workers read
        yield save_mixtures(tmp_path_factory.mktemp("mixtures"))


def make_worker(
    folder: str, *, mode: str, capacity: int = 64, checkpointing: bool = False, **tree: str
) -> TreeTrainingWorker:
    return local_worker(
        folder,
        strategy=TREE_STRATEGY,
        max_token_len=capacity,
        model_options={"enable_gradient_checkpointing": checkpointing},
        router_replay=mode,
        tree_options=tree,
    )


def unknown() -> list[torch.Tensor]:
    return [torch.zeros_like(routes) for routes in drawn_routes(seed=0)]


def assert_gradients(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], *, tolerance: float = TOLERANCE
) -> float:
    """Compare, and return the worst error."""
    assert found.keys() == wanted.keys()
    errors = {name: relative_error(found[name], gradient) for name, gradient in wanted.items()}
    assert max(errors.values()) < tolerance, errors
    return max(errors.values())


def test_the_first_known_route_is_taken_and_disagreement_is_counted():
    # Token 0 of two rows: routes [1 2] and [2 1], the same experts. Token 1: the first row does not know it.
    # Token 2: [3 4] and [3 5]. Token 3 belongs to the second row only. One layer.
    rows = np.array([[1, 2], [0, 0], [3, 4], [2, 1], [6, 7], [3, 5], [0, 1]], dtype=np.int16)[:, None]
    routes, num_conflicts = first_known(rows, tree_index_F=np.array([0, 1, 2, 0, 1, 2, 3]), num_tokens=4)
    assert routes[:, 0].tolist() == [[1, 2], [6, 7], [3, 4], [0, 1]]
    assert num_conflicts == 1


def test_layers_are_taken_one_by_one():
    rows = np.array([[[0, 0], [1, 2]], [[3, 4], [2, 5]]], dtype=np.int16)
    routes, num_conflicts = first_known(rows, tree_index_F=np.array([0, 0]), num_tokens=1)
    assert routes.tolist() == [[[3, 4], [1, 2]]]
    assert num_conflicts == 1


@pytest.mark.parametrize("capacity", [64, 11, 4])
def test_r2_records_the_routes_of_every_row(mixtures: tuple[str, str], capacity: int) -> None:
    """In one pack, in several, and in sections."""
    _, taken, _ = oracle(mixtures[0], unknown())
    column = recorded(make_worker(mixtures[0], mode="R2", capacity=capacity), batch(max_token_len=capacity))[
        "routed_experts"
    ]
    assert column.dtype == torch.int16
    for found, wanted in zip(column.unbind(), taken, strict=True):
        assert torch.equal(found.sort(-1).values, wanted.sort(-1).values.short())
        assert not found[:, 0].any(), "layer 0 has no experts"


@pytest.mark.parametrize(("capacity", "checkpointing"), [(64, False), (64, True), (11, False), (4, True)])
def test_r2_imposes_what_the_old_policy_chose(
    mixtures: tuple[str, str], capacity: int, checkpointing: bool, record_property: Callable[[str, object], None]
) -> None:
    before, after = mixtures
    column = recorded(make_worker(before, mode="R2"), batch())["routed_experts"]
    worker = make_worker(after, mode="R2", capacity=capacity, checkpointing=checkpointing)
    found = gradients_of(worker, batch(column.unbind(), max_token_len=capacity))
    _, taken, wanted = oracle(after, list(column.unbind()))
    record_property("Qwen3-MoE | router replay", assert_gradients(found, wanted))
    metrics = worker.engine.tree_counts.metrics()
    assert metrics["tree/route_conflicts"] == 0
    assert 0 <= worker.engine.canary.metrics[METRIC] < 5, "the flat pass takes the same experts"
    # The new weights alone would choose other experts, and have other gradients.
    _, native, of_native = oracle(after, unknown())
    assert sum(int((a.sort(-1).values != b.sort(-1).values).any(-1).sum()) for a, b in zip(taken, native, strict=True))
    name = "model.layers.1.mlp.gate.weight"
    assert relative_error(found[name], of_native[name]) > 0.1


def test_r2_imposes_the_same_where_rows_that_teach_nothing_leave(mixtures: tuple[str, str]) -> None:
    """Routes are recorded in the pass for old log-probs, which has all rows."""
    before, after = mixtures
    column = recorded(make_worker(before, mode="R2"), batch())["routed_experts"]
    data = batch(column.unbind())
    advantages = [each * (row % 2) for row, each in enumerate(data["advantages"].unbind())]
    data["advantages"] = torch.nested.as_nested_tensor(advantages, layout=torch.jagged)
    data["old_log_probs"] = torch.nested.as_nested_tensor([each * 0 - 3 for each in advantages], layout=torch.jagged)
    loss, found, leaves = LossCase().function(), {}, {}
    for compute in ("live", "all"):
        worker = make_worker(after, mode="R2", compute=compute)
        found[compute] = gradients_of(worker, data.copy(), loss=loss)
        leaves[compute] = worker.engine.tree_counts.num_leaves
    assert (leaves["live"], leaves["all"]) == (len(data) // 2, len(data))
    assert_gradients(found["live"], found["all"])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_r3_imposes_the_routes_of_rows_in_both_passes(mixtures: tuple[str, str], checkpointing: bool) -> None:
    """The last token of a row is unknown, as the rollout never computes it, and a tool's tokens may be."""
    routes = drawn_routes(seed=4)
    for row in routes:
        row[-1] = 0
    for row in routes[:4]:
        row[1] = 0  # unknown to every row that has it
    worker = make_worker(mixtures[0], mode="R3", checkpointing=checkpointing)
    # What one row does not know another does: row 3 ends where rows 0 and 1 go on.
    known = [row.clone() for row in routes]
    known[3][-1] = routes[0][NUM_TOKENS[3] - 1]
    log_probs, _, wanted = oracle(mixtures[0], known)
    scores = recorded(worker, batch(routes))
    assert "routed_experts" not in scores
    for row, found in enumerate(scores["log_probs"].unbind()):
        assert relative_error(found[len(found) - 1 - len(log_probs[row]) : -1], log_probs[row]) < TOLERANCE
    assert_gradients(gradients_of(worker, batch(routes)), wanted)
    assert worker.engine.tree_counts.metrics()["tree/route_conflicts"] == 0


def test_rows_that_disagree_take_the_first_route_and_are_counted(mixtures: tuple[str, str]) -> None:
    routes, others = drawn_routes(seed=4), drawn_routes(seed=5)
    # Rows in the order of the tree: 3 (the prefix), 0, 1, 2. Row 1 has other experts for the four tokens up to 8.
    differing = [row.clone() for row in routes]
    differing[1][:4] = others[1][:4]
    worker = make_worker(mixtures[0], mode="R3")
    found = gradients_of(worker, batch(differing))
    _, _, wanted = oracle(mixtures[0], routes)
    assert_gradients(found, wanted)
    is_other = (routes[1][:4].sort(-1).values != others[1][:4].sort(-1).values).any(-1).any(-1)
    counts = worker.engine.tree_counts
    assert counts.num_routed_tokens == counts.num_tree_tokens == 3 + 2 + 2 + 1 + 4 + 5
    assert counts.num_route_conflicts == int(is_other.sum()) > 0


def test_a_call_without_routing_replay_routes_as_ever(mixtures: tuple[str, str]) -> None:
    """Verl's flag for the reference model, also after an update that imposed routes."""
    worker = make_worker(mixtures[0], mode="R3")
    gradients_of(worker, batch(drawn_routes(seed=4)))
    data = batch(drawn_routes(seed=4))
    log_probs, _, _ = oracle(mixtures[0], unknown())
    tu.assign_non_tensor(data, enable_routing_replay=False)
    for row, found in enumerate(recorded(worker, data)["log_probs"].unbind()):
        assert relative_error(found[len(found) - 1 - len(log_probs[row]) : -1], log_probs[row]) < TOLERANCE


def test_rows_without_routes_are_refused(mixtures: tuple[str, str]) -> None:
    worker = make_worker(mixtures[0], mode="R3")
    with pytest.raises(ValueError, match="enable_rollout_routing_replay=true"):
        gradients_of(worker, batch())
    too_few = [row[:, :2] for row in drawn_routes(seed=4)]
    with pytest.raises(ValueError, match=r"routes of shape \(31, 2, 2\) for 31 tokens and 3 layers"):
        gradients_of(worker, batch(too_few))


def test_routers_are_found_by_what_transformers_declares():
    model = tiny_model("qwen3 moe")
    assert routers_of(model) == {1: model.model.layers[1].mlp.gate}
    model = tiny_model("gpt-oss")
    assert routers_of(model) == {0: model.model.layers[0].mlp.router, 1: model.model.layers[1].mlp.router}
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no routers that transformers names"):
        routers_of(tiny_model("qwen3"))


def test_routers_with_groups_of_experts_are_refused_by_name():
    """They call topk for the experts of each group, for the groups, and for the experts."""
    settings = TINY_SETTINGS | {"pad_token_id": 0, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(ExaoneMoeConfig(**settings, **experts, sliding_window=4))
    RouterReplay.of_model(model)
    with pytest.raises(ValueError, match=r"a router of ExaoneMoeForCausalLM calls torch\.topk 3 times"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_routers_for_one_expert_are_refused_by_name():
    """Zeros would say both expert 0 and that the route is not known."""
    model = tiny_model("qwen3 moe")
    model.model.layers[1].mlp.gate.top_k = 1
    RouterReplay.of_model(model)
    with pytest.raises(ValueError, match=r"a router of Qwen3MoeForCausalLM calls torch\.topk 1 times, at last for 1"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_the_reference_under_an_adapter_routes_as_ever(mixtures: tuple[str, str]) -> None:
    """The actor's worker computes it, without the adapter; it neither records routes nor imposes any."""
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    log_probs, _, _ = oracle(mixtures[0], unknown())
    for mode in ("R2", "R3"):
        worker = local_worker(
            mixtures[0], strategy=TREE_STRATEGY, max_token_len=64, model_options=lora, router_replay=mode
        )
        data = batch(drawn_routes(seed=4))
        tu.assign_non_tensor(data, no_lora_adapter=True)
        scores = recorded(worker, data)
        assert "routed_experts" not in scores
        for row, found in enumerate(scores["log_probs"].unbind()):
            assert relative_error(found[len(found) - 1 - len(log_probs[row]) : -1], log_probs[row]) < TOLERANCE


def test_gpt_oss_takes_routes_too(record_property: Callable[[str, object], None]) -> None:
    """Its scores are a softmax over the chosen logits, which have a bias. In float64, against rows with a hook."""
    model = tiny_model("gpt-oss")
    rows = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    by_row = [row[:, 1:] % 4 for row in drawn_routes(seed=4)]  # two layers of four experts; some get one expert twice
    by_row = [torch.where(row[..., :1] == row[..., 1:], torch.tensor([1, 3]).short(), row) for row in by_row]
    layout = layout_of(rows)
    flat_rows = torch.cat([by_row[row] for row in layout.leaves]).numpy()
    routes, num_conflicts = first_known(
        flat_rows, tree_index_F=layout.tree_index_F.numpy(), num_tokens=layout.num_tokens
    )
    assert num_conflicts == 0

    with Float64():
        want = []
        for row, given in zip(rows, by_row, strict=True):
            hooks = [
                block.mlp.router.register_forward_hook(gpt_oss_hook(given[:, layer].long()))
                for layer, block in enumerate(model.model.layers)
            ]
            want.append(flat_scores(model, row)[0])
            for hook in hooks:
                hook.remove()
        wanted = gradients(model, sum((each * each.detach()).sum() for each in want))
        replay = RouterReplay.of_model(model)
        replay.begin(torch.from_numpy(routes))
        got = tree_log_probs(model, rows).log_probs
        replay.check()
        found = gradients(model, sum((each * each.detach()).sum() for each in got))
    for here, there in zip(got, want, strict=True):
        assert relative_error(here, there) < 1e-12
    record_property("gpt-oss | router replay", assert_gradients(found, wanted, tolerance=1e-11))


def gpt_oss_hook(experts: torch.Tensor) -> Callable[..., object]:
    """Return a hook that answers for a router of gpt-oss with these experts."""

    def hook(router: torch.nn.Module, inputs: tuple[torch.Tensor], _output: object) -> tuple[torch.Tensor, ...]:
        logits = inputs[0] @ router.weight.T + router.bias
        chosen = torch.stack([row[index] for row, index in zip(logits, experts, strict=True)]).exp()
        return logits, chosen / chosen.sum(-1, keepdim=True), experts

    return hook
