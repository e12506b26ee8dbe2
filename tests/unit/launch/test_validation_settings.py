"""Settings that cannot work are refused before Ray starts, each with its remedy."""

import pytest
from input_cases import resolved
from omegaconf import DictConfig

from verl_tree.launch.checks import CHECKS, capacity, find, settings, validate
from verl_tree.launch.checks.capacity import capacity_keys, longest_trajectory
from verl_tree.launch.checks.refusals import Check
from verl_tree.main_ppo import bound_paths

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_defaults_are_valid() -> None:
    assert list(find(resolved())) == []
    validate(resolved("tree.enabled=false", "tree.capacity=auto"))
    validate(resolved("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true"))
    validate(resolved("tree.sharing=prompt"))
    validate(resolved("tree.session_weight=session", f"{ACTOR}.policy_loss.loss_mode=gspo"))
    validate(resolved("tree.rows=longest", "algorithm.adv_estimator=gigpo"))
    validate(resolved(f"{ACTOR}.policy_loss.loss_mode=clip_cov"))
    tiled = [f"{model}.tiled_mlp.enabled=true" for model in ("actor_rollout_ref.model", "critic.model")]
    validate(resolved(OFFLOAD, *tiled, "critic.enable=true"))
    for flat in ([], ["tree.enabled=false"]):
        validate(resolved("critic.enable=true", "critic.model.lora_rank=8", *flat))
    validate(resolved("critic.model.lora_rank=8", "+critic.checkpoint.save_lora_only=true"))


CORRECTION, LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss.loss_mode"
MODE = "distillation.distillation_loss.loss_mode"
TOP_K = ["distillation.enabled=true", f"{MODE}=forward_kl_topk"]
NO_RELAY, CRITIC = ["tree.relay=never"], ["critic.enable=true"]
FLAT, OFFLOAD = "tree.enabled=false", "actor_rollout_ref.model.enable_activation_offload=true"
REFUSED = {
    "check_tree_options": [
        (["tree.gate=max"], ["tree.gate='max'", "auto, always, never"]),
        (["tree.relay=perhaps"], ["tree.relay='perhaps'", "auto, always, never"]),
        (["tree.relay_store=disk"], ["tree.relay_store='disk'", "device, host"]),
        (["tree.shared_tokens=max"], ["tree.shared_tokens=max", "sum, mean, once"]),
        (["tree.packing=deepest_first"], ["tree.packing='deepest_first'", "auto, heuristic, exact", "set it to auto"]),
        (["tree.backend=nonsense"], ["tree.backend=nonsense", "dense"]),
        (["+tree.capcity=1"], ["tree.capcity=1: no such option"]),
    ],
    "check_strategies": [
        ([f"{ACTOR}.strategy=megatron"], [f"{ACTOR}.strategy=megatron", "fsdp_tree", "remove this override"]),
        (["tree.enabled=false", f"{ACTOR}.strategy=fsdp_tree"], ["tree.enabled=False", "fsdp2"]),
        (
            [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.strategy=veomni"],
            ["actor_rollout_ref.ref.strategy=veomni", "fsdp_tree"],
        ),
        (["critic.enable=true", "critic.strategy=veomni"], ["critic.strategy=veomni", "fsdp_tree"]),
    ],
    "check_capacity": [
        ([*NO_RELAY, "tree.capacity=1023"], ["tree.capacity=1023", "1024 tokens", "data.max_response_length"]),
        ([*NO_RELAY, "tree.capacity=9"], ["raise it, shorten them, or set tree.relay=auto"]),
        ([*NO_RELAY, f"{ACTOR}.ppo_max_token_len_per_gpu=1000"], ["ppo_max_token_len_per_gpu=1000", "1024 tokens"]),
        ([*NO_RELAY, *CRITIC, "critic.forward_max_token_len_per_gpu=9"], ["critic.forward_max_token_len_per_gpu=9"]),
        ([*NO_RELAY, "data.max_response_length=16000"], ["16512 tokens", "raise it"]),
        (["tree.enabled=false", f"{ACTOR}.ppo_max_token_len_per_gpu=9"], ["1024 tokens", "raise it or shorten them"]),
        (["tree.max_path_len=1000"], ["tree.max_path_len=1000", "1024 tokens", "null", "data.max_prompt_length=512 +"]),
        (["tree.max_path_len=9", f"{ROLLOUT}.max_model_len=20"], [f"20 tokens ({ROLLOUT}.max_model_len)"]),
        (["tree.max_loss_terms=511"], ["tree.max_loss_terms=511", "data.max_response_length", "512 tokens"]),
    ],
    "check_step_weight": [
        (
            ["algorithm.adv_estimator=gigpo", "algorithm.gigpo.step_advantage_w=much"],
            ["algorithm.gigpo.step_advantage_w=much", "give a number"],
        ),
    ],
    "check_critic_cut": [
        (["critic.enable=true", "critic.ppo_mini_batch_size=3"], ["critic.ppo_mini_batch_size=3", "256"])
    ],
}
WARNED = {
    "check_last_mini_batch": [
        (
            ["data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=4"],
            [
                "ppo_mini_batch_size=4: does not divide data.train_batch_size=6",
                "last of the 2 updates",
                "has 2 prompts",
            ],
        )
    ],
    "check_rollout_engine": [
        (["trainer.device=npu", f"{ROLLOUT}.name=sglang"], [f"{ROLLOUT}.name=sglang: ", "only vllm was ever tried"])
    ],
    "check_group_size": [
        (
            [f"{ROLLOUT}.n=1", f"algorithm.adv_estimator={name}"],
            [f"{ROLLOUT}.n=1: algorithm.adv_estimator={name} compares the sessions", "there is one", "Set 8"],
        )
        for name in ("tree_grpo", "rloo")
    ],
}
SILENT = [
    ["data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=3"],
    ["trainer.device=npu"],
    *([f"{ROLLOUT}.n=1", f"algorithm.adv_estimator={name}"] for name in ("gae", "treerl", "reinforce_plus_plus")),
]
CHECKS_HERE = {
    check.__name__: check for check in (settings.check_tree_options, *settings.CHECKS, capacity.check_capacity)
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "overrides", "parts"), CASES)
def test_setting_is_refused_with_its_remedy(name: str, overrides: list[str], parts: list[str]) -> None:
    """The named check, and nothing that runs before it, refuses; the message has key, value and remedy."""
    message = _refused_by(CHECKS_HERE[name], resolved(*overrides))
    for part in parts:
        assert part in message


