"""verl's methods on portions of the rows give what they give on all rows: columns, fields and metrics (real queue)."""

import os
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")

import transfer_queue as tq
from omegaconf import OmegaConf
from ranks_here import RanksHere
from test_replay import RowsTrainer
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import get_kl_controller
from verl.trainer.ppo.utils import need_critic
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_tree.launch.command.composition import compose_config
from verl_tree.trainer.portions.beside_rows import BesideRows
from verl_tree.trainer.portions.portion import PortionTrainer, announcement
from verl_tree.trainer.portions.whitening import UNWHITENED, unwhitened
from verl_tree.trainer.rows.padding import append_padding_rows, real_rows
from verl_tree.trainer.rows.step_rows import StepRows

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("queue")]

SESSIONS = {"a": (2, 1, 3), "b": (1, 1), "c": (4,), "d": (1, 2), "e": (2, 2, 1)}
"""Leaves of the sessions of each prompt."""


def draw_row(key: str, rng: np.random.Generator) -> dict[str, Any]:
    """Draw a row after its forward passes; no token of prompt c is trained."""
    uid = key.split("_")[0]
    prompt = torch.arange(3) + 10 * ord(uid)
    response = torch.from_numpy(rng.integers(10, 90, size=rng.integers(1, 12)))
    mask = torch.from_numpy(rng.random(len(response)) < (0.0 if uid == "c" else 0.8)).long()
    tokens = torch.cat([prompt, response])
    scores = torch.zeros(len(response))
    scores[-1] = round(rng.random(), 2)
    column = {
        name: torch.from_numpy(rng.normal(-1, 0.4, size=len(response))).float().clamp(max=0)
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
    }
    raw = {name: torch.from_numpy(rng.normal(-1, 0.4, size=len(tokens))).float() for name in ("log_probs", "entropy")}
    return {
        **column,
        **raw,
        "prompts": prompt,
        "responses": response,
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": tokens,
        "position_ids": torch.arange(len(tokens)),
        "rm_scores": scores,
        "num_turns": int(rng.integers(1, 5)),
        "uid": uid,
        "extra_fields": {},
    }


def store_rows() -> KVBatchMeta:
    """Store drawn rows in another order than that of their keys."""
    rng = np.random.default_rng(4)
    keys = [
        f"{uid}_{session}_{leaf}"
        for uid, leaves in SESSIONS.items()
        for session, num_leaves in enumerate(leaves)
        for leaf in range(num_leaves)
    ]
    keys = [keys[row] for row in rng.permutation(len(keys))]
    rows = [draw_row(key, rng) for key in keys]
    tags = [
        {
            "prompt_len": 3,
            "response_len": len(row["responses"]),
            "seq_len": len(row["input_ids"]),
            "min_global_steps": int(versions[0]),
            "max_global_steps": int(versions.sum()),
        }
        for row, versions in zip(rows, rng.integers(0, 3, size=(len(rows), 2)), strict=True)
    ]
    return put(dict(zip(keys, rows, strict=True)), tags)


def put(rows: dict[str, dict[str, Any]], tags: list[dict[str, int]]) -> KVBatchMeta:
    """Store rows by their keys, and padding rows between them."""
    keys = list(rows)
    tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(list(rows.values())), tags=tags)
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train", fields=None, extra_info={})
    batch = append_padding_rows(batch, num_rows=3, eos_token_id=7)
    batch.reorder(np.random.default_rng(5).permutation(len(batch)).tolist())
    return batch


class Answering(RanksHere):
    """Ranks that have computed log-probs and values before they are asked."""

    futures: ClassVar[list[Any]] = []

    def compute_log_prob(self, batch: KVBatchMeta) -> None:
        assert batch.extra_info["temperature"] == 1.0

    compute_ref_log_prob = compute_log_prob

    def infer_batch(self, batch: KVBatchMeta) -> "Answering":
        self.compute_log_prob(batch)
        return self


def trainer_of(*overrides: str, num_ranks: int) -> RowsTrainer:
    """Return our trainer behind ranks that take portions."""
    config = compose_config(["profile=cpu", "actor_rollout_ref.rollout.temperature=1.0", *overrides])
    ranks = Answering(num_ranks)
    trainer = RowsTrainer(config, workers=ranks)
    trainer.use_critic, trainer.ref_in_actor = need_critic(config), False
    trainer.ref_policy_wg = trainer.critic_wg = ranks
    trainer.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
    trainer._get_n_gpus_for_throughput = lambda: 1
    trainer.total_training_steps = 1
    return trainer


def columns_of(batch: KVBatchMeta, *names: str) -> dict[str, list[list[float]]]:
    """Read columns of rows."""
    columns = tq.kv_batch_get(keys=batch.keys, partition_id="train", select_fields=list(names))
    return {name: [values.tolist() for values in columns[name].unbind()] for name in names}


