"""Values that cannot work are refused before Ray starts; test_fuzzed_settings.py asks about any values."""

from pathlib import Path

import pytest
from input_cases import refusal, resolved

from verl_tree.launch.checks import find, validate
from verl_tree.launch.checks.choices import CHOICES
from verl_tree.launch.checks.values import RANGES, set_aside

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
    ("trainer.v1.trainer_mode=async", "choose one of sync, colocate_async, separate_async"),
    ("trainer.use_v1=false", "the legacy trainer is not supported; set it to true"),
    (f"{ACTOR}.qat.enable=true", "quantisation-aware training is not supported; set it to false"),
    ("critic.fsdp.router_replay.mode=R2", "only the actor replays routes; the others route by themselves; set it to"),
    (f"{ACTOR}.fsdp_config.router_replay.mode=R4", "choose one of disabled, R2, R3, null"),
    ("reward.reward_manager.source=nowhere", "choose one of register, importlib: verl's own, and yours"),
    ("algorithm.adv_estimator=tree_rl", "gae, gdpo"),
    ("algorithm.adv_estimator=tree_rl", "or register yours in a module of VERL_USE_EXTERNAL_MODULES"),
    ("trainer.resume_mode=sometimes", "auto, disable, resume_path"),
    ("trainer.device=tpu", "choose one of cuda, cpu"),
    (f"{ACTOR}.optim.lr=.inf", "a finite number of at least 0"),
    (f"{ACTOR}.optim.weight_decay=-1", "a finite number of at least 0"),
    (f"{ACTOR}.entropy_coeff=.inf", "give a finite number"),
    (f"{ACTOR}.kl_loss_coef=-.inf", "give a finite number"),
    ("algorithm.kl_ctrl.kl_coef=.inf", "give a finite number"),
    (f"{ACTOR}.optim.betas=[2,3]", "two numbers of at least 0 and below 1"),
    (f"{ACTOR}.optim.betas=[0.9]", "two numbers of at least 0 and below 1"),
    (f"{ACTOR}.optim.betas=0.9", "two numbers of at least 0 and below 1"),
    (f"{ACTOR}.optim.optimizer=Nope", "has no Nope; AdamW is verl's own"),
    (f"{ACTOR}.optim.optimizer=7", "give the name of a class"),
    (f"{ACTOR}.optim.optimizer_impl=no_such_optim", "no module named no_such_optim"),
    (f"{ROLLOUT}.top_k=-7", "a whole number of at least -1"),
    (f"{ROLLOUT}.val_kwargs.top_k=0.5", "a whole number of at least -1"),
    (f"{ROLLOUT}.max_model_len=1", "a whole number of at least 2, or null"),
    (f"{ROLLOUT}.pipeline_model_parallel_size=0", "a whole number of at least 1"),
    (f"{ROLLOUT}.dtype=float7", "choose one of bfloat16"),
    (f"{ROLLOUT}.seed=-1", "at least 0 and at most"),
    ("data.seed=1180591620717411303424", "at most 1.84467e+19, or null"),
    (f"{ACTOR}.ulysses_sequence_parallel_size=0", "at least 1"),
    (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=-2", "at least 1"),
    (f"{ACTOR}.checkpoint.save_contents=[model,nope]", "nope is none of these; choose one of model, optimizer"),
    (f"{ACTOR}.checkpoint.load_contents=[nope]", "nope is none of these; choose one of model, optimizer"),
    ("reward.num_workers=-1", "a whole number of at least 0"),
    ("algorithm.rollout_correction.rollout_is=nope", "choose one of token, sequence, null"),
    ("ray_kwargs.ray_init.num_cpus=0", "at least 1, or null"),
    ("ray_kwargs.ray_init.num_cpus=-1", "at least 1, or null"),
    ("ray_kwargs.ray_init.num_cpus=4", "wait for ever for 5; give at least 5 and 3 for each of the 1 ranks"),
    ("trainer.logger=[nonsense]", "nonsense is none of these; choose one of wandb"),
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
    validate(resolved(f"{ACTOR}.grad_clip=.inf", f"{ACTOR}.clip_ratio_high=.inf", f"{ACTOR}.entropy_coeff=-0.1"))
    validate(resolved(f"{ROLLOUT}.top_k=0", f"{ROLLOUT}.max_model_len=2", "data.seed=-5", "trainer.device=npu"))
    validate(resolved(f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.betas=[0,0.95]", "reward.num_workers=0"))
    contents = f"{ACTOR}.checkpoint.save_contents"
    validate(resolved(f"{contents}=[hf_model]", "ray_kwargs.ray_init.num_cpus=5", "trainer.logger=console"))
    validate(resolved("trainer.save_freq=-1", "trainer.total_training_steps=null", f"{ACTOR}.use_kl_loss=1"))
    for table in (RANGES, CHOICES):
        assert len({each.key for each in table}) == len(table)


@pytest.mark.parametrize(
    ("threshold", "is_refused"),
    [("-1", True), ("'0.5_'", True), ("0", True), ("'2_0.5'", True), ("2", False), ("'0.5_2.0'", False)],
)
def test_thresholds_of_a_correction_are_read(threshold: str, is_refused: bool) -> None:
    key = "algorithm.rollout_correction.rollout_is_threshold"
    config = resolved("algorithm.rollout_correction.rollout_is=token", f"{key}={threshold}")
    messages = [each.message for each in find(config)]
    assert [message.startswith(f"{key}={threshold.strip(chr(39))}: ") for message in messages] == [True] * is_refused
    assert not list(find(resolved(f"{key}={threshold}"))), "nobody reads it"


def test_another_format_of_weights_is_warned_of() -> None:
    """A plugin of vLLM may register it."""
    (finding,) = find(resolved(f"{ROLLOUT}.load_format=x"))
    assert finding.is_warning
    assert finding.message.startswith(f"{ROLLOUT}.load_format=x: choose one of dummy, auto, safetensors")


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
