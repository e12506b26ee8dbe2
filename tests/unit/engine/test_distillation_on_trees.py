"""Distillation by KL estimators on trees: verl's own loss, whole and relayed, against flat rows, in float64.

The loss reads the log-probs of the student, which a tree gives row by row, and those of the teacher, which come with
the rows. It is a sum over rows, so the sections of a relayed tree compute it a few rows at a time. Top-k distillation
reads the student's logits instead; it is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from engine_cases import Case, bypass_loss, make_loss
from relay_cases import LossCase, flat_result, flat_rows, lay_out, relayed_result, verl_rows, worst_error
from tiny_models import VOCAB_SIZE, tiny_model
from typing_extensions import override
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils.metric import Metric
from verl.workers.config import DistillationConfig, DistillationLossConfig

from verl_tree.engine.losses.row_losses import is_sum_over_rows, needs_trained_tokens
from verl_tree.engine.losses.untrained_rows import loss_of_any_rows
from verl_tree.testing.local_worker import batch_of_rows
from verl_tree.testing.synthetic import random_forest

TOLERANCE = 1e-10
ESTIMATORS = ("k2", "k3", "mse", "abs", "kl", "low_var_kl")


@dataclass(frozen=True)
class Distillation(LossCase):
    """verl's policy loss of distillation; `distilled` are options of `distillation.distillation_loss`."""

    distilled: tuple[tuple[str, Any], ...] = ()

    @override
    def function(self) -> Callable[..., Any]:
        loss = DistillationLossConfig(loss_max_clamp=0.4, **dict(self.distilled))
        return partial(
            distillation_ppo_loss,
            config=super().function().keywords["config"],
            distillation_config=DistillationConfig(distillation_loss=loss),
        )


def compare(case: Distillation, *, seed: int, capacities: tuple[int, ...], scale: float = 1.0) -> list[float]:
    """Return the worst error at each capacity; `scale` distorts what the tree's side has of the teacher."""
    forest = random_forest(seed, num_leaves=9, mean_len=3, root_probability=0.15, vocab_size=VOCAB_SIZE)
    model = tiny_model()
    scores = flat_rows(model, forest)
    data = verl_rows(forest, scores, case, seed=seed)
    data.pop("rollout_is_weights")  # verl 0.9.1 does not pad them where the estimator is a reward
    generator = torch.Generator().manual_seed(seed)
    # verl keeps (j, 1) for a row, with the score of a token one position earlier, as the student's.
    teacher = [
        (row[0].detach() + 0.4 * torch.randn(len(row[0]), generator=generator, dtype=torch.float64))[:, None]
        for row in scores
    ]
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(teacher, layout=torch.jagged)
    assert is_sum_over_rows(case.function())
    want = flat_result(model, data, scores, case, rows=lay_out(data, capacity=2, mode="rows").rows)
    assert min(gradient.norm() for gradient in want.gradients.values()) > 0
    data["teacher_logprobs"] = torch.nested.as_nested_tensor([scale * row for row in teacher], layout=torch.jagged)
    return [worst_error(relayed_result(model, data, case, capacity=capacity), want) for capacity in capacities]


@pytest.mark.parametrize("number", range(len(ESTIMATORS)))
def test_an_estimator_as_a_loss(number: int) -> None:
    """Alone, and beside task rewards; the whole forest at once and in sections."""
    for alone in (True, False):
        options = (("loss_mode", ESTIMATORS[number]), ("use_policy_gradient", False), ("use_task_rewards", not alone))
        case = Distillation("vanilla", "token-mean" if alone else "seq-mean-token-mean", distilled=options)
        assert max(compare(case, seed=40 + number, capacities=(7, 4096))) < TOLERANCE


def test_an_estimator_as_a_reward() -> None:
    options = (("loss_mode", "k1"), ("use_policy_gradient", True), ("use_task_rewards", False))
    case = Distillation("vanilla", "token-mean", distilled=options)
    assert max(compare(case, seed=50, capacities=(7, 4096))) < TOLERANCE


