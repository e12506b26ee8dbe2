"""Every session weighs the same in verl's losses: by hand, against row by row, flat and as trees, in float64."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_groups import group_of_one
from tiny_models import VOCAB_SIZE, tiny_model

pytest.importorskip("verl")

from engine_cases import Case, make_loss
from relay_cases import LossCase, Result, WeightedLoss, flat_rows, relayed_result, verl_rows, worst_error
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation import distillation_ppo_loss
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.config import DistillationConfig, DistillationLossConfig, FSDPOptimizerConfig

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine.losses.row_losses import POLICY_LOSSES_OVER_ROWS, is_sum_over_rows
from verl_tree.engine.losses.session_weights import SessionWeights, session_weighted_loss, weigh_sessions
from verl_tree.engine.losses.untrained_rows import loss_of_any_rows
from verl_tree.testing.local_worker import batch_of_rows, local_worker
from verl_tree.testing.synthetic import random_forest
from verl_tree.trainer.rows.batching import MiniBatchPlan

NORM = "seq-mean-token-sum-norm"
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", NORM]
KL_AND_ENTROPY = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """Make a process group of this process alone."""
    with group_of_one():
        yield


def weighed(data: TensorDict, sessions: Sequence[int], roles: Sequence[float] | None = None) -> TensorDict:
    """Weigh the sessions, and the roles, of a mini-batch of one rank."""
    data = data.copy()
    weigh_sessions(data, sessions, group=None, role_weights=roles)
    return data


# The first tree of docs/advantages.md, and what tree_grpo makes of it:
#
# session 0:  P a ─┬─ b b   A = 1/4
#                  └─ c     A = -3/4
# session 1:  P d           A = 1/4
FORK = [([1, 2, 2], 1 / 4), ([1, 3], -3 / 4), ([4], 1 / 4)]
SESSIONS = [0, 0, 1]


def fork(order: Sequence[int] = (0, 1, 2), **changes: Any) -> tuple[TensorDict, dict[str, Tensor]]:
    """Make rows of the tree on policy, with log-probs of -1, so that a token's loss is minus its advantage."""
    rows = [
        {
            "prompts": torch.tensor([9]),
            "responses": torch.tensor(response),
            "response_mask": torch.ones(len(response), dtype=torch.int64),
            "old_log_probs": torch.full((len(response),), -1.0, dtype=torch.float64),
            "ref_log_prob": torch.full((len(response),), -1.5, dtype=torch.float64),
            "advantages": torch.full((len(response),), advantage, dtype=torch.float64),
        }
        for response, advantage in (FORK[index] for index in order)
    ]
    num_tokens = sum(len(row["responses"]) for row in rows)
    data = batch_of_rows(
        rows, max_token_len=9, global_batch_size=len(rows), **{"batch_num_tokens": num_tokens, "dp_size": 1} | changes
    )
    log_probs = [torch.full((len(row),), -1.0, dtype=torch.float64) for row in data["input_ids"].unbind(dim=0)]
    return data, {"log_probs": torch.nested.as_nested_tensor(log_probs, layout=torch.jagged)}


def test_weights_and_denominators_by_hand() -> None:
    # Session 0: four rows on two ranks, one of them without sampled tokens. Session 2: none at all. -1: padding.
    got = SessionWeights.of_ranks([([0, 0, 0, 7, -1], [4, 0, 2, 3, 0]), ([2, 0, 2, -1, -1], [0, 9, 0, 0, 0])])
    assert [weights.tolist() for weights in got.ranks] == [[1 / 3, 1, 1 / 3, 1, 1], [1, 1 / 3, 1, 1, 1]]
    assert got.num_sessions == 3
    assert got.num_weighted_tokens == (4 + 2 + 9) / 3 + 3


