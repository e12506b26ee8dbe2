"""What a command for verl says in other words is translated, one line for each change, and is then valid."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from input_cases import resolved, write_model
from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tree.launch.checks import find
from verl_tree.launch.checks.refusals import value_of
from verl_tree.launch.checks.translation import LEGACY_GROUPS, MOVED, translate

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
KL, CRITIC = f"{ACTOR}.use_kl_loss=true", "critic.enable=true"
COPY = "copied to critic.ppo_infer_max_token_len_per_gpu, which verl 0.9.1 reads instead"


def translated(*overrides: str) -> tuple[DictConfig, list[str]]:
    """Return the translated configuration, in which the checks find nothing, and the lines."""
    config = resolved(*overrides)
    OmegaConf.set_struct(config, True)  # as Hydra composes it
    lines = translate(config)
    assert [finding.message for finding in find(config)] == []
    once = copy.deepcopy(config)
    translate(config)
    assert config == once, "what is translated stays as it is"
    return config, lines


def test_a_command_in_our_words_stays_as_it_is() -> None:
    for overrides in ([], [KL], ["tree.enabled=false"], [f"{ACTOR}.use_torch_compile=true"]):
        config = resolved(*overrides)
        assert translate(config) == []
        assert config == resolved(*overrides)


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_verls_strategies_run_on_trees(strategy: str) -> None:
    overrides = [
        f"{ACTOR}.strategy={strategy}",
        KL,
        CRITIC,
        f"critic.strategy={strategy}",
        f"{REF}.strategy={strategy}",
    ]
    config, lines = translated(*overrides)
    assert {value_of(config, f"{role}.strategy") for role in (ACTOR, REF, "critic")} == {"fsdp_tree"}
    means = f"strategy={strategy}: runs as fsdp_tree: FSDP2 on trees"
    assert lines[:3] == [f"{role}.{means}" for role in (ACTOR, REF, "critic")]


def test_strategies_stay_as_they_are_without_trees() -> None:
    config, lines = translated("tree.enabled=false", f"{ACTOR}.strategy=fsdp")
    assert lines == []
    assert config.actor_rollout_ref.actor.strategy == "fsdp"


LENS = ["data.max_prompt_length=100", "data.max_response_length=900"]
NAMED = "1000 tokens (data.max_prompt_length=100 + data.max_response_length=900)"


def test_rows_of_a_micro_batch_become_tokens_of_a_pack() -> None:
    config, lines = translated(
        *LENS,
        KL,
        CRITIC,
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        f"{REF}.log_prob_micro_batch_size_per_gpu=16",
        "critic.ppo_micro_batch_size_per_gpu=3",
    )
    rollout, actor, ref = (config.actor_rollout_ref[each] for each in ("rollout", "actor", "ref"))
    assert actor.ppo_max_token_len_per_gpu == 4 * 1000
    assert rollout.log_prob_max_token_len_per_gpu == 8 * 1000
    assert ref.log_prob_max_token_len_per_gpu == 16 * 1000
    assert config.critic.ppo_max_token_len_per_gpu == config.critic.ppo_infer_max_token_len_per_gpu == 3 * 1000
    switches = actor.use_dynamic_bsz, rollout.log_prob_use_dynamic_bsz, ref.log_prob_use_dynamic_bsz
    assert [*switches, config.critic.use_dynamic_bsz] == [True] * 4
    assert lines[0] == (
        f"{ACTOR}.use_dynamic_bsz=False: packs are cut by tokens; {ACTOR}.ppo_max_token_len_per_gpu=4000, for the "
        f"4 rows of {ACTOR}.ppo_micro_batch_size_per_gpu, of at most {NAMED}"
    )
    assert len(lines) == 5
    assert lines[4] == f"critic.ppo_max_token_len_per_gpu=3000: {COPY}"


def test_a_micro_batch_of_all_ranks_is_divided_among_them() -> None:
    """The deprecated key; ranks that share rows (Ulysses) share their tokens, too."""
    by_rows = [*LENS, f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size=32"]
    ranks = ["trainer.n_gpus_per_node=4", "trainer.nnodes=2"]
    config = resolved(*by_rows, *ranks)
    translate(config)
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 32 // 8 * 1000
    for key in (f"{ACTOR}.ulysses_sequence_parallel_size", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"):
        config = resolved(*by_rows, *ranks, f"{key}=4")
        line = translate(config)[0]
        # Two groups of four ranks have 16 rows each, 4,000 tokens on each rank.
        assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 32 // 2 * 1000 // 4
        assert line.endswith(", on 4 ranks")


def test_the_capacity_of_the_trees_wins() -> None:
    rows = [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"]
    config, lines = translated(*rows, "tree.capacity=5000")
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    assert lines[0] == (
        f"{ACTOR}.use_dynamic_bsz=False: packs are cut by tokens; a pack has at most tree.capacity=5000"
    )
    config, _ = translated(*rows, "tree.enabled=false", "tree.capacity=5000")
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 4 * 1024


def test_sizes_that_nothing_reads_are_said() -> None:
    sizes = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8"]
    config = resolved(*sizes)
    assert translate(config) == [f"{', '.join(sizes)}: not read, because packs are cut by tokens"]
    assert config == resolved(*sizes)


@pytest.mark.parametrize(
    ("overrides", "off", "because"),
    [
        ([f"{MODEL}.use_fused_kernels=true"], [f"{MODEL}.use_fused_kernels", f"{ACTOR}.use_fused_kernels"], "logits"),
        ([f"{ACTOR}.use_prefix_grouper=true"], [f"{ACTOR}.use_prefix_grouper"], "shares all prefixes"),
        (["critic.fsdp.pad_to_length=true"], ["critic.fsdp.pad_to_length"], "a pack is not padded"),
        (
            [f"{MODEL}.use_remove_padding=true", "tree.enabled=false"],
            [f"{MODEL}.use_remove_padding"],
            "trainer.device=cpu",
        ),
    ],
)
def test_what_trees_have_no_use_for_is_off(overrides: list[str], off: list[str], because: str) -> None:
    config, (line,) = translated(*overrides)
    assert [value_of(config, key) for key in off] == [False] * len(off)
    assert all(f"{key}=True" in line for key in off)
    assert because in line


TEAMS = ["trainer.n_gpus_per_node=2", f"{ACTOR}.ulysses_sequence_parallel_size=2"]


def test_teams_need_no_padding_removed() -> None:
    """Verl asks for it with Ulysses; a tree has none to remove."""
    padded = [f"{MODEL}.use_remove_padding=false", "critic.model.use_remove_padding=false"]
    config, (line,) = translated(*TEAMS, *padded)
    assert line.startswith(f"{MODEL}.use_remove_padding=False: on, because verl asks for it with Ulysses")
    assert (config.actor_rollout_ref.model.use_remove_padding, config.critic.model.use_remove_padding) == (True, False)
    config, _ = translated(*TEAMS, *padded, CRITIC, "critic.ulysses_sequence_parallel_size=2")
    assert config.critic.model.use_remove_padding is True
    for overrides in (padded, [*TEAMS, *padded, "tree.enabled=false"]):
        assert translate(resolved(*overrides)) == []


@pytest.mark.parametrize("settings", [{"model_type": "qwen3_5_text"}, {"model_type": "qwen3_vl", "vision_config": {}}])
def test_models_that_no_team_shares_out_are_computed_alone(settings: dict[str, object], tmp_path: Path) -> None:
    """Such commands ask for Ulysses to bound memory, as relay does; the reference follows the actor."""
    path = write_model(tmp_path / "model", **settings)
    of_reference = [KL, f"{REF}.fsdp_config.ulysses_sequence_parallel_size=2"]
    config, (line,) = translated(*TEAMS, *of_reference, f"{MODEL}.path={path}")
    assert line.startswith(f"{TEAMS[1]}, ")
    assert of_reference[1] in line
    assert line.endswith(
        f": 1, because a rank computes {path} ({settings['model_type']}) alone; longer paths are relayed"
    )
    assert [value_of(config, each.partition("=")[0]) for each in (TEAMS[1], of_reference[1])] == [1, 1]
    assert translate(resolved(*TEAMS, f"{MODEL}.path={path}", "tree.enabled=false")) == []


def test_a_correction_that_bypass_mode_leaves_out_goes_to_the_loss() -> None:
    correction, loss = "algorithm.rollout_correction", f"{ACTOR}.policy_loss"
    bypass = [f"{correction}.bypass_mode=true", f"{correction}.loss_type=reinforce"]
    weighed = [*bypass, f"{correction}.rollout_is=sequence"]
    for overrides in (weighed, [*weighed, f"{loss}.loss_mode=bypass_mode"]):
        config, (line,) = translated(*overrides)
        assert line.startswith(f"{correction}: rollout_is=sequence, bypass_mode=True: {loss}.loss_mode=bypass_mode")
        assert value_of(config, f"{loss}.loss_mode") == "bypass_mode"
        assert value_of(config, f"{loss}.rollout_correction") == value_of(config, correction)
    mine = [*weighed, f"{loss}.loss_mode=bypass_mode", f"+{loss}.rollout_correction.rollout_is=token"]
    for overrides in (bypass, [f"{correction}.rollout_is=token"], mine):
        assert translate(resolved(*overrides)) == [], "the rollout's log-probs alone, no bypass, a correction in place"


def test_verls_own_engine_keeps_what_it_has() -> None:
    keys = [f"{ACTOR}.pad_to_length", f"{MODEL}.use_fused_kernels"]
    config, lines = translated("tree.enabled=false", *(f"{key}=true" for key in keys))
    assert [value_of(config, key) for key in keys] == [True, True]
    assert lines == []


def test_a_norm_without_a_factor_divides_by_the_width_of_padded_rows() -> None:
    norm = [f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "data.max_response_length=900"]
    config, (line,) = translated(*norm)
    assert config.actor_rollout_ref.actor.loss_scale_factor == 900
    assert line == f"{ACTOR}.loss_scale_factor=None: data.max_response_length=900, the width of verl's padded rows"
    config, lines = translated(*norm, CRITIC)
    assert config.critic.loss_scale_factor == 900
    assert len(lines) == 3
    config, lines = translated(*norm, f"{ACTOR}.loss_scale_factor=5")
    assert lines == []
    assert config.actor_rollout_ref.actor.loss_scale_factor == 5


def test_reward_keys_of_earlier_releases_are_moved(tmp_path: Path) -> None:
    """A reward function named there would not be called: verl composes the keys with nulls, its trainer reads none."""
    (tmp_path / "mine.py").write_text("def compute_score(): ...\n")
    config, lines = translated(
        f"custom_reward_function.path={tmp_path}/mine.py",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.max_resp_len=5",
        "reward_model.model.external_lib=lib",
        "+reward_model.launch_reward_fn_async=true",
        "reward_model.num_workers=2",
    )
    function = {"path": f"{tmp_path}/mine.py", "name": "compute_score"}  # a name of its own was not given
    assert config.reward.custom_reward_function == function
    assert config.reward.reward_manager.name == "dapo"
    assert config.reward.reward_kwargs == {"max_resp_len": 5}
    assert config.reward.num_workers == 2
    moved, not_read = "an earlier release's key, moved below `reward`", "not read by verl 0.9.1"
    assert lines == [
        f"custom_reward_function.path={tmp_path}/mine.py: {moved}",
        f"reward_model.num_workers=2: {moved}",
        f"reward_model.reward_manager=dapo: {moved}",
        f"reward_model.model.external_lib=lib: {not_read}",
        f"reward_model.reward_kwargs.max_resp_len=5: {moved}",
        f"reward_model.launch_reward_fn_async=True: {not_read}",
    ]


def test_a_reward_manager_of_the_users_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine: ...\n")
    config, _ = translated(
        "reward_model.reward_loop_source=importlib",
        f"reward_model.reward_loop_module_path={tmp_path}/mine.py",
        "reward_model.reward_loop_class_name=Mine",
    )
    manager = config.reward.reward_manager
    assert (manager.source, manager.module.path, manager.name) == ("importlib", f"{tmp_path}/mine.py", "Mine")


def _leaves(config: DictConfig, prefix: str) -> Iterator[str]:
    for name in config:
        key, value = f"{prefix}.{name}", OmegaConf.select(config, str(name))
        yield from _leaves(value, key) if isinstance(value, DictConfig) else [key]


def test_the_keys_that_move_are_those_that_verl_moves() -> None:
    from verl.experimental.reward_loop import migrate_legacy_reward_impl

    legacy = resolved()
    keys = [key for group in LEGACY_GROUPS for key in _leaves(legacy[group], group)]
    assert len(keys) > 30
    for key in keys:
        config = OmegaConf.masked_copy(legacy, ["reward", *LEGACY_GROUPS])
        with open_dict(config):
            OmegaConf.update(config, key, "MARK", force_add=True)
            OmegaConf.update(config, "reward_model.reward_loop_source", "MARK" if "reward_loop" in key else None)
            migrated = migrate_legacy_reward_impl(config)
        found = [each for each in _leaves(migrated.reward, "reward") if OmegaConf.select(migrated, each) == "MARK"]
        assert bool(found) == any(f"{key}.".startswith(f"{each}.") for each in MOVED), key