@pytest.mark.parametrize("as_reward", [True, False])
def test_a_rank_without_trained_rows_computes_no_loss(as_reward: bool) -> None:
    """It has a row of padding. verl's own loss fails there, and all ranks need metrics of the same names."""
    options = (("loss_mode", "k1" if as_reward else "k3"), ("use_policy_gradient", as_reward))
    case = Distillation("vanilla", "token-mean", {"use_kl_loss": True, "kl_loss_coef": 0.3}, distilled=options)
    row = {name: torch.tensor([1]) for name in ("prompts", "responses")}
    row |= {name: torch.tensor([-1.0]) for name in ("old_log_probs", "ref_log_prob", "advantages")}
    made = []
    for is_trained in (0, 1):
        rows = [row | {"response_mask": torch.tensor([is_trained])}]
        data = batch_of_rows(rows, max_token_len=9, global_batch_size=1, batch_num_tokens=2, dp_size=1)
        data["teacher_logprobs"] = torch.nested.as_nested_tensor([torch.zeros(2, 1)], layout=torch.jagged)
        log_probs = torch.nested.as_nested_tensor([torch.tensor([-2.0, 0.0])], layout=torch.jagged)
        made.append((data, {"log_probs": log_probs}))
    (data, outputs), (trained, _) = made
    with pytest.raises(RuntimeError, match="min"):
        case.function()(model_output=outputs, data=data)
    loss, metrics = loss_of_any_rows(case.function(), model_output=outputs, data=data)
    want, all_metrics = case.function()(model_output=outputs, data=trained)
    assert loss.item() == 0.0 != want.item()
    assert list(metrics) == list(all_metrics)
    numbers = {name: each.aggregate() if isinstance(each, Metric) else each for name, each in metrics.items()}
    assert numbers.pop("kl_coef") == 0.3
    assert (numbers.pop("distillation/loss_min"), numbers.pop("distillation/loss_max")) == (inf, -inf)
    assert set(numbers.values()) == {0.0}
    # Where a token is trained, it is verl's loss.
    assert loss_of_any_rows(case.function(), model_output=outputs, data=trained)[0].item() == want.item()
    assert is_sum_over_rows(partial(loss_of_any_rows, case.function()))


@pytest.mark.parametrize(("loss_type", "rollout_is"), [("ppo_clip", None), ("reinforce", "token")])
def test_a_rank_without_trained_rows_computes_no_bypass_loss(loss_type: str, rollout_is: str | None) -> None:
    """Verl's `bypass_mode` refuses rows of padding, and the other ranks would wait."""
    loss_function = make_loss(Case("bypass", actor={"policy_loss": bypass_loss(loss_type, rollout_is=rollout_is)}))
    assert needs_trained_tokens(loss_function)
    assert not needs_trained_tokens(make_loss(Case("vanilla")))
    row = {name: torch.tensor([1]) for name in ("prompts", "responses")}
    row |= {name: torch.tensor([-1.0]) for name in ("old_log_probs", "rollout_log_probs", "advantages")}
    log_probs = torch.nested.as_nested_tensor([torch.tensor([-2.0, 0.0])], layout=torch.jagged)
    names = []
    for is_trained in (0, 1):
        rows = [row | {"response_mask": torch.tensor([is_trained])}]
        data = batch_of_rows(rows, max_token_len=9, global_batch_size=1, batch_num_tokens=1, dp_size=1)
        if not is_trained:
            with pytest.raises(ValueError, match="at least one valid token"):
                loss_function(model_output={"log_probs": log_probs}, data=data)
        loss, metrics = loss_of_any_rows(loss_function, model_output={"log_probs": log_probs}, data=data)
        assert (loss.item() != 0.0) == bool(is_trained)
        names.append(list(metrics))
    assert names[0] == names[1] != []


def test_another_teacher_is_noticed() -> None:
    """Guards the tests above."""
    options = (("loss_mode", "k2"), ("use_policy_gradient", False), ("use_task_rewards", False))
    case = Distillation("vanilla", "token-mean", distilled=options)
    assert compare(case, seed=41, capacities=(4096,), scale=1.01)[0] > 1e-4