@pytest.mark.parametrize(
    ("mode", "by_leaf", "by_session"),
    [
        # Sums over tokens: b b 3/4, c -6/4, d 1/4. Half of the first two: 3/8 - 6/8 + 2/8 = -1/8.
        ("token-sum", -1 / 2, -1 / 8),
        # 6 tokens, or 3/2 + 2/2 + 1
        ("token-mean", -1 / 2 / 6, -1 / 8 / 3.5),
        # 3 rows, or 2 sessions
        ("seq-mean-token-sum", -1 / 2 / 3, -1 / 8 / 2),
        (NORM, -1 / 2 / 3 / 4, -1 / 8 / 2 / 4),
        # 1/4 - 3/4 + 1/4, or 1/8 - 3/8 + 1/4: tree_grpo compares with the mean over sessions
        ("seq-mean-token-mean", -1 / 4 / 3, 0.0),
    ],
)
def test_the_drawn_tree_by_hand(mode: str, by_leaf: float, by_session: float) -> None:
    data, outputs = fork()
    options = {"loss_scale_factor": 4}
    loss, metrics = LossCase("vanilla", mode, options).function()(model_output=outputs, data=data)
    assert loss.item() == pytest.approx(-by_leaf, abs=1e-7)
    weighted = WeightedLoss("vanilla", mode, options).function()
    loss, metrics = weighted(model_output=outputs, data=weighed(data, SESSIONS))
    assert loss.item() == pytest.approx(-by_session, abs=1e-7)
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(-by_session, abs=1e-7)


def test_kl_is_weighed_like_the_rest() -> None:
    # k1 is 1/2 per token and the coefficient 0.3; 3/2 + 2/2 + 1 tokens over themselves.
    data, outputs = fork()
    case = WeightedLoss(
        "vanilla", "seq-mean-token-sum", {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1"}
    )
    loss, metrics = case.function()(model_output=outputs, data=weighed(data, SESSIONS))
    assert metrics["kl_loss"].aggregate() == pytest.approx(3.5 / 2 / 2, rel=1e-6)
    assert metrics["kl_coef"] == 0.3
    assert loss.item() == pytest.approx(1 / 8 / 2 + 0.3 * 3.5 / 4, rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # b b 3/4 stays, c adds nothing: half of it and d's 1/4 are 3/8 + 2/8. Session 0 still has two leaves.
        ("token-sum", 5 / 8),
        ("token-mean", 5 / 8 / 3.5),
        ("seq-mean-token-sum", 5 / 8 / 2),
        (NORM, 5 / 8 / 2 / 4),
        ("seq-mean-token-mean", (1 / 8 + 1 / 4) / 2),
    ],
)
def test_a_rejected_leaf_by_hand(mode: str, expected: float) -> None:
    """What rollout correction rejects adds nothing and stays in the denominators, as in verl."""
    data, outputs = fork()
    data["response_mask"].unbind(dim=0)[1].zero_()
    weighted = WeightedLoss("vanilla", mode, {"loss_scale_factor": 4}).function()
    assert weighted(model_output=outputs, data=weighed(data, SESSIONS))[0].item() == pytest.approx(-expected, abs=1e-7)


def row_by_row(data: TensorDict, outputs: dict[str, Tensor], case: LossCase, sessions: Sequence[int]) -> Tensor:
    """Follow the definition: verl's loss of each row alone, over the denominators that count sessions."""
    num_trained, num_sampled = (
        [int(mask.sum()) for mask in data[name].unbind(dim=0)] for name in ("response_mask", "loss_mask")
    )
    leaves = {
        session: sum(other == session and num > 0 for other, num in zip(sessions, num_sampled, strict=True))
        for session in sessions
    }
    num_tokens = sum(num / leaves[session] for num, session in zip(num_sampled, sessions, strict=True) if num)
    total = torch.zeros((), dtype=torch.float64)
    for row, session in enumerate(sessions):
        if num_trained[row]:
            alone = tu.index_select_tensor_dict(data, [row])
            tu.assign_non_tensor(alone, global_batch_size=len(leaves), batch_num_tokens=num_tokens)
            own = {
                name: torch.nested.as_nested_tensor([values.unbind()[row]], layout=torch.jagged)
                for name, values in outputs.items()
            }
            total = total + case.function()(model_output=own, data=alone, dp_group=None)[0] / leaves[session]
    return total


