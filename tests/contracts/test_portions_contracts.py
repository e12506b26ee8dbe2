"""verl 0.9.1 as the portions rely on it: how its methods call the models, and which estimators part the prompts."""

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.advantages import ESTIMATORS, Rows, announce_rows
from verl_tree.trainer.portions.beside_rows import GROUP_WISE, BesideRows
from verl_tree.trainer.portions.whitening import UNWHITENED
from verl_tree.tree.shape import ForestShape


@cache
def composed() -> DictConfig:
    """Return a configuration; do not change it."""
    return compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused"])


class Ours(PPOTrainerSync, BesideRows):  # pyright: ignore[reportGeneralTypeIssues]
    """verl's trainer with our methods and nothing else of ours."""


class Called(Exception):
    """A model was called: the group's method, and what it was told."""


class Groups:
    """All worker groups of a trainer; a call ends the trainer's method."""

    def __init__(self, role: str) -> None:
        self.role = role

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        raise Called(self.role, "compute_log_prob", batch.extra_info)

    def compute_ref_log_prob(self, batch: KVBatchMeta) -> None:
        raise Called(self.role, "compute_ref_log_prob", batch.extra_info)

    def infer_batch(self, batch: KVBatchMeta) -> None:
        raise Called(self.role, "infer_batch", batch.extra_info)


@pytest.mark.parametrize("ref_in_actor", [False, True])
@pytest.mark.parametrize("name", ["_compute_old_log_prob", "_compute_ref_log_prob", "_compute_values"])
def test_models_are_called_as_verl_calls_them(name: str, ref_in_actor: bool) -> None:
    calls = []
    for trainer_class in (PPOTrainerSync, Ours):
        trainer: Any = object.__new__(trainer_class)
        trainer.config = deepcopy(composed())
        trainer.config.actor_rollout_ref.rollout.temperature = 0.7
        trainer.ref_in_actor = ref_in_actor
        trainer.actor_rollout_wg, trainer.ref_policy_wg, trainer.critic_wg = map(Groups, ("actor", "ref", "critic"))
        batch = KVBatchMeta(keys=["u_0_0"], tags=[{}], partition_id="train", extra_info={"kept": 1})
        with pytest.raises(Called) as called:
            getattr(trainer, name)(batch, {})
        calls.append(called.value.args)
    assert calls[0] == calls[1]
    assert calls[0][2]["temperature"] == 0.7


def estimate(
    name: str, rows: np.ndarray, *, rewards: torch.Tensor, mask: torch.Tensor, uids: np.ndarray
) -> torch.Tensor:
    """Return the advantages of some rows, estimated alone."""
    of = {"token_level_rewards": rewards[rows].clone(), "response_mask": mask[rows], "index": uids[rows]}
    return get_adv_estimator_fn(name)(**of, config=composed().algorithm)[0]


@pytest.mark.parametrize("name", [*sorted(GROUP_WISE - set(ESTIMATORS)), "reinforce_plus_plus_baseline"])
def test_these_estimators_of_verl_part_the_prompts(name: str) -> None:
    """The last whitens over the batch, so the comparison can fail."""
    rng = np.random.default_rng(1)
    uids = np.array(["b", "a", "b", "c", "a", "b", "c"], dtype=object)
    data = {
        "rewards": torch.from_numpy(rng.normal(size=(7, 5))).float(),
        "mask": torch.from_numpy(rng.random((7, 5)) < 0.8).long(),
        "uids": uids,
    }
    data["mask"][:, 0] = 1
    together = estimate(name, np.arange(7), **data)
    alone = torch.empty_like(together)
    for uid in set(uids):
        rows = np.flatnonzero(uids == uid)
        alone[rows] = estimate(name, rows, **data)
    assert torch.equal(together, alone) == (name in GROUP_WISE)


@pytest.mark.parametrize("name", sorted(UNWHITENED))
def test_these_estimators_of_verl_whiten_at_the_end(name: str) -> None:
    rng = np.random.default_rng(2)
    mask = torch.from_numpy(rng.random((7, 50)) < 0.8).long()
    rewards, values = torch.from_numpy(rng.normal(size=(2, 7, 50))).float()
    data = {"token_level_rewards": rewards, "response_mask": mask}
    config = deepcopy(composed().algorithm)
    config.gamma, config.lam = 0.9, 0.8
    uids = np.array([*"babcabd"], dtype=object)
    of_gae = {"values": values, "gamma": config.gamma, "lam": config.lam}
    theirs = of_gae if name == "gae" else {"config": config, "index": uids}
    expected, expected_returns = get_adv_estimator_fn(name)(**data, **theirs)
    keys = [f"u_{row}_0" for row in range(7)]
    shape = ForestShape(order=np.arange(7), sequence_lens=np.full(7, 51), lcp=np.zeros(7, int))
    with announce_rows(Rows(keys, shape, [50] * 7, values=values)):
        raw, returns = UNWHITENED[name](**data, config=config, index=uids)
    trained = raw.double()[mask.bool()]
    whitened = (raw.double() - trained.mean()) * (trained.var() + 1e-8).rsqrt()
    if name != "gae":
        whitened = whitened * mask
    torch.testing.assert_close(whitened.float(), expected, rtol=1e-5, atol=1e-6)
    if name == "reinforce_plus_plus_baseline":
        assert torch.equal(expected_returns, expected)
    else:
        torch.testing.assert_close(returns, expected_returns, rtol=1e-6, atol=1e-6)