def _refused_by(check: Check, config: DictConfig) -> str:
    """Return the refusal of a check before which no other check refuses."""
    for earlier in CHECKS[: CHECKS.index(check)]:
        assert list(earlier(config)) == []
    with pytest.raises(ValueError, match="=") as error:
        validate(config)
    return str(error.value)


@pytest.mark.parametrize("relay", ["auto", "always"])
def test_a_trajectory_that_can_be_relayed_may_exceed_the_capacity(relay: str) -> None:
    longer = "data.max_response_length=16000"
    assert not list(find(resolved(f"tree.relay={relay}", "tree.capacity=9", longer)))
    assert not list(find(resolved(f"tree.relay={relay}", f"{ACTOR}.ppo_max_token_len_per_gpu=9", longer)))


def test_every_check_is_tested() -> None:
    elsewhere = {"check_device", "check_attention", "check_secrets"}
    assert set(CHECKS_HERE) == {*REFUSED, *WARNED} | elsewhere


@pytest.mark.parametrize(
    ("name", "overrides", "parts"), [(name, *case) for name, cases in WARNED.items() for case in cases]
)
def test_setting_that_works_otherwise_than_it_seems_is_warned_of(
    name: str, overrides: list[str], parts: list[str]
) -> None:
    config = resolved(*overrides)
    (finding,) = find(config)
    assert list(CHECKS_HERE[name](config)) == [finding]
    assert finding.is_warning
    for part in parts:
        assert part in finding.message


@pytest.mark.parametrize("overrides", SILENT, ids=" ".join)
def test_setting_that_works_as_it_seems_is_not_warned_of(overrides: list[str]) -> None:
    assert list(find(resolved(*overrides))) == []


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


def test_estimators_and_verls_own_engine_distil() -> None:
    for mode in ("k1", "k2", "k3", "abs", "mse", "kl", "low_var_kl"):
        validate(resolved("distillation.enabled=true", f"{MODE}={mode}"))
    validate(resolved(*TOP_K, "tree.enabled=false"))


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