SEED, NUM_LEAVES = 105, 9
FOREST = random_forest(
    SEED, num_leaves=NUM_LEAVES, mean_len=3, root_probability=0.15, prefix_probability=0.15, vocab_size=VOCAB_SIZE
)
UNEVEN = [0, 0, 0, 0, 1, 2, 2, 3, 3]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Make a policy and a critic."""
    return {
        "policy": tiny_model(),
        "critic": tiny_model("qwen3 critic", num_labels=1, classifier_dropout=0.0),
    }


def flat_side(models: dict[str, Any], case: LossCase) -> tuple[Any, TensorDict, dict[str, Tensor]]:
    """Return the model, verl's rows of the forest, and the scores of each by itself.

    Of one row all sampled tokens are rejected, of another the last.
    """
    model = models["critic" if case.name == "value" else "policy"]
    model.set_attn_implementation("sdpa")
    scores = flat_rows(model, FOREST, is_critic=case.name == "value")
    data = verl_rows(FOREST, scores, case, seed=SEED)
    masks = data["response_mask"].unbind(dim=0)
    masks[2].zero_()  # of session 0
    masks[5][-1] = 0  # of session 2
    assert int(data["loss_mask"].values().sum()) > int(data["response_mask"].values().sum()) > 0
    offsets = data["input_ids"].offsets()
    outputs = {
        kind: torch.nested.nested_tensor_from_jagged(torch.cat([row[number] for row in scores]), offsets)
        for number, kind in enumerate(case.kinds)
    }
    return model, data, outputs


def differentiated(model: Any, loss: Tensor) -> Result:
    model.zero_grad()
    loss.backward(retain_graph=True)
    return Result(loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, [])


@pytest.mark.parametrize(("name", "mode"), product([*POLICY_LOSSES_OVER_ROWS, "value"], AGGREGATIONS))
def test_flat_and_relayed_against_row_by_row(models: dict[str, Any], name: str, mode: str) -> None:
    """Loss and all gradients, at once and in sections of 7 tokens, whole and in groups of rows."""
    options = {"loss_scale_factor": 16} if mode == NORM else {}
    options |= {} if name == "value" else KL_AND_ENTROPY
    model, data, outputs = flat_side(models, LossCase(name, mode, options))
    want = differentiated(model, row_by_row(data, outputs, LossCase(name, mode, options), UNEVEN))
    case, data = WeightedLoss(name, mode, options), weighed(data, UNEVEN)
    loss, _ = case.function()(model_output=outputs, data=data, dp_group=None)
    assert worst_error(differentiated(model, loss), want) < 1e-10
    for max_loss_terms in (None, 7):
        got = relayed_result(model, data, case, capacity=7, max_loss_terms=max_loss_terms)
        assert worst_error(got, want) < 1e-10


class Distillation(LossCase):
    """Distillation by an estimator: k1 as a reward, others as a loss."""

    def function(self) -> Any:
        settings = DistillationLossConfig(loss_mode=self.name, use_policy_gradient=self.name == "k1")
        config = LossCase("vanilla", self.mode, self.options).function().keywords["config"]
        made = DistillationConfig(distillation_loss=settings)
        return partial(distillation_ppo_loss, config=config, distillation_config=made)


@pytest.mark.parametrize("as_reward", [True, False])
def test_distillation_is_weighed_like_the_rest(models: dict[str, Any], as_reward: bool) -> None:
    """Its least and greatest values are those of all rows, and a call without trained tokens is not made."""
    model, data, outputs = flat_side(models, LossCase())
    data.pop("rollout_is_weights")  # verl 0.9.1 does not pad them where the estimator is a reward
    generator = torch.Generator().manual_seed(1)
    teacher = [
        (row.detach() + torch.randn(len(row), generator=generator, dtype=torch.float64))[:, None]
        for row in outputs["log_probs"].unbind()
    ]
    data["teacher_logprobs"] = torch.nested.as_nested_tensor(teacher, layout=torch.jagged)
    # A session of one row, which is rejected.
    sessions = [0, 0, 9, *UNEVEN[3:]]
    case = Distillation("k1" if as_reward else "k3", "seq-mean-token-mean", KL_AND_ENTROPY)
    want = differentiated(model, row_by_row(data, outputs, case, sessions))
    plain = case.function()(model_output=outputs, data=data)[1]
    loss, metrics = session_weighted_loss(case.function(), model_output=outputs, data=weighed(data, sessions))
    assert worst_error(differentiated(model, loss), want) < 1e-10
    for name in ("distillation/loss_min", "distillation/loss_max", "distillation/abs_loss"):
        assert metrics[name].aggregate() == pytest.approx(plain[name].aggregate(), rel=1e-12)


def test_a_call_without_trained_tokens_is_verls() -> None:
    """All rows of two weights are rejected."""
    data, outputs = fork()
    data["response_mask"].values().zero_()
    case = LossCase("vanilla", "token-mean", {"use_kl_loss": True})
    plain, plain_metrics = case.function()(model_output=outputs, data=data)
    loss, metrics = session_weighted_loss(case.function(), model_output=outputs, data=weighed(data, SESSIONS))
    assert (loss.item(), plain.item()) == (0.0, 0.0)
    assert metrics["kl_coef"] == plain_metrics["kl_coef"]
    for name in ("actor/pg_loss", "actor/ppo_kl", "kl_loss"):
        assert metrics[name].aggregate() == plain_metrics[name].aggregate()


def test_weighing_changes_the_gradient(models: dict[str, Any]) -> None:
    """Guards the test above."""
    model, data, outputs = flat_side(models, LossCase())
    plain = LossCase().function()(model_output=outputs, data=data, dp_group=None)[0]
    loss = WeightedLoss().function()(model_output=outputs, data=weighed(data, UNEVEN), dp_group=None)[0]
    assert worst_error(differentiated(model, loss), differentiated(model, plain)) > 1e-2


@pytest.mark.parametrize("shared_tokens", ["mean", "once"])
def test_weights_multiply_with_those_of_shared_tokens(models: dict[str, Any], shared_tokens: str) -> None:
    """By hand on P a {b, c} of one session: each leaf weighs 1/2, and a's gradient is their mean, or the first's."""
    case = WeightedLoss("gpg", "token-sum")  # minus log-prob times advantage
    rows = [
        {
            "prompts": torch.tensor([9]),
            "responses": torch.tensor([1, last]),
            "response_mask": torch.ones(2, dtype=torch.int64),
            "old_log_probs": torch.zeros(2, dtype=torch.float64),
            "advantages": torch.full((2,), advantage, dtype=torch.float64),
        }
        for last, advantage in ((2, 1.0), (3, -5.0))
    ]
    data = batch_of_rows(rows, max_token_len=9, global_batch_size=2, batch_num_tokens=4, dp_size=1)
    model = models["policy"]
    got = relayed_result(model, weighed(data, [0, 0]), case, capacity=9, shared_tokens=shared_tokens)
    model.set_attn_implementation("sdpa")
    (a, b), (_, c) = (scores[0][:2] for scores in flat_rows(model, [[9, 1, 2], [9, 1, 3]]))
    of_a = {"mean": (1 / 2 - 5 / 2) / 2, "once": 1 / 2}[shared_tokens]
    surrogate = differentiated(model, -(of_a * a + b / 2 - 5 * c / 2))
    # The value of the loss is that of the flat rows in every mode.
    want = Result(-((a - 5 * a) / 2 + b / 2 - 5 * c / 2).item(), surrogate.gradients, [])
    assert worst_error(got, want) < 1e-10


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_order_of_leaves_and_copies_of_all_leaves_of_a_session_change_nothing(
    models: dict[str, Any], mode: str
) -> None:
    case = WeightedLoss("gspo", mode, {"loss_scale_factor": 16, **KL_AND_ENTROPY})
    model, data, outputs = flat_side(models, LossCase())
    want = differentiated(model, case.function()(model_output=outputs, data=weighed(data, UNEVEN))[0])
    shuffled = np.random.default_rng(0).permutation(NUM_LEAVES).tolist()
    # Session 2 and session 1 three times and twice.
    copied = [*range(NUM_LEAVES), 5, 6, 5, 6, 4]
    for rows in (shuffled, copied):
        chosen = tu.index_select_tensor_dict(data, rows)
        parts = {name: values.unbind() for name, values in outputs.items()}
        of_rows = {
            name: torch.nested.as_nested_tensor([values[row] for row in rows], layout=torch.jagged)
            for name, values in parts.items()
        }
        again = weighed(chosen, [UNEVEN[row] for row in rows])
        loss = case.function()(model_output=of_rows, data=again)[0]
        assert worst_error(differentiated(model, loss), want) < 1e-10


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_sessions_of_one_leaf_are_verls_rows_bit_for_bit(models: dict[str, Any], mode: str) -> None:
    """Also where tokens and a whole row are rejected, which verl's denominators still count."""
    options = {"loss_scale_factor": 16, **KL_AND_ENTROPY}
    model, data, outputs = flat_side(models, LossCase())
    num_tokens = int(data["loss_mask"].values().sum())
    tu.assign_non_tensor(data, global_batch_size=NUM_LEAVES, batch_num_tokens=num_tokens)
    plain, plain_metrics = LossCase("vanilla", mode, options).function()(model_output=outputs, data=data)
    case, alone = WeightedLoss("vanilla", mode, options), weighed(data, range(NUM_LEAVES))
    loss, metrics = case.function()(model_output=outputs, data=alone)
    assert loss.item() == plain.item()
    got, want = differentiated(model, loss).gradients, differentiated(model, plain).gradients
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert list(metrics) == list(plain_metrics)
    for name, value in plain_metrics.items():
        of_both = [each.values if isinstance(each, Metric) else each for each in (metrics[name], value)]
        assert of_both[0] == of_both[1]


