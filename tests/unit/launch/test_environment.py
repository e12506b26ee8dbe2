"""What the processes of a training run get from the entry point: environment variables and Ray's options."""

import json

import pytest
from input_cases import resolved

from verl_tree.launch.checks.settings import check_secrets as variables_check
from verl_tree.launch.command.environment import JOB_VARIABLE, ray_env_vars, set_ray_options


def test_processes_learn_the_plugin_and_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    monkeypatch.delenv("SAGEMAKER_CONTAINER_LOG_LEVEL", raising=False)
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    everywhere = {
        "VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform",
        "SAGEMAKER_CONTAINER_LOG_LEVEL": "WARNING",
    }
    assert ray_env_vars(resolved("trainer.device=cuda")) == everywhere
    assert ray_env_vars(resolved()) == {**everywhere, "VERL_PLATFORM": "cpu", "RAY_enable_metrics_collection": "0"}


def test_modules_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine,verl_tree.cpu.platform")
    assert ray_env_vars(resolved())["VERL_USE_EXTERNAL_MODULES"] == "mine,verl_tree.cpu.platform"
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES=theirs"
    assert ray_env_vars(resolved(of_ray))["VERL_USE_EXTERNAL_MODULES"] == "theirs,verl_tree.cpu.platform"


def test_the_level_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_CONTAINER_LOG_LEVEL", "ERROR")
    assert ray_env_vars(resolved())["SAGEMAKER_CONTAINER_LOG_LEVEL"] == "ERROR"
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars.SAGEMAKER_CONTAINER_LOG_LEVEL=INFO"
    assert ray_env_vars(resolved(of_ray))["SAGEMAKER_CONTAINER_LOG_LEVEL"] == "INFO"


def test_ray_metrics_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_enable_metrics_collection", "1")
    assert ray_env_vars(resolved())["RAY_enable_metrics_collection"] == "1"
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars.RAY_enable_metrics_collection=0"
    assert ray_env_vars(resolved(of_ray))["RAY_enable_metrics_collection"] == "0"


def test_a_variable_without_a_value_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAGEMAKER_CONTAINER_LOG_LEVEL", "ERROR")
    of_ray = "++ray_kwargs.ray_init.runtime_env.env_vars.SAGEMAKER_CONTAINER_LOG_LEVEL=null"
    assert ray_env_vars(resolved(of_ray))["SAGEMAKER_CONTAINER_LOG_LEVEL"] == "ERROR"


def test_a_secret_in_the_configuration_is_warned_of_and_not_shown() -> None:
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    given = [f"{variables}.{name}=s3cret" for name in ("WANDB_API_KEY", "hf_token", "TOKENIZERS_PARALLELISM")]
    findings = list(variables_check(resolved(*given)))
    assert [each.message.partition(":")[0] for each in findings] == [
        f"{variables}.WANDB_API_KEY=(not shown)",
        f"{variables}.hf_token=(not shown)",
    ]
    assert all(
        each.is_warning and "s3cret" not in each.message and "remove it here" in each.message for each in findings
    )
    assert not list(variables_check(resolved()))


def test_ray_gets_the_environment_and_the_logical_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = resolved("trainer.n_gpus_per_node=2")
    set_ray_options(config, {"VERL_PLATFORM": "cpu"})
    ray_init = config.ray_kwargs.ray_init
    assert ray_init.num_gpus == 2
    assert ray_init.address == "local", "without an address Ray joins a cluster of somebody else on this machine"
    assert ray_init.runtime_env.env_vars.VERL_PLATFORM == "cpu"
    assert ray_init.runtime_env.env_vars.VLLM_CPU_KVCACHE_SPACE == "1"
    assert all(isinstance(value, str) for value in ray_init.runtime_env.env_vars.values())


def test_a_running_cluster_keeps_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", "/of/the/shell")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    config = resolved("+ray_kwargs.ray_init.runtime_env.env_vars.WANDB_DIR=/of/the/command")
    set_ray_options(config, {})
    # Its processes have the environment of `ray start`.
    variables = config.ray_kwargs.ray_init.runtime_env.env_vars
    assert (variables.WANDB_MODE, variables.WANDB_DIR) == ("offline", "/of/the/command")
    assert "WANDB_API_KEY" not in variables
    # Of a submitted job they have that, too, and Ray refuses a value for a variable that the job has set.
    monkeypatch.setenv(JOB_VARIABLE, json.dumps({"runtime_env": {"env_vars": {"WANDB_MODE": "offline"}}}))
    job = resolved()
    set_ray_options(job, {})
    assert "WANDB_MODE" not in job.ray_kwargs.ray_init.runtime_env.env_vars
    assert job.ray_kwargs.ray_init.runtime_env.env_vars.WANDB_DIR == "/of/the/shell"
    assert config.ray_kwargs.ray_init.num_gpus is None
    assert config.ray_kwargs.ray_init.num_cpus is None
