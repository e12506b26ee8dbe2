"""What rows a tree engine refuses, and how results are handed back to verl."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from tensordict import TensorDict
from transformers import Qwen2_5_VLConfig, Qwen3Config
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.columns import check_rows
from verl_tree.engine.rows.packs import split_into_packs
from verl_tree.engine.rows.positions import settle_positions, takes_components
from verl_tree.engine.rows.results import MiniBatchResult
from verl_tree.engine.rows.steps import Step, steps_of
from verl_tree.relay.run import NumCalls
from verl_tree.testing.local_worker import batch_of_rows

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}


def rows(**settings):
    row = {"prompts": torch.tensor([5, 6]), "responses": torch.tensor([7, 8]), "response_mask": torch.tensor([1, 1])}
    return batch_of_rows([row, row], max_token_len=8, global_batch_size=2, **settings)


def jagged(values: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in values], layout=torch.jagged)


def rows_of_lens(lens: tuple[int, ...], *, num_components: int) -> TensorDict:
    """Make rows of these lengths, whose positions are those of text in every component."""
    columns = {
        "input_ids": [torch.arange(length) + 5 for length in lens],
        "position_ids": [torch.arange(length).repeat(num_components, 1) for length in lens],
    }
    packed = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    return TensorDict(packed, batch_size=len(lens))


def test_plain_rows_pass() -> None:
    check_rows(rows())


def test_positions_that_do_not_count_up_from_zero_are_refused() -> None:
    data = rows()
    data["position_ids"] = jagged([[0, 1, 2, 3], [0, 0, 1, 2]])
    with pytest.raises(ValueError, match=r"position_ids are not 0, 1, 2"):
        check_rows(data)


@pytest.mark.parametrize("lens", [(3, 5, 4), (4, 4, 4), (6,)])
@pytest.mark.parametrize("num_components", [3, 4])
def test_positions_of_text_pass_in_every_component(lens: tuple[int, ...], num_components: int) -> None:
    """As TransferQueue packs them: jagged over the components where all rows have one length."""
    data = rows_of_lens(lens, num_components=num_components)
    assert data["position_ids"].values().shape == (
        (num_components * len(lens), lens[0]) if len(set(lens)) == 1 else (num_components, sum(lens))
    )
    check_rows(data)
    settle_positions(data, keep_components=True)
    # What verl's engines read of several components: `values()` (C, F), `to_padded_tensor` (B, C, longest).
    expected_F = torch.cat([torch.arange(length) for length in lens])
    assert torch.equal(data["position_ids"].values(), expected_F.expand(num_components, -1))
    size = (len(lens), num_components, max(lens))
    padded = torch.nested.to_padded_tensor(data["position_ids"], padding=0, output_size=size)
    assert padded[0, 1].tolist()[: lens[0]] == list(range(lens[0]))
    check_rows(data)
    settle_positions(data, keep_components=False)
    assert data["position_ids"].dim() == 2
    assert torch.equal(data["position_ids"].values(), expected_F)
    check_rows(data)


@pytest.mark.parametrize("lens", [(3, 5), (4, 4)])
def test_a_component_that_differs_is_refused_and_kept(lens: tuple[int, ...]) -> None:
    data = rows_of_lens(lens, num_components=4)
    changed = [each.clone() for each in data["position_ids"].unbind()]
    changed[1][2, 1] = 0
    data["position_ids"] = torch.nested.as_nested_tensor(changed, layout=torch.jagged)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"position_ids are not 0, 1, 2, \.\.\. in every row and component"):
            check_rows(data)
        settle_positions(data, keep_components=False)
        assert data["position_ids"].values().shape == (4, sum(lens))


def test_models_with_sections_of_rope_take_components() -> None:
    assert takes_components(Qwen2_5_VLConfig(text_config=MROPE))
    assert not takes_components(Qwen3Config())


def test_outputs_without_a_tree_path_are_refused() -> None:
    with pytest.raises(ValueError, match="calculate_sum_pi_squared=True: with fsdp_tree, a tree does not give it"):
        check_rows(rows(calculate_sum_pi_squared=True))


def test_images_are_refused() -> None:
    data = rows()
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{"pixel_values": torch.ones(1, 2)}, {}])
    with pytest.raises(ValueError, match="takes from models of the types qwen2_5_vl, qwen3_vl, qwen3_vl_moe only"):
        check_rows(data)


def test_outputs_stand_at_their_rows_and_each_metric_has_one_value() -> None:
    """Rows [1 2 3] and [4 5] in packs of their own, the second computed first."""
    tokens, offsets = np.array([1, 2, 3, 4, 5]), np.array([0, 3, 5])
    batch = split_into_packs(
        tokens,
        offsets=offsets,
        trained=np.array([False, True, True, False, True]),
        capacity=3,
        config=TreeConfig(),
        cost_model=CostModel.prior(),
    )
    by_row = {int(micro.rows[0]): micro for micro in batch.micro_batches}
    result = MiniBatchResult(jagged([[1, 2, 3], [4, 5]]), output_names=["log_probs"])
    for row, values, loss in ((1, [0.4, 0.5], 3.0), (0, [0.1, 0.2, 0.3], 1.0)):
        metrics = {"kl": loss, "pg_loss": Metric(AggregationType.SUM, value=loss)}
        result.add_outputs({"log_probs": jagged([values])}, micro=by_row[row])
        result.add_loss(torch.tensor(loss), metrics)
    output = result.as_verl()
    assert [row.tolist() for row in output["model_output"]["log_probs"].unbind()] == [
        pytest.approx([0.1, 0.2, 0.3]),
        pytest.approx([0.4, 0.5]),
    ]
    assert output["loss"] == [3.0, 1.0]
    assert output["metrics"]["kl"] == [2.0]
    assert output["metrics"]["pg_loss"].aggregate() == 4.0


@pytest.mark.parametrize("names", [[], ["log_probs", "values"], ["entropy"]])
def test_outputs_that_have_no_place_are_refused(names: list[str]) -> None:
    result = MiniBatchResult(jagged([[1, 2, 3]]), output_names=names)
    micro = split_into_packs(
        np.array([1, 2, 3]),
        offsets=np.array([0, 3]),
        trained=np.array([False, True, True]),
        capacity=3,
        config=TreeConfig(),
        cost_model=CostModel.prior(),
    ).micro_batches[0]
    with pytest.raises(ValueError, match=r"outputs \['log_probs'\], and the result has places for"):
        result.add_outputs({"log_probs": jagged([[0.1, 0.2, 0.3]])}, micro=micro)


def test_a_mini_batch_without_a_loss_has_a_loss_of_zero() -> None:
    output = MiniBatchResult(jagged([[1, 2, 3]])).as_verl()
    assert output == {"model_output": {}, "loss": [0.0], "metrics": {}}


def test_ranks_make_the_same_calls_and_fill_them_with_packs() -> None:
    """The drawn example, and two trees on one rank, which take a step each."""
    tree, other_tree, pack = NumCalls(2, 3), NumCalls(1, 2), NumCalls(0, 1)
    steps = steps_of([[tree], [pack] * 4], mode="rows")
    assert [step.calls for step in steps] == [(2, 3), (0, 1)]
    assert [step.ranges for step in steps] == [(range(1), range(3)), (range(1, 1), range(3, 4))]

    steps = steps_of([[tree, other_tree, pack], [tree, pack]], mode="rows")
    assert [step.calls for step in steps] == [(2, 3), (1, 2), (0, 1)]
    assert [step.ranges for step in steps] == [
        (range(1), range(1)),
        (range(1, 2), range(1, 2)),
        (range(2, 3), range(2, 2)),
    ]

    # Forward only, too, there is one store at a time, also where two trees would fit.
    tree, small_tree = NumCalls(6, 0), NumCalls(3, 0)
    steps = steps_of([[tree], [small_tree, small_tree]], mode="forward")
    assert [step.calls for step in steps] == [(6, 0), (3, 0)]
    assert [step.ranges for step in steps] == [(range(1), range(1)), (range(1, 1), range(1, 2))]

    # Forward only, a tree is its sections and a pack is one.
    steps = steps_of([[NumCalls(3, 0)], [NumCalls(1, 0)] * 2, []], mode="forward")
    assert [(step.calls, step.ranges) for step in steps] == [((3, 0), (range(1), range(2), range(0)))]

    # For a pipeline's schedule they are one step.
    (step,) = steps_of([[NumCalls(2, 3), pack, NumCalls(1, 2)], [pack] * 4, []], mode="rows", in_one=True)
    assert (step.calls, step.ranges) == ((3, 6), (range(3), range(4), range(0)))

    assert steps_of([[], []], mode="rows", in_one=True) == steps_of([[], []], mode="rows")
    assert steps_of([[], []], mode="rows") == [Step(NumCalls(0, 1), (range(0), range(0)))]
    assert steps_of([[], []], mode="forward") == [Step(NumCalls(1, 0), (range(0), range(0)))]