ROLE_WEIGHTS = [1.0, 0.5, 0.5, 2.0, 0.0, 1.0, 0.25, 1.0, 0.0]


def times_advantages(data: TensorDict, weights: Sequence[float]) -> TensorDict:
    """Return the rows with their advantages multiplied."""
    data = data.copy()
    parts = [row * weight for row, weight in zip(data["advantages"].unbind(dim=0), weights, strict=True)]
    data["advantages"] = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return data


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("weighs_sessions", [False, True])
def test_a_role_weighs_as_if_its_advantages_were_multiplied(
    models: dict[str, Any], weighs_sessions: bool, mode: str
) -> None:
    """Beside verl's flat loss, and with sessions weighed beside that loss: loss, gradients, flat and relayed."""
    options = {"loss_scale_factor": 16} if mode == NORM else {}
    model, data, outputs = flat_side(models, LossCase("vanilla", mode, options))
    num_tokens = int(data["loss_mask"].values().sum())
    tu.assign_non_tensor(data, global_batch_size=NUM_LEAVES, batch_num_tokens=num_tokens)
    sessions = UNEVEN if weighs_sessions else range(NUM_LEAVES)
    by_hand = times_advantages(data, ROLE_WEIGHTS)
    if weighs_sessions:
        want = row_by_row(by_hand, outputs, LossCase("vanilla", mode, options), UNEVEN)
    else:
        want, _ = LossCase("vanilla", mode, options).function()(model_output=outputs, data=by_hand)
    case, data = WeightedLoss("vanilla", mode, options), weighed(data, sessions, ROLE_WEIGHTS)
    loss, metrics = case.function()(model_output=outputs, data=data)
    expected = differentiated(model, want)
    assert worst_error(differentiated(model, loss), expected) < 1e-10
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(expected.loss, rel=1e-6)
    assert worst_error(relayed_result(model, data, case, capacity=7, max_loss_terms=7), expected) < 1e-10


