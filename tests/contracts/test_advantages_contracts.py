"""What the estimators rely on in verl 0.9.1: the registry, what it calls them with, and how rows are laid out."""

from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.utils.padding import response_to_nested


def test_the_registry_is_a_dict_of_names() -> None:
    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    assert {"gae", "grpo"} <= set(registry)
    assert all(type(name) is str for name in registry)
    assert "tree_grpo" not in [member.value for member in core_algos.AdvantageEstimator]


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized", "opo", "gpg", "grpo_vectorized", "grpo_passk"])
def test_verls_estimators_take_any_strings_for_prompts(name: str) -> None:
    """`portions.by_role` puts a prompt and a role there. Those that we leave to verl are the ones it treats by name."""
    arguments = {
        "token_level_rewards": torch.tensor([[1.0], [0.0], [3.0], [1.0]]),
        "response_mask": torch.ones(4, 1),
        "config": AlgoConfig(norm_adv_by_std_in_grpo=False),
    }
    estimator = core_algos.get_adv_estimator_fn(name)
    uids, others = ["u|p", "u|", "u|p", "u|"], ["b", "a", "b", "a"]
    one, two = (estimator(**arguments, index=np.array(index, dtype=object))[0] for index in (uids, others))
    assert torch.equal(one, two)
    assert one.any()


def test_rows_are_padded_behind_the_response() -> None:
    """Column t of an advantage is response token t; the padding is cut off when it is stored."""
    padded = torch.tensor([[1.0, 2, 0], [3, 4, 5]])
    mask = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [row.tolist() for row in response_to_nested(padded, mask).unbind()] == [[1, 2], [3, 4, 5]]


def test_an_estimator_gets_all_rows_with_rewards_mask_options_and_uids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only verl's own GRPO sees the last leaf of a session alone."""
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", dict(core_algos.ADV_ESTIMATOR_REGISTRY))
    given: dict[str, Any] = {}

    def probe(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.update(arguments)
        return arguments["token_level_rewards"], arguments["token_level_rewards"]

    core_algos.register_adv_est("probe")(probe)
    core_algos.register_adv_est("probe")(probe)  # again is no error
    rewards, config = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), AlgoConfig(norm_adv_by_std_in_grpo=False)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": torch.tensor([[1, 1], [1, 0]])},
        non_tensors={"uid": np.array(["u", "u"], dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(
        data, batch_keys=["u_0_0", "u_0_1"], adv_estimator="probe", config=config
    )
    assert torch.equal(given["token_level_rewards"], rewards)
    assert given["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert given["config"].get("norm_adv_by_std_in_grpo", True) is False
    assert given["index"].tolist() == ["u", "u"]
    assert torch.equal(data.batch["advantages"], rewards)
