"""verl's own GAE and GSPO on rows that share tokens, by hand."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import compute_policy_loss_gspo
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.workers.config import FSDPActorConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.functional import expand, shared_token_weights
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout


def test_gae_runs_along_the_path_of_each_leaf() -> None:
    # session 0:  P a ─┬─ b            r = 1      values: a 0.5, b 0.8, c 0.2, d 0.1, e 0.4
    #                  └─ c T d        r = 0      T is a tool's
    # session 1:  P e                  r = 1      gamma 1, lambda 1/2
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1], [1, 0, 0, 0]])
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[0.0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]], dtype=torch.float64),
            # The critic's value of a shared token is the same on all leaves; behind tools and ends it is not read.
            "values": torch.tensor([[0.5, 0.8, 9, 9], [0.5, 0.2, 9, 0.1], [0.4, 9, 9, 9]], dtype=torch.float64),
            "response_mask": mask,
        },
        non_tensors={"uid": np.array(["u", "u", "u"], dtype=object)},
    )
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=["u_0_0", "u_0_1", "u_1_0"],
        adv_estimator="gae",
        gamma=1.0,
        lam=0.5,
        config=AlgoConfig(),
    )
    # b: 1 - 0.8 = 0.2; a on the way to b: 0.8 - 0.5 + 0.2 / 2 = 0.4
    # d: 0 - 0.1; c: 0.1 - 0.2 - 0.1 / 2 = -0.15; a on the way to c: 0.2 - 0.5 - 0.15 / 2 = -0.375; e: 1 - 0.4
    plain = torch.tensor([[0.4, 0.2, 0, 0], [-0.375, -0.15, 0, -0.1], [0.6, 0, 0, 0]], dtype=torch.float64)
    values = data.batch["values"]
    torch.testing.assert_close(data.batch["returns"][mask == 1], (plain + values)[mask == 1])
    # verl whitens over the trained tokens of all rows, a shared token once for each of its leaves.
    trained = plain[mask == 1]
    assert trained.mean().item() == pytest.approx(0.575 / 6)
    expected = (trained - trained.mean()) / trained.std()
    torch.testing.assert_close(data.batch["advantages"][mask == 1], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "shared_gradient"),
    [
        ("sum", (-math.exp(0.1) + math.exp(-0.1)) / 4),
        ("mean", (-math.exp(0.1) + math.exp(-0.1)) / 8),
        ("once", -math.exp(0.1) / 4),
    ],
)
def test_gspo_weighs_a_shared_token_by_the_ratio_of_each_of_its_sequences(mode: str, shared_gradient: float) -> None:
    # P a ─┬─ b   advantage +1, log-ratios 0 and 0.2: the sequence's ratio is exp(0.1)
    #      └─ c   advantage -1, log-ratios 0 and -0.2: exp(-0.1); both within the clip range of 0.2
    # Each of two sequences of two tokens has the weight 1/2 * 1/2.
    layout = TreeLayout.from_forest(TokenForest.from_sequences([[9, 1, 2], [9, 1, 3]]))
    log_probs_T = torch.tensor([0.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    trained_F = torch.tensor([False, True, True] * 2)
    weight_F = shared_token_weights(layout, trained_F, mode)
    rows = expand(log_probs_T, layout, gradient_weight_F=weight_F).reshape(2, 3)[:, 1:]
    loss, _ = compute_policy_loss_gspo(
        old_log_prob=torch.tensor([[-1.0, -1.2], [-1.0, -0.8]], dtype=torch.float64),
        log_prob=rows,
        advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64),
        response_mask=torch.ones(2, 2),
        loss_agg_mode="seq-mean-token-mean",
        config=FSDPActorConfig(strategy="fsdp2", ppo_micro_batch_size_per_gpu=1, rollout_n=1),
    )
    loss.backward()
    # The ratio reads all tokens of a sequence in every mode; only what flows back to the shared token differs.
    assert loss.item() == pytest.approx((-math.exp(0.1) + math.exp(-0.1)) / 2)
    expected = [0.0, shared_gradient, -math.exp(0.1) / 4, math.exp(-0.1) / 4]
    assert log_probs_T.grad.tolist() == pytest.approx(expected, rel=1e-6)