def test_the_drawn_tree_with_roles_by_hand() -> None:
    """The leaf c weighs half: b b 3/4, c -6/8, d 1/4; over 6 tokens, or 2 sessions, the first of two leaves."""
    data, outputs = fork()
    roles = [1.0, 0.5, 1.0]
    token_mean, seq_mean = WeightedLoss("vanilla", "token-mean"), WeightedLoss("vanilla", "seq-mean-token-sum")
    tu.assign_non_tensor(data, global_batch_size=3)
    loss, _ = token_mean.function()(model_output=outputs, data=weighed(data, [0, 1, 2], roles))
    assert loss.item() == pytest.approx(-(3 / 4 - 6 / 8 + 1 / 4) / 6, abs=1e-7)
    loss, _ = seq_mean.function()(model_output=outputs, data=weighed(data, SESSIONS, roles))
    assert loss.item() == pytest.approx(-(3 / 8 - 6 / 16 + 1 / 4) / 2, abs=1e-7)


def test_kl_entropy_and_values_are_weighed_by_role_too(models: dict[str, Any]) -> None:
    """Row by row: verl's whole loss of a row, times what its role weighs, over the denominators of all rows."""
    for name in ("vanilla", "value"):
        options = {} if name == "value" else KL_AND_ENTROPY
        case = LossCase(name, "seq-mean-token-mean", options)
        model, data, outputs = flat_side(models, case)
        tu.assign_non_tensor(data, global_batch_size=NUM_LEAVES)
        want = torch.zeros((), dtype=torch.float64)
        for row, weight in enumerate(ROLE_WEIGHTS):
            if data["response_mask"].unbind(dim=0)[row].any():
                own = {
                    kind: torch.nested.as_nested_tensor([values.unbind()[row]], layout=torch.jagged)
                    for kind, values in outputs.items()
                }
                alone = tu.index_select_tensor_dict(data, [row])
                want = want + weight * case.function()(model_output=own, data=alone, dp_group=None)[0]
        loss, _ = WeightedLoss(name, "seq-mean-token-mean", options).function()(
            model_output=outputs, data=weighed(data, range(NUM_LEAVES), ROLE_WEIGHTS)
        )
        assert worst_error(differentiated(model, loss), differentiated(model, want)) < 1e-10


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_roles_that_all_weigh_1_are_verls_rows_bit_for_bit(models: dict[str, Any], mode: str) -> None:
    options = {"loss_scale_factor": 16, **KL_AND_ENTROPY}
    model, data, outputs = flat_side(models, LossCase())
    num_tokens = int(data["loss_mask"].values().sum())
    tu.assign_non_tensor(data, global_batch_size=NUM_LEAVES, batch_num_tokens=num_tokens)
    plain, _ = LossCase("vanilla", mode, options).function()(model_output=outputs, data=data)
    alone = weighed(data, range(NUM_LEAVES), [1.0] * NUM_LEAVES)
    loss, _ = WeightedLoss("vanilla", mode, options).function()(model_output=outputs, data=alone)
    assert loss.item() == plain.item()
    got, want = differentiated(model, loss).gradients, differentiated(model, plain).gradients
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_means_of_metrics_count_every_trained_token_once(models: dict[str, Any]) -> None:
    _, data, outputs = flat_side(models, LossCase())
    plain = LossCase("vanilla", "token-mean", KL_AND_ENTROPY).function()(model_output=outputs, data=data)[1]
    case = WeightedLoss("vanilla", "token-mean", KL_AND_ENTROPY)
    metrics = case.function()(model_output=outputs, data=weighed(data, UNEVEN))[1]
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        assert metrics[name].aggregation == plain[name].aggregation
        assert metrics[name].aggregate() == pytest.approx(plain[name].aggregate(), rel=1e-6)
    assert plain["actor/ppo_kl"].aggregate() != 0
    assert metrics["kl_coef"] == pytest.approx(plain["kl_coef"], rel=1e-12)