def assert_same(got: dict[str, Any], expected: dict[str, Any], *, rel: float = 1e-6) -> None:
    """Compare metrics by name and value."""
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert float(got[name]) == pytest.approx(float(value), rel=rel, abs=1e-6, nan_ok=True), name


KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
CORRECTION = "algorithm.rollout_correction"

CASES = {
    "grpo": ["algorithm.adv_estimator=grpo"],
    "rloo": ["algorithm.adv_estimator=rloo"],
    "opo": ["algorithm.adv_estimator=opo"],
    "grpo_vectorized": ["algorithm.adv_estimator=grpo_vectorized"],
    "rloo_vectorized": ["algorithm.adv_estimator=rloo_vectorized"],
    "tree_grpo": ["algorithm.adv_estimator=tree_grpo"],
    "tree_grpo_intra": ["algorithm.adv_estimator=tree_grpo_intra"],
    "treerl": ["algorithm.adv_estimator=treerl"],
    "treepo": ["algorithm.adv_estimator=treepo", "tree.session_weight=session"],
    "gigpo": ["algorithm.adv_estimator=gigpo"],
    "kl": ["algorithm.adv_estimator=treerl", *KL],
    "critic": ["algorithm.adv_estimator=tree_grpo", "critic.enable=true"],
    "gae_row_weights": [
        "algorithm.adv_estimator=gae",
        "algorithm.gamma=0.9",
        "algorithm.lam=0.8",
        f"{CORRECTION}.rollout_is=sequence",
    ],
    "reinforce_plus_plus_kl": ["algorithm.adv_estimator=reinforce_plus_plus", *KL],
    "reinforce_plus_plus_baseline_token_weights": [
        "algorithm.adv_estimator=reinforce_plus_plus_baseline",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=1.5",
    ],
    "bypass": ["algorithm.rollout_correction.bypass_mode=true"],
}


@pytest.mark.parametrize("num_ranks", [1, 4, 40])
@pytest.mark.parametrize("case", CASES)
def test_portions_give_what_all_rows_give(case: str, num_ranks: int) -> None:
    batch = store_rows()
    real = real_rows(batch)
    trainer = trainer_of(*CASES[case], num_ranks=num_ranks)
    config, rows = trainer.config, StepRows.fetch(real)
    trainer._step_rows = rows
    whole = PortionTrainer(config, kl_coef=trainer.kl_ctrl_in_reward.value)
    is_weighed = config.algorithm.rollout_correction.rollout_is is not None
    names = ["advantages", "returns"] + ["token_level_rewards"] * config.algorithm.use_kl_in_reward
    names += ["rollout_is_weights"] * is_weighed

    expected: dict[str, Any] = {}
    with announcement(rows, config):
        written = whole._compute_advantage(real, expected)
    columns = columns_of(real, *names)
    whole._compute_metrics(real, expected, {"step": 2.0, "gen": 1.0, "adv": 0.5}, global_steps=3, epoch=1)
    tq.kv_batch_put(
        keys=real.keys,
        partition_id="train",
        fields=list_of_dict_to_tensordict([dict.fromkeys(names, torch.full((1,), 7.0))] * len(real)),
    )

    got: dict[str, Any] = {}
    kl_coef = trainer.kl_ctrl_in_reward.value
    updated = trainer._compute_advantage(batch, got)
    assert (updated.keys, updated.tags, set(updated.fields)) == (batch.keys, batch.tags, set(written.fields))
    is_rounded = is_weighed or config.algorithm.use_kl_in_reward or config.algorithm.adv_estimator in UNWHITENED
    for name, values in columns_of(real, *names).items():
        for row, theirs in zip(values, columns[name], strict=True):
            # Sums of a KL and of log-ratios depend on the width to which they are padded, and verl adds up what it
            # whitens in single precision. verl's opo has NaN where nothing is trained.
            np.testing.assert_allclose(row, theirs, rtol=1e-5 if is_rounded else 0, atol=1e-6 if is_rounded else 0)
    uids = [{key.split("_")[0] for key in portion.batch.keys} for portion in trainer.actor_rollout_wg.portions]
    assert sum(map(len, uids)) == len(SESSIONS), "every prompt is in one portion"
    assert len(uids) == min(num_ranks, len(SESSIONS) - 1), "prompt c, of which nothing is trained, is with another"
    if config.algorithm.use_kl_in_reward:
        adapting = get_kl_controller(config.algorithm.kl_ctrl)
        adapting.update(current_kl=expected["actor/reward_kl_penalty"], n_steps=len(real))
        assert trainer.kl_ctrl_in_reward.value == pytest.approx(adapting.value) != kl_coef
    timing = {"step": 2.0, "gen": 1.0, "adv": 0.5}
    BesideRows._compute_metrics(trainer, real, got, timing, global_steps=3, epoch=1)
    # verl takes the variance of weights as a difference, in single precision.
    assert_same(got, expected, rel=1e-5 if is_weighed else 1e-6)


