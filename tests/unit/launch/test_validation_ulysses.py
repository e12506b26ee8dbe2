"""Sequence parallelism that cannot work is refused before Ray starts, each with its remedy."""

from pathlib import Path

import pytest
from input_cases import refusal, resolved, write_model

from verl_tree.launch.checks import validate
from verl_tree.launch.checks.capacity import team_size
from verl_tree.launch.command.composition import compose_config

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
NAME = "ulysses_sequence_parallel_size"
FOUR_RANKS = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2"]
REFERENCE, CRITIC = f"{ACTOR}.use_kl_loss=true", "critic.enable=true"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("key", [f"{ACTOR}.{NAME}", f"{ACTOR}.fsdp_config.{NAME}"])
def test_either_key_of_verl_makes_teams(key: str, size: int) -> None:
    config = resolved(*FOUR_RANKS, REFERENCE, CRITIC, f"{key}={size}", f"critic.{NAME}={size}")
    assert team_size(config) == size
    validate(config)


def test_the_reference_follows_the_actor_and_the_critic_its_own_key() -> None:
    """So does the file `tree_ppo.yaml`; verl copies neither key."""
    models = [f"{model}.path=unused" for model in ("actor_rollout_ref.model", "critic.model")]
    config = compose_config(["profile=cpu", *models, f"{ACTOR}.fsdp_config.{NAME}=2", f"critic.{NAME}=4"])
    assert config.actor_rollout_ref.ref.fsdp_config[NAME] == 2
    assert config.critic.fsdp[NAME] == 4


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ([f"{ACTOR}.{NAME}=3"], [f"{ACTOR}.{NAME}=3", "divisor of the 4 ranks"]),
        ([f"{ACTOR}.fsdp_config.{NAME}=8"], [f"{ACTOR}.fsdp_config.{NAME}=8", "divisor of the 4 ranks"]),
        ([REFERENCE, f"{ACTOR}.{NAME}=2", f"{REF}.{NAME}=4"], [f"{REF}.{NAME}=4", f"must equal {ACTOR}.{NAME}=2"]),
        ([CRITIC, f"{ACTOR}.{NAME}=2"], [f"critic.fsdp.{NAME}=1", f"must equal {ACTOR}.{NAME}=2"]),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], parts: list[str]) -> None:
    message = refusal(*FOUR_RANKS, *overrides)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, None),
        ({"num_attention_heads": 8}, None),
        ({"text_config": {"num_attention_heads": 6}}, "6 attention heads cannot be dealt to 4 ranks evenly"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6}, "6 key-value heads cannot be dealt to 4 ranks evenly"),
        ({"n_head": 3}, None),  # another family, whose layers say so when they run
    ],
)
def test_heads_that_a_team_cannot_share_are_refused(tmp_path: Path, settings: dict, reason: str | None) -> None:
    model = write_model(tmp_path, **settings)
    overrides = [*FOUR_RANKS, f"actor_rollout_ref.model.path={model}", f"{ACTOR}.{NAME}=4"]
    if reason is None:
        validate(resolved(*overrides))
    else:
        assert reason in refusal(*overrides)
    validate(resolved(*FOUR_RANKS, f"actor_rollout_ref.model.path={model}"))


def test_a_model_that_is_elsewhere_is_not_looked_into() -> None:
    validate(resolved(*FOUR_RANKS, "actor_rollout_ref.model.path=hdfs://models/one", f"{ACTOR}.{NAME}=4"))


def test_a_limit_per_gpu_is_that_of_one_rank_of_a_team() -> None:
    """The longest trajectory has 1,024 tokens."""
    limit = [*FOUR_RANKS, "tree.relay=never", f"{ACTOR}.ppo_max_token_len_per_gpu=300"]
    validate(resolved(*limit, f"{ACTOR}.{NAME}=4"))
    assert "300: less, times 2 ranks, than the longest possible trajectory" in refusal(*limit, f"{ACTOR}.{NAME}=2")
    assert "tree.capacity=1000: less than" in refusal(*limit, f"{ACTOR}.{NAME}=4", "tree.capacity=1000")
