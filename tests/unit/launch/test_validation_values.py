"""Values that cannot work are refused before Ray starts, and no value makes a check crash."""

import contextlib
import copy
import random

import pytest
from input_cases import refusal, resolved
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_tree.launch.validation import find, validate
from verl_tree.launch.validation.values import RANGES

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

IMPOSSIBLE = [
    (f"{ROLLOUT}.n=0", "a whole number of at least 1"),
    (f"{ROLLOUT}.n=-1", "a whole number of at least 1"),
    (f"{ROLLOUT}.n=1.5", "a whole number of at least 1"),
    (f"{ROLLOUT}.n=many", "this is no number"),
    (f"{ROLLOUT}.agent.num_workers=0", "at least 1"),
    (f"{ROLLOUT}.response_length=0", "at least 1"),
    (f"{ROLLOUT}.temperature=0", "above 0"),
    (f"{ROLLOUT}.temperature=-1", "above 0"),
    (f"{ROLLOUT}.temperature=.nan", "not a number"),
    (f"{ROLLOUT}.top_p=5", "above 0 and at most 1"),
    (f"{ACTOR}.ppo_mini_batch_size=0", "at least 1"),
    (f"{ACTOR}.ppo_mini_batch_size=-3", "at least 1"),
    (f"{ACTOR}.optim.lr=.nan", "not a number"),
    (f"{ACTOR}.optim.lr=-1", "at least 0"),
    (f"{ACTOR}.clip_ratio=-1", "at least 0"),
    (f"{ACTOR}.policy_loss.loss_mode=nonsense", "choose one of"),
    (f"{ACTOR}.use_kl_loss=2", "this is no switch (true or false)"),
    ("data.train_batch_size=-1", "at least 1"),
    ("data.max_prompt_length=-64", "at least 1"),
    ("trainer.total_training_steps=-5", "at least 1, or null"),
    ("trainer.total_epochs=0", "at least 1"),
    ("trainer.save_freq=x", "this is no number"),
    ("trainer.test_freq=.inf", "a whole number of at least -1"),
    ("trainer.resume_mode=sometimes", "auto, disable, resume_path"),
    ("trainer.logger=[nonsense]", "nonsense is none of wandb"),
    ("algorithm.kl_ctrl.type=nonsense", "fixed, adaptive"),
    ("algorithm=nothing", "this is no group of options"),
    (f"{ROLLOUT}.agent.agent_loop_manager_class=[1]", "give package.module.Class"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=7", "this is no path"),
    (f"{ROLLOUT}.agent.agent_loop_config_path=[1]", "this is no path"),
]
JUNK = [None, 0, -1, 1, 7, 10**12, 0.5, -0.5, float("inf"), float("nan"), True, False]
JUNK += ["", "x", "nonsense", "../..", "1", "auto", "é" * 50, [], [1], ["x"], {"a": 1}]


@pytest.mark.parametrize(("override", "remedy"), IMPOSSIBLE)
def test_an_impossible_value_is_refused_with_its_key_and_a_remedy(override: str, remedy: str) -> None:
    message = refusal(override)
    assert message.startswith(f"{override.split('=')[0]}=")
    assert remedy in message


def test_what_works_passes() -> None:
    validate(resolved("critic.enable=true", f"{ACTOR}.optim.lr=0", f"{ROLLOUT}.val_kwargs.temperature=0"))
    validate(resolved("trainer.save_freq=-1", "trainer.total_training_steps=null", f"{ACTOR}.use_kl_loss=1"))
    assert len({each.key for each in RANGES}) == len(RANGES)


def test_all_that_is_wrong_is_told_at_once() -> None:
    message = refusal(f"{ROLLOUT}.n=0", "trainer.nnodes=0", f"{ACTOR}.grad_clip=0")
    assert [line.partition("=")[0] for line in message.splitlines()] == [
        f"{ROLLOUT}.n",
        "trainer.nnodes",
        f"{ACTOR}.grad_clip",
    ]
    assert len(refusal("trainer.use_v1=false", "tree.backend=nonsense").splitlines()) == 2


@pytest.mark.parametrize("seed", range(4))
def test_no_value_makes_a_check_crash(seed: int) -> None:
    """Random values of random keys, one to three at a time: each configuration is accepted, or refused with a key."""
    rng, config = random.Random(seed), resolved()
    keys = list(_keys(OmegaConf.to_container(config)))
    for _ in range(15):
        changed = copy.deepcopy(config)
        for _ in range(rng.choice([1, 1, 2, 3])):
            with contextlib.suppress(OmegaConfBaseException):  # Hydra refuses a list for a group by itself
                OmegaConf.update(changed, rng.choice(keys), rng.choice(JUNK), force_add=True)
        for finding in find(changed):
            assert "=" in finding.message or "tree has no option" in finding.message


def _keys(group: dict, prefix: str = ""):
    for key, value in group.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
