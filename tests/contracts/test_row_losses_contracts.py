"""What relayed trees rely on in verl's losses: how workers hold them, and which of them are sums over rows."""

import inspect
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from relay_cases import LossCase, verl_rows
from tensordict import TensorDict
from verl.trainer import sft_trainer
from verl.trainer.distillation.losses import DISTILLATION_SETTINGS_REGISTRY, distillation_ppo_loss
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.trainer.ppo.v1 import trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers import engine_workers
from verl.workers.config import DistillationConfig, DistillationLossConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

from verl_tree.clashes import DISTILLATION_LOSSES_OVER_ROWS, ESTIMATORS, POLICY_LOSSES_OVER_ROWS
from verl_tree.engine.losses.row_losses import is_sum_over_rows
from verl_tree.testing.local_worker import batch_of_rows

COUPLE_ROWS = ("clip_cov", "kl_cov", "geo_mean", "bypass_mode")
NORM = "seq-mean-token-sum-norm"
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM]


def test_every_registered_policy_loss_is_known() -> None:
    """A new loss of verl has to be put into one of the two lists; until then it takes the joint form."""
    assert set(POLICY_LOSS_REGISTRY) == {*POLICY_LOSSES_OVER_ROWS, *COUPLE_ROWS}


def test_every_registered_loss_of_distillation_is_known() -> None:
    estimators = [name for name, settings in DISTILLATION_SETTINGS_REGISTRY.items() if settings.use_estimator]
    assert set(estimators) == set(ESTIMATORS)
    assert set(DISTILLATION_SETTINGS_REGISTRY) == set(DISTILLATION_LOSSES_OVER_ROWS)


def test_distillation_as_a_reward_goes_through_a_policy_loss_over_rows() -> None:
    assert DistillationLossConfig(loss_mode="k1").policy_loss_mode in POLICY_LOSSES_OVER_ROWS
    with pytest.raises(NotImplementedError):
        DistillationLossConfig(loss_mode="k1", policy_loss_mode="clip_cov")


def distillation(name: str, loss_mode: str) -> Any:
    settings = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode=loss_mode))
    config = LossCase(name).function().keywords["config"]
    return partial(distillation_ppo_loss, config=config, distillation_config=settings)


def test_distillation_by_name() -> None:
    assert all(is_sum_over_rows(distillation("vanilla", name)) for name in DISTILLATION_LOSSES_OVER_ROWS)
    assert not is_sum_over_rows(distillation("clip_cov", "k1"))


def test_workers_hold_losses_as_partials_with_a_config() -> None:
    for loss in (ppo_loss, value_loss, sft_loss):
        assert list(inspect.signature(loss).parameters) == ["config", "model_output", "data", "dp_group"]
    for module, made in (
        (engine_workers, "partial(ppo_loss, config=actor_config)"),
        (trainer_base, "partial(value_loss, config=critic_cfg)"),
        (sft_trainer, "partial(sft_loss, config=None)"),
    ):
        assert made in inspect.getsource(module)


def test_the_name_of_a_policy_loss_is_read_as_from_a_dict() -> None:
    assert PolicyLossConfig(loss_mode="gspo").get("loss_mode", "vanilla") == "gspo"
    assert PolicyLossConfig().get("loss_mode", "other") == "vanilla"
    assert PolicyLossConfig().get("absent", "vanilla") == "vanilla"


@pytest.mark.parametrize("name", [*POLICY_LOSSES_OVER_ROWS, *COUPLE_ROWS])
def test_policy_losses_by_name(name: str) -> None:
    assert is_sum_over_rows(LossCase(name).function()) == (name in POLICY_LOSSES_OVER_ROWS)


def test_other_losses() -> None:
    assert is_sum_over_rows(LossCase("sft").function())
    assert is_sum_over_rows(LossCase("value").function())
    # What is not known to be a sum takes the joint form.
    config = LossCase().function().keywords["config"]
    for loss in (None, ppo_loss, partial(ppo_loss), partial(distillation_ppo_loss, config=config)):
        assert not is_sum_over_rows(loss)


