"""Values that cannot work are refused before Ray starts; test_fuzzed_settings.py asks about any values."""

import pytest
from input_cases import refusal, resolved

from verl_tree.launch.validation import validate
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