ROLES = {"a": ("p", "w", "w", "p", "p", "w"), "b": ("p", "p"), "e": ("p", None, "p", None, "lone")}
"""The roles of the rows of some prompts, in the order of their keys; the others have none."""

REJECTS = [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=2"]
BY_ROLE = {
    **{name: [f"algorithm.adv_estimator={name}"] for name in ("grpo", "rloo", "opo", "tree_grpo", "treerl", "gigpo")},
    "reinforce_plus_plus_baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline"],
    "gae": ["algorithm.adv_estimator=gae"],
    # These are computed by the driver.
    "rejects": ["algorithm.adv_estimator=rloo", *REJECTS],
    "rejects_grpo": ["algorithm.adv_estimator=grpo", *REJECTS],
}


IN_CI = ("grpo", "tree_grpo", "reinforce_plus_plus_baseline", "rejects")
"""Of each way to baselines of roles; the others resemble them."""


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 4])
@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.long]) for name in BY_ROLE]
)
def test_roles_have_baselines_of_their_own(case: str, num_ranks: int) -> None:
    """Beside verl's trainer on the rows of each role apart, and on prompts without roles; tags tell the roles."""
    batch = store_rows()
    by_key = {
        key: role
        for uid, roles in ROLES.items()
        for key, role in zip(sorted(key for key in batch.keys if key.startswith(f"{uid}_")), roles, strict=True)
    }
    for key, tag in zip(batch.keys, batch.tags, strict=True):
        tag |= {"leaf_role": by_key[key]} if by_key.get(key) else {}
    real = real_rows(batch)
    trainer = trainer_of(*BY_ROLE[case], num_ranks=num_ranks)
    rows, estimator = StepRows.fetch(real), trainer.config.algorithm.adv_estimator
    trainer._step_rows = rows
    assert len(rows.roles) == 11
    config = trainer.config
    if estimator in UNWHITENED:  # whitened over all rows
        config = OmegaConf.merge(config, {"algorithm": {"adv_estimator": unwhitened(estimator)}})
    whole = PortionTrainer(config, kl_coef=trainer.kl_ctrl_in_reward.value)
    expected: dict[str, list[float]] = {}
    parts = [[key for key in real.keys if by_key.get(key) == role and key[0] in ROLES] for role in ("p", "w", None)]
    if estimator == "gae":
        parts = [list(real.keys)]
    for part in [*parts, [key for key in real.keys if key[0] not in ROLES]]:
        of_role = real.select_keys(part)
        with announcement(replace(StepRows.fetch(of_role), roles={}), config):  # as a run without roles has them
            whole._compute_advantage(of_role, {})
        expected |= dict(zip(part, columns_of(of_role, "advantages")["advantages"], strict=True))
    masks = dict(zip(real.keys, columns_of(real, "response_mask")["response_mask"], strict=True))
    if estimator != "gae":
        expected |= {key: [0.0] * len(masks[key]) for key, role in by_key.items() if role == "lone"}
    if estimator in UNWHITENED:
        of_trained = np.concatenate([np.array(expected[key])[np.array(mask) > 0] for key, mask in masks.items()])
        for key, mask in masks.items():
            whitened = (np.array(expected[key]) - of_trained.mean()) / of_trained.std(ddof=1)
            expected[key] = whitened if estimator == "gae" else whitened * mask

    trainer._compute_advantage(batch, {})
    for key, values in zip(real.keys, columns_of(real, "advantages")["advantages"], strict=True):
        np.testing.assert_allclose(values, expected[key], rtol=1e-4, atol=1e-5, err_msg=key)
    assert trainer.config.algorithm.adv_estimator == estimator
    assert any(any(expected[key]) for key in by_key)


MODES = {
    "token-mean": [],
    "token-sum": [],
    "seq-mean-token-sum": [],
    "seq-mean-token-mean": [],
    "seq-mean-token-sum-norm": ["actor_rollout_ref.actor.loss_scale_factor=null"],
}


