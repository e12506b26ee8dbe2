"""The entry point: what it refuses before Ray starts, and what it gives to the processes."""

import pytest
from input_cases import resolved

from verl_tree.launch.validation import code, inputs
from verl_tree.launch.validation.settings import CHECKS, capacity_keys, longest_trajectory_len, validate
from verl_tree.main_ppo import adapt_ray_options, process_environment

CPU_VLLM = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def test_defaults_are_valid() -> None:
    validate(resolved())
    validate(resolved("tree.enabled=false"))
    validate(resolved("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true"))


REFUSED = {
    "check_tree_options": [
        (["tree.shared_tokens=max"], ["tree.shared_tokens='max'", "sum, mean, once"]),
        (["tree.packing=nonsense"], ["tree.packing=nonsense", "auto"]),
        (["tree.backend=nonsense"], ["tree.backend=nonsense", "dense"]),
        (["+tree.capcity=1"], ["tree has no option capcity"]),
    ],
    "check_flat_has_no_tree_objective": [
        (["tree.enabled=false", "tree.shared_tokens=once"], ["tree.shared_tokens=once", "sum"])
    ],
    "check_model_engine": [(["model_engine=megatron"], ["model_engine=megatron", "dp"])],
    "check_strategies": [
        ([f"{ACTOR}.strategy=fsdp2"], [f"{ACTOR}.strategy=fsdp2", "fsdp_tree"]),
        (["tree.enabled=false", f"{ACTOR}.strategy=fsdp_tree"], ["tree.enabled=False", "fsdp2"]),
        (["actor_rollout_ref.ref.strategy=fsdp2"], ["actor_rollout_ref.ref.strategy=fsdp2", "fsdp_tree"]),
        (["critic.enable=true", "critic.strategy=veomni"], ["critic.strategy=veomni", "fsdp_tree"]),
    ],
    "check_trainer": [
        (["trainer.use_v1=false"], ["trainer.use_v1=False", "true"]),
        (["trainer.v1.trainer_mode=separate_async"], ["trainer_mode=separate_async", "sync"]),
        (["actor_rollout_ref.hybrid_engine=false"], ["hybrid_engine=False", "true"]),
    ],
    "check_estimator": [
        (["algorithm.adv_estimator=tree_rl"], ["adv_estimator=tree_rl", "treerl", "gae", "VERL_USE_EXTERNAL_MODULES"])
    ],
    "check_capture": [
        ([f"{CPU_VLLM}.agent.agent_loop_manager_class=null"], ["agent_loop_manager_class=None", "rollout_hooks"])
    ],
    "check_fused_kernels": [
        (["actor_rollout_ref.model.use_fused_kernels=true"], ["model.use_fused_kernels=True", "false"]),
        ([f"{ACTOR}.use_fused_kernels=true"], [f"{ACTOR}.use_fused_kernels=True", "false"]),
        (["critic.model.use_fused_kernels=true"], ["critic.model.use_fused_kernels=True", "false"]),
    ],
    "check_sequence_parallelism": [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=2"], [f"{ACTOR}.ulysses_sequence_parallel_size=2", "to 1"]),
        (["critic.fsdp.ulysses_sequence_parallel_size=4"], ["critic.fsdp.ulysses_sequence_parallel_size=4", "to 1"]),
    ],
    "check_dynamic_batches": [
        ([f"{ACTOR}.use_dynamic_bsz=false"], [f"{ACTOR}.use_dynamic_bsz=False", "true"]),
        ([f"{CPU_VLLM}.log_prob_use_dynamic_bsz=false"], ["log_prob_use_dynamic_bsz=False", "true"]),
        (["critic.enable=true", "critic.use_dynamic_bsz=false"], ["critic.use_dynamic_bsz=False", "true"]),
    ],
    "check_capacity": [
        (["tree.capacity=1023"], ["tree.capacity=1023", "1024 tokens", "data.max_response_length"]),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=1000"], ["ppo_max_token_len_per_gpu=1000", "1024 tokens"]),
        (["critic.enable=true", "critic.forward_max_token_len_per_gpu=9"], ["critic.forward_max_token_len_per_gpu=9"]),
        (["data.max_response_length=16000"], ["16512 tokens", "raise it"]),
        (["tree.max_path_len=1000"], ["tree.max_path_len=1000", "1024 tokens", "null", "data.max_prompt_length=512 +"]),
        (
            ["tree.max_path_len=9", f"{CPU_VLLM}.max_model_len=20"],
            [f"20 tokens ({CPU_VLLM}.max_model_len)"],
        ),
        (["tree.max_loss_terms=511"], ["tree.max_loss_terms=511", "data.max_response_length", "512 tokens"]),
    ],
    "check_loss_normalisation": [
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], ["loss_scale_factor=None", "max_response_length"])
    ],
    "check_prefix_grouper": [([f"{ACTOR}.use_prefix_grouper=true"], ["use_prefix_grouper=True", "tree.enabled"])],
    "check_unsupported_outputs": [
        ([f"{ACTOR}.calculate_sum_pi_squared=true"], ["calculate_sum_pi_squared=True", "tree.enabled=false"])
    ],
    "check_padding_to_length": [([f"{ACTOR}.pad_to_length=true"], ["pad_to_length=True", "tree.enabled=false"])],
    "check_quantisation": [
        ([f"{ACTOR}.qat.enable=true"], [f"{ACTOR}.qat.enable=True", "false"]),
        ([f"{ACTOR}.fsdp_config.qat.enable=true"], ["fsdp_config.qat.enable=True", "false"]),
        ([f"{CPU_VLLM}.quantization=fp8"], ["quantization=fp8", "null"]),
    ],
    "check_router_replay": [
        ([f"{CPU_VLLM}.enable_rollout_routing_replay=true"], ["enable_rollout_routing_replay=True", "false"]),
        ([f"+{ACTOR}.fsdp_config.router_replay.mode=R3"], ["router_replay.mode=R3", "disabled"]),
    ],
    "check_distillation": [(["distillation.enabled=true"], ["distillation.enabled=True", "false"])],
    "check_critic_cut": [
        (["critic.enable=true", "critic.ppo_mini_batch_size=3"], ["critic.ppo_mini_batch_size=3", "256"])
    ],
    "check_cpu_settings": [
        ([f"{CPU_VLLM}.name=sglang"], ["rollout.name=sglang", "vllm"]),
        (["actor_rollout_ref.model.use_remove_padding=true"], ["use_remove_padding=True", "false"]),
        ([f"{CPU_VLLM}.free_cache_engine=true"], ["free_cache_engine=True", "false"]),
        ([f"{CPU_VLLM}.enable_sleep_mode=true"], ["enable_sleep_mode=True", "false"]),
        (["tree.backend=fa4"], ["tree.backend=fa4", "trainer.device=cpu", "auto"]),
        (["tree.backend=triton"], ["tree.backend=triton", "trainer.device=cpu", "auto"]),
    ],
}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(("name", "overrides", "parts"), CASES)
def test_setting_is_refused_with_its_remedy(name: str, overrides: list[str], parts: list[str]) -> None:
    """The named check, and nothing that runs before it, refuses; the message has key, value and remedy."""
    config = resolved(*overrides)
    names = [check.__name__ for check in CHECKS]
    for earlier in CHECKS[: names.index(name)]:
        earlier(config)
    with pytest.raises(ValueError) as error:
        validate(config)
    for part in parts:
        assert part in str(error.value)