@pytest.mark.parametrize("name", ["vanilla", "value"])
def test_a_norm_by_the_width_couples_rows(name: str) -> None:
    """Rows of one call are padded to the longest of them, unless `loss_scale_factor` is given."""
    assert not is_sum_over_rows(LossCase(name, NORM).function())
    assert is_sum_over_rows(LossCase(name, NORM, {"loss_scale_factor": 16}).function())


def rows_of_several_lengths() -> TensorDict:
    generator = torch.Generator().manual_seed(2)

    def row(length: int) -> dict[str, torch.Tensor]:
        names = ("old_log_probs", "ref_log_prob", "advantages", "values", "returns")
        drawn = {name: torch.randn(length, generator=generator, dtype=torch.float64) - 1 for name in names}
        ids = torch.arange(1, 1 + length)
        return {"prompts": ids[:1], "responses": ids, "response_mask": (ids % 4 != 3).long(), **drawn}

    rows = [row(length) for length in (5, 2, 9, 4)]
    return batch_of_rows(rows, max_token_len=1, global_batch_size=7, batch_num_tokens=30, dp_size=2)


def loss_of(case: LossCase, data: TensorDict, rows: list[int]) -> float:
    chosen = tu.index_select_tensor_dict(data, rows)
    offsets = data["input_ids"].offsets()
    generator = torch.Generator().manual_seed(3)
    outputs = {}
    for kind in case.kinds:
        scores = torch.randn(int(offsets[-1]), generator=generator, dtype=torch.float64) - 1
        parts = [scores[offsets[row] : offsets[row + 1]] for row in rows]
        outputs[kind] = torch.nested.nested_tensor_from_jagged(torch.cat(parts), chosen["input_ids"].offsets())
    torch.manual_seed(0)
    return case.function()(model_output=outputs, data=chosen, dp_group=None)[0].item()


def distance_from_the_sum(case: LossCase) -> float:
    """How far the loss of four rows is from the sum of the losses of one and of three of them, relative to it."""
    data = rows_of_several_lengths()
    whole = loss_of(case, data, [0, 1, 2, 3])
    return abs(loss_of(case, data, [1]) + loss_of(case, data, [0, 2, 3]) - whole) / abs(whole)


@pytest.mark.parametrize(("name", "mode"), product([*POLICY_LOSSES_OVER_ROWS, "value"], AGGREGATIONS))
def test_sums_over_rows(name: str, mode: str) -> None:
    options = {"loss_scale_factor": 16} if mode == NORM else {}
    if name != "value":
        options |= {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}
    assert distance_from_the_sum(LossCase(name, mode, options)) < 1e-6


@pytest.mark.parametrize("case", [*(LossCase(name) for name in COUPLE_ROWS[:3]), LossCase("value", NORM)])
def test_losses_that_couple_rows(case: LossCase) -> None:
    """Guards the test above."""
    assert distance_from_the_sum(case) > 1e-3


@pytest.mark.parametrize("name", ["vanilla", "value"])
def test_losses_read_the_lengths_of_prompts_and_responses_only(name: str) -> None:
    """So these columns stay on the host (`verl_tree.engine.rows.micro_batch`)."""
    case, sequences = LossCase(name), [[1, 2, 3, 4, 5], [6, 7, 8]]
    generator = torch.Generator().manual_seed(0)
    scores = [tuple(torch.rand(len(row), generator=generator).double() for _ in case.kinds) for row in sequences]
    found = []
    for factor in (1, 0):
        data = verl_rows(sequences, scores, case, seed=0)
        for column in ("prompts", "responses"):
            data[column] = data[column] * factor
        offsets = data["input_ids"].offsets()
        outputs = {
            kind: torch.nested.nested_tensor_from_jagged(torch.cat([row[number] for row in scores]), offsets)
            for number, kind in enumerate(case.kinds)
        }
        found.append(case.function()(model_output=outputs, data=data, dp_group=None)[0].item())
    assert found[0] == found[1] != 0
