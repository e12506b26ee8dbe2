"""Settings that cannot work are refused before Ray starts, all at once; findings.csv has one after the other."""

from pathlib import Path

import pytest
from input_cases import refusal, resolved

from verl_tree.launch.checks import find, settings, validate
from verl_tree.launch.checks.capacity import capacity_keys, longest_trajectory, team_size
from verl_tree.launch.checks.values import set_aside
from verl_tree.launch.command.composition import compose_config
from verl_tree.main_ppo import bound_paths

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TEAM = "ulysses_sequence_parallel_size"


def test_estimators_that_compare_sessions_are_there() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_tree.trainer.advantages import ESTIMATORS

    assert set(settings.OVER_SESSIONS) <= {*ADV_ESTIMATOR_REGISTRY, *ESTIMATORS}


def test_a_bad_option_hides_no_other_finding() -> None:
    config = resolved("tree.capacity=many", "trainer.use_v1=false", "data.train_files=/no/rows.parquet")
    found = [finding.message.partition(" ")[0] for finding in find(config)]
    assert found == ["tree.capacity='many'", "trainer.use_v1=False:", "data.train_files=/no/rows.parquet:"]


def test_cuda_without_a_device_is_refused() -> None:
    import torch

    config = resolved("trainer.device=cuda")
    if torch.cuda.is_available():
        validate(config)
    else:
        with pytest.raises(ValueError, match=r"trainer\.device=cuda.*profile=cpu"):
            validate(config)


def test_capacity_of_the_roles_in_use() -> None:
    assert capacity_keys(resolved("tree.capacity=5000")) == ["tree.capacity"]
    flat = capacity_keys(resolved("tree.capacity=5000", "tree.enabled=false"))
    assert flat == [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
    assert len(capacity_keys(resolved("critic.enable=true", f"{ACTOR}.use_kl_loss=true"))) == 5


def test_longest_trajectory() -> None:
    lens = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert longest_trajectory(resolved(*lens))[0] == 150
    assert longest_trajectory(resolved(*lens, f"{ROLLOUT}.max_model_len=120"))[0] == 120


def test_engines_learn_the_longest_path_where_they_hold_memory_for_it() -> None:
    overrides = ["tree.capacity=auto", "tree.memory_gib=4", "data.max_prompt_length=100"]
    config = resolved(*overrides)
    bound_paths(config)
    engines = (config.actor_rollout_ref.actor.fsdp_config, config.actor_rollout_ref.ref.fsdp_config, config.critic.fsdp)
    assert [each.tree.max_path_len for each in (config, *engines)] == [612] * 4
    validate(config)
    given, fixed = resolved(*overrides, "tree.max_path_len=2000"), resolved("tree.capacity=5000")
    for config, expected in ((given, 2000), (fixed, None)):
        bound_paths(config)
        assert config.critic.fsdp.tree.max_path_len == expected


def test_all_that_is_wrong_is_told_at_once() -> None:
    message = refusal(f"{ROLLOUT}.n=0", "trainer.nnodes=0", f"{ACTOR}.grad_clip=0")
    assert [line.partition("=")[0] for line in message.splitlines()] == [
        f"{ROLLOUT}.n",
        "trainer.nnodes",
        f"{ACTOR}.grad_clip",
    ]
    assert len(refusal("trainer.use_v1=false", "tree.backend=nonsense").splitlines()) == 2


def test_a_wrong_value_hides_no_other_finding(tmp_path: Path) -> None:
    """The others are asked with verl's own value in its place; what they say of that value is nobody's business."""
    wrong = ["trainer.n_gpus_per_node=0", f"{ROLLOUT}.n=many", "trainer.save_freq=x"]
    others = ["trainer.resume_mode=sometimes", "tree.gate=max", "tree.relay=x", "tree.watchdog.poll_s=-1"]
    # Of n the warning about groups would be said, and of the strategy a refusal if it were not translated.
    rows = [f"data.train_files={tmp_path}/typo.parquet", f"{ACTOR}.strategy=fsdp2"]
    messages = [each.message for each in find(resolved(*wrong, *others, *rows))]
    keys = [message.partition("=")[0] for message in messages]
    assert sorted(keys) == sorted(each.partition("=")[0] for each in (*wrong, *others, rows[0]))
    assert len(refusal("algorithm=nothing", "trainer.resume_mode=x").splitlines()) == 2


def test_verls_own_value_that_does_not_go_with_the_others_is_not_asked_with() -> None:
    """The prompt's length is taken from a key that is wrong, too, and that no table names."""
    config = resolved(f"{ROLLOUT}.prompt_length=x")
    config.data.max_prompt_length = "${nowhere}"
    assert set_aside(config, [f"{ROLLOUT}.prompt_length"]) is None


@pytest.mark.parametrize("key", [f"{ACTOR}.{TEAM}", f"{ACTOR}.fsdp_config.{TEAM}"])
def test_either_key_of_verl_makes_teams(key: str) -> None:
    assert team_size(resolved("trainer.n_gpus_per_node=4", f"{key}=4")) == 4


def test_the_reference_follows_the_actor_and_the_critic_its_own_key() -> None:
    """So does the file `tree_ppo.yaml`; verl copies neither key."""
    models = [f"{model}.path=unused" for model in ("actor_rollout_ref.model", "critic.model")]
    config = compose_config(["profile=cpu", *models, f"{ACTOR}.fsdp_config.{TEAM}=2", f"critic.{TEAM}=4"])
    assert config.actor_rollout_ref.ref.fsdp_config[TEAM] == 2
    assert config.critic.fsdp[TEAM] == 4