def test_every_check_is_tested() -> None:
    elsewhere = {
        "check_device",
        *(name for module in (code, inputs) for name in vars(module) if name.startswith("check_")),
    }
    assert {check.__name__ for check in CHECKS} == set(REFUSED) | elsewhere


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
    assert flat == [f"{ACTOR}.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"]
    assert len(capacity_keys(resolved("critic.enable=true", f"{ACTOR}.use_kl_loss=true"))) == 5


def test_longest_trajectory() -> None:
    lens = ["data.max_prompt_length=100", "data.max_response_length=50"]
    assert longest_trajectory_len(resolved(*lens)) == 150
    assert longest_trajectory_len(resolved(*lens, "actor_rollout_ref.rollout.max_model_len=120")) == 120


def test_processes_learn_the_plugin_and_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    assert process_environment(resolved()) == {
        "VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform",
        "VERL_PLATFORM": "cpu",
    }
    assert "VERL_PLATFORM" not in process_environment(resolved("trainer.device=cuda"))


def test_modules_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,verl_tree.cpu.platform")
    assert process_environment(resolved())["VERL_USE_EXTERNAL_MODULES"] == "mine,verl_tree.cpu.platform"
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=theirs"
    assert process_environment(resolved(of_ray))["VERL_USE_EXTERNAL_MODULES"] == "theirs,verl_tree.cpu.platform"


def test_ray_gets_the_environment_and_the_logical_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = resolved("trainer.n_gpus_per_node=2")
    adapt_ray_options(config, {"VERL_PLATFORM": "cpu"})
    ray_init = config.ray_kwargs.ray_init
    assert ray_init.num_gpus == 2
    assert ray_init.address == "local", "without an address Ray joins a cluster of somebody else on this machine"
    assert ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    assert ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE == "1"
    assert all(isinstance(value, str) for value in ray_init.runtime_env.env_vars.values())


def test_a_running_cluster_keeps_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    config = resolved()
    adapt_ray_options(config, {})
    assert config.ray_kwargs.ray_init.num_gpus is None
    assert config.ray_kwargs.ray_init.num_cpus is None