@pytest.mark.parametrize("num_ranks", [1, 4, 40])
@pytest.mark.parametrize("mode", MODES)
def test_log_probs_and_values_are_moved_beside_the_rows(mode: str, num_ranks: int) -> None:
    batch = store_rows()
    trainer = trainer_of(
        "critic.enable=true", f"actor_rollout_ref.actor.loss_agg_mode={mode}", *MODES[mode], num_ranks=num_ranks
    )
    whole, expected, got = PortionTrainer(trainer.config, kl_coef=0.0), {}, {}
    raw_values = columns_of(batch, "entropy")["entropy"]
    sides = []
    for each, metrics in ((whole, expected), (trainer, got)):
        rows = [{name: torch.tensor(values) for name in ("entropy", "values")} for values in raw_values]
        tq.kv_batch_put(keys=batch.keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))
        updated = each._compute_old_log_prob(batch, metrics)
        assert (updated.keys, updated.tags) == (batch.keys, batch.tags)
        each._compute_ref_log_prob(batch, metrics)
        each._compute_values(batch, metrics)
        sides.append((columns_of(batch, "old_log_probs", "entropy", "ref_log_prob", "values"), set(updated.fields)))
    assert sides[0] == sides[1]
    # A correlation from single-precision sums is what differs most.
    assert_same(got, expected, rel=1e-5)


def test_bypassed_log_probs_are_those_of_the_rollout() -> None:
    batch = store_rows()
    trainer = trainer_of("algorithm.rollout_correction.bypass_mode=true", num_ranks=3)
    metrics: dict[str, Any] = {}
    assert trainer._compute_old_log_prob(batch, metrics) is batch
    columns = columns_of(batch, "old_log_probs", "rollout_log_probs")
    assert columns["old_log_probs"] == columns["rollout_log_probs"]
    assert metrics == {}


@pytest.mark.parametrize(
    ("estimator", "missing"),
    [
        ("remax", "reward_baselines"),
        ("gdpo", "prompts"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("tir_optimal_token_baseline", "sum_pi_squared"),
    ],
)
def test_verl_lacks_columns_of_these_estimators(estimator: str, missing: str) -> None:
    batch = real_rows(store_rows())
    overrides = (f"algorithm.adv_estimator={estimator}", "+algorithm.gdpo_reward_keys=[score]")
    trainer = PortionTrainer(trainer_of(*overrides, num_ranks=1).config, kl_coef=0.0)
    with pytest.raises((TypeError, KeyError, AssertionError), match=missing):
        trainer._compute_advantage(batch, {})


# session 0:  5 6 ─┬─ 1 1        r = 1      prompt 5 6; 8 is a tool's token
#                  └─ 1 8 2 3    r = 0      1: 2 leaves, mean 1/2; group: 3 leaves, mean 2/3
# session 1:  5 6 4              r = 1
ROWS = {"u_0_1": ([1, 8, 2, 3], 0.0), "u_1_0": ([4], 1.0), "u_0_0": ([1, 1], 1.0)}
BY_HAND = {
    "treerl": {
        "u_0_0": [-1 / 6 / 2**0.5, 5 / 12],
        "u_0_1": [-1 / 6 / 2**0.5, 0.0, -7 / 12, -7 / 12],
        "u_1_0": [1 / 3],
    },
    "treepo": {"u_0_0": [-1 / 6, 2 / 5], "u_0_1": [-1 / 6, 0.0, -3 / 5, -3 / 5], "u_1_0": [1 / 3]},
    # the rows say nothing of calls: from the prompt 1 1, 1 and 4 with 1, 0 and 1; 2 3 is alone in its state
    "gigpo": {"u_0_0": [7 / 12, 7 / 12], "u_0_1": [-17 / 12, 0.0, -3 / 4, -3 / 4], "u_1_0": [7 / 12]},
    "tree_grpo_intra": {"u_0_0": [3 / 4, 3 / 4], "u_0_1": [-5 / 4, 0.0, -5 / 4, -5 / 4], "u_1_0": [1 / 4]},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_estimators_get_the_keys_tokens_and_response_lengths_of_their_rows(name: str) -> None:
    trainer = trainer_of(f"algorithm.adv_estimator={name}", "algorithm.norm_adv_by_std_in_grpo=false", num_ranks=2)
    rows, tags = {}, []
    for key, (response, reward) in ROWS.items():
        row = draw_row(key, np.random.default_rng(0))
        tokens, scores = torch.tensor(response), torch.zeros(len(response))
        scores[-1] = reward
        mask = (tokens != 8).long()
        row |= dict.fromkeys(("rollout_log_probs", "old_log_probs", "ref_log_prob", "rm_scores"), scores)
        row |= {"prompts": torch.tensor([5, 6]), "responses": tokens, "response_mask": mask, "loss_mask": mask}
        rows[key] = row | {"input_ids": torch.tensor([5, 6, *response])}
        tags.append({"prompt_len": 2, "response_len": len(response), "seq_len": 2 + len(response)})
    batch = put(rows, tags)
    trainer._step_rows = StepRows.fetch(real_rows(batch))
    written = trainer._compute_advantage(batch, {})
    assert written.keys == batch.keys
    for key, values in zip(batch.keys, columns_of(batch, "advantages")["advantages"], strict=True):
        assert values == pytest.approx(BY_HAND[name].get(key, [0.0]), rel=1e-6), key