def test_the_kind_of_a_weighted_loss_is_that_of_the_loss() -> None:
    assert is_sum_over_rows(WeightedLoss("gspo").function())
    assert not is_sum_over_rows(WeightedLoss("clip_cov").function())


def test_the_engines_denominators_stay_as_they_are() -> None:
    data, outputs = fork()
    data = weighed(data, SESSIONS)
    WeightedLoss().function()(model_output=outputs, data=data)
    assert (data["global_batch_size"], data["batch_num_tokens"]) == (3, 6)


BY_SESSION, BY_ROLE = {"session_weight": "session"}, {"role_weight": {"c": 0.5, "d": 0.25}}


@pytest.mark.parametrize("strategy", [TREE_STRATEGY, FLAT_STRATEGY])
@pytest.mark.parametrize(
    ("options", "losses"),
    [
        # -(3/8 - 6/8 + 1/4) / 2, and -(3/4 + 1/4) / 2
        (BY_SESSION, [1 / 16, -1 / 2]),
        # c at half and d at a quarter: -(3/4 - 6/8 + 1/16) / 3, and -(3/4 + 1/16) / 2
        (BY_ROLE, [-1 / 48, -13 / 32]),
        # -(3/8 - 6/16 + 1/16) / 2, and as before
        (BY_SESSION | BY_ROLE, [-1 / 32, -13 / 32]),
    ],
)
def test_a_worker_weighs_the_rows_of_each_mini_batch(
    tmp_path: Path, strategy: str, options: dict[str, Any], losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mini-batches of the drawn tree, on policy, so that the losses above come out of the update."""
    if torch.cuda.is_available():
        pytest.skip("builds engines on the CPU platform")
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    tiny_model(size="engine", tie_word_embeddings=True).save_pretrained(tmp_path)
    worker = local_worker(
        str(tmp_path),
        strategy=strategy,
        max_token_len=64,
        tree_options=options,
        optimizer=FSDPOptimizerConfig(lr=0.0, optimizer="SGD", override_optimizer_config={}, total_training_steps=10),
    )
    coupled = make_loss(Case("coupled", actor={"policy_loss": {"loss_mode": "clip_cov"}}))
    remedies = {"session_weight": "tree.session_weight=leaf", "role_weight": "tree.role_weight=null"}
    with pytest.raises(ValueError, match=".*\n.*".join(f"or set {remedies[name]}" for name in options)):
        worker.set_loss_fn(coupled)
    worker.set_loss_fn(Distillation("k3").function())
    assert worker.loss_fn.args[0].func is loss_of_any_rows
    worker.set_loss_fn(make_loss(Case("mean", actor={"loss_agg_mode": "seq-mean-token-sum"})))
    # The second mini-batch lacks the leaf c, and ends with a row that no loss reads.
    data, _ = fork([0, 1, 2, 0, 2, 2])
    data["response_mask"].unbind(dim=0)[-1].zero_()
    data["loss_mask"] = data["response_mask"]
    infer = data.clone()
    tu.assign_non_tensor(infer, compute_loss=False)
    log_probs = worker.infer_batch(infer)["log_probs"].unbind(dim=0)
    responses = data["responses"].unbind(dim=0)
    old = [row[len(row) - 1 - len(response) : -1] for row, response in zip(log_probs, responses, strict=True)]
    data["old_log_probs"] = torch.nested.as_nested_tensor([row.float() for row in old], layout=torch.jagged)
    plan = MiniBatchPlan(rows=((3, 3),), num_rows=(3, 2)).with_sessions(
        [0, 0, 1, 0, 1] if "session_weight" in options else range(5),
        row_order=range(6),
        role_weights=[1.0, 0.5, 0.25, 1.0, 0.25] if "role_weight" in options else None,
    )
    assert MiniBatchPlan.from_batch(plan.to_extra_info()) == plan
    for key, value in plan.to_extra_info().items():
        tu.assign_non_tensor_data(data, key, value)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert metrics["actor/pg_loss"] == pytest.approx(losses, abs=1e-6)
    assert metrics["loss"] == pytest.approx(losses, abs=1e-6)
