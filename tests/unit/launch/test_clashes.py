"""What does not go together is refused, once and everywhere by the same table, and stands in no second place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from input_cases import resolved, resolved_sft, write_model
from tiny_models import tiny_model

from verl_tree import clashes
from verl_tree.clashes import CLASHES, Clash, refuse
from verl_tree.functional.tiles import tile_modules
from verl_tree.launch.checks import CHECKS, find, validate
from verl_tree.launch.checks.features import WORDS, check_clashes, settings_of

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
REPLAY, RETURNED = f"{ACTOR}.fsdp_config.router_replay.mode", f"{ROLLOUT}.enable_rollout_routing_replay"
TEAM, TWO_RANKS = f"{ACTOR}.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"
FLAT, GPU, CRITIC, AUTO = "tree.enabled=false", "trainer.device=cuda", "critic.enable=true", "tree.capacity=auto"
LOSS, CORRECTION = f"{ACTOR}.policy_loss.loss_mode", "algorithm.rollout_correction"
ATTENTION, TOP_K = f"{MODEL}.override_config.attn_implementation", "distillation.distillation_loss.loss_mode"
DISTILS = "distillation.enabled=true"
VEOMNI, MEGATRON = "model_engine=veomni", "model_engine=megatron"
SEPARATE = "trainer.v1.trainer_mode=separate_async"
TYPES = {
    "IMAGES": {"model_type": "qwen3_vl", "vision_config": {}},
    "RECURRENT": {"model_type": "lfm2"},
    "GEMMATEXT": {"model_type": "gemma3_text"},
    "GRANITE": {"model_type": "granite"},
    "LINEAR": {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 128},
    "NESTED": {"text_config": {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 32}},
}
POLICY = {name: f"{MODEL}.path={name}" for name in TYPES}

EXAMPLES = (
    ("tree.sharing=prompt", FLAT),
    ("tree.sharing=prompt", POLICY["IMAGES"]),
    ("tree.sharing=prompt",),
    ("tree.shared_tokens=once", FLAT),
    ("tree.shared_tokens=mean", "tree.sharing=prompt"),
    (f"{LOSS}=clip_cov", "tree.session_weight=session"),
    (f"{LOSS}=clip_cov", "tree.role_weight={p: 1}"),
    ("algorithm.adv_estimator=treerl", "tree.rows=longest"),
    ("tree.session_weight=session", "tree.rows=longest"),
    ("tree.session_weight=session",),
    ("tree.role_weight={p: 1}",),
    ("tree.rows=longest",),
    ("tree.keep_tokens=0.5", FLAT),
    ("tree.keep_tokens=0.5",),
    ("tree.save_on_term=true",),
    (AUTO, POLICY["IMAGES"], "tree.memory_gib=4"),
    ("tree.memory_gib=4",),
    ("tree.memory_gib=null", AUTO),
    ("tree.backend=triton",),
    (TEAM, TWO_RANKS, POLICY["IMAGES"]),
    (TEAM, TWO_RANKS, POLICY["RECURRENT"]),
    ("engine.ulysses_sequence_parallel_size=2",),
    (TEAM, TWO_RANKS, FLAT),
    (TEAM, TWO_RANKS, FLAT, GPU, f"{ATTENTION}=sdpa"),
    (CRITIC, POLICY["IMAGES"]),
    (CRITIC, "critic.model.path=GRANITE", FLAT),
    ("critic.model.lora_rank=8", CRITIC, FLAT, GPU),
    ("critic.checkpoint.save_lora_only=true", CRITIC, "critic.model.lora_rank=8"),
    (f"{ACTOR}.freeze_vision_tower=true", FLAT),
    (f"{ACTOR}.freeze_vision_tower=true", f"{MODEL}.lora_rank=8"),
    ("critic.model.tiled_mlp.enabled=true", CRITIC, FLAT),
    None,  # of a model, below
    (f"{MODEL}.enable_activation_offload=true", FLAT),
    (f"{MODEL}.enable_activation_offload=true", f"{MODEL}.enable_gradient_checkpointing=false"),
    (f"{MODEL}.lora_rank=8", VEOMNI, TWO_RANKS),
    (POLICY["RECURRENT"], VEOMNI, TWO_RANKS),
    ("trainer.n_gpus_per_node=1", VEOMNI),
    ("critic.model.path=GEMMATEXT", VEOMNI, TWO_RANKS, CRITIC),
    (f"{ACTOR}.veomni.expert_parallel_size=2", VEOMNI, TWO_RANKS, CRITIC),
    (f"{MODEL}.lora_rank=8", MEGATRON, TWO_RANKS),
    (f"{MODEL}.lora.rank=8", MEGATRON, TWO_RANKS),
    (f"{ACTOR}.megatron.context_parallel_size=2", MEGATRON, TWO_RANKS),
    (f"{ACTOR}.megatron.dynamic_context_parallel=true", MEGATRON),
    (f"{ACTOR}.megatron.use_megatron_fsdp=true", MEGATRON),
    (AUTO, MEGATRON, "tree.memory_gib=4"),
    (POLICY["IMAGES"], MEGATRON),
    ("actor_rollout_ref.model.tiled_mlp.enabled=true", MEGATRON),
    (f"{MODEL}.enable_activation_offload=true", MEGATRON),
    ("model.use_fused_kernels=true",),
    (f"{REPLAY}=R2", FLAT),
    (f"{REPLAY}=R3", f"{RETURNED}=true"),
    (f"{REPLAY}=R2", f"{CORRECTION}.bypass_mode=true"),
    (f"{RETURNED}=true", f"{REPLAY}=R2"),
    (f"{RETURNED}=false", f"{REPLAY}=R3", GPU),
    ("tree.route_conflicts=fork",),
    (f"{ACTOR}.calculate_sum_pi_squared=true",),
    (f"{TOP_K}=forward_kl_topk", DISTILS, TEAM, TWO_RANKS),
    (f"{TOP_K}=forward_kl_topk", DISTILS, FLAT),
    (f"{ACTOR}.use_kl_loss=true", DISTILS),
    ("algorithm.use_kl_in_reward=true", DISTILS),
    ("actor_rollout_ref.hybrid_engine=false", DISTILS, SEPARATE),
    ("distillation.teacher_models.teacher_model.model_path=IMAGES", "distillation.enabled=false"),
    (f"{ROLLOUT}.calculate_log_probs=false", f"{CORRECTION}.rollout_is=token"),
    (f"{LOSS}=gspo", f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_rs=token_k1"),
    (f"{ROLLOUT}.name=sglang",),
    (f"{ROLLOUT}.quantization=fp8",),
    (f"{ROLLOUT}.enable_sleep_mode=true",),
    (f"{ROLLOUT}.free_cache_engine=true",),
    (f"{ROLLOUT}.full_determinism=true",),
    (f"{ROLLOUT}.dtype=float16", POLICY["LINEAR"]),
    (POLICY["NESTED"], f"{ROLLOUT}.dtype=bfloat16"),
    ("actor_rollout_ref.hybrid_engine=false", "trainer.v1.trainer_mode=colocate_async"),
    (f"{ROLLOUT}.checkpoint_engine.backend=naive", SEPARATE),
    ("reward.reward_model.enable_resource_pool=false", "reward.reward_model.enable=true", SEPARATE),
)
"""For each clash the setting that is refused, then those with which it is. The configuration is that of a CPU."""
CASES = [case for case in zip(CLASHES, EXAMPLES, strict=True) if case[1] is not None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, settings in TYPES.items():
        write_model(folder / name, **settings)
    return folder


@pytest.mark.parametrize(("clash", "example"), CASES, ids=lambda each: "" if isinstance(each, tuple) else each.feature)
def test_a_clash_is_refused_with_value_key_and_remedy(clash: Clash, example: tuple[str, ...], folder: Path) -> None:
    overrides = [re.sub("=([A-Z]{6,})$", rf"={folder}/\1", each) for each in example]
    config = (resolved_sft if clashes.SFT in clash.others else resolved)(*overrides)
    others = [next(settings_of(name, config)) for name in clash.others]
    key, _, value = overrides[0].partition("=")
    shown = {"true": "True", "false": "False", "null": "None", "{p: 1}": "{'p': 1}"}
    setting = f"{key}={shown.get(value, value)}"
    messages = [each.message for each in check_clashes(config)]
    (message,) = [each for each in messages if each.endswith(f"{clash.why}; {clash.remedy}")]
    assert message.startswith(setting)
    assert f": with {' and '.join(others)}, {clash.why}; " in message


def test_it_takes_all_features_of_a_clash() -> None:
    for clash in CLASHES:
        used = {name: f"a setting of {name}" for name in (clash.feature, *clash.others)}
        with pytest.raises(ValueError, match=re.escape(clash.remedy)):
            refuse(used)
        for name in used:
            refuse({each: setting for each, setting in used.items() if each != name})


def test_layers_without_an_mlp_are_refused_when_they_are_to_be_tiled() -> None:
    model = tiny_model("qwen3 moe", mlp_only_layers=[])
    with pytest.raises(ValueError, match=r"num_shards=2: with Qwen3MoeForCausalLM, there is nothing to cut"):
        tile_modules(model, num_tiles=2)


def test_a_clash_stands_in_no_second_file() -> None:
    folders = (ROOT / room for room in ("verl_tree", "rollout_hooks"))
    paths = [path for folder in folders for kind in ("csv", "py") for path in folder.rglob(f"*.{kind}")]
    texts = {path: path.read_text() for path in paths}
    for clash in CLASHES:
        assert [path.name for path, text in texts.items() if clash.why in text] == ["clashes.csv"], clash.why


def test_every_feature_is_a_word_or_a_key_that_exists() -> None:
    """That layers have no MLP is found when a model is built; `save_lora_only` is added with a plus."""
    names = {name for clash in CLASHES for name in (clash.feature, *clash.others)}
    assert set(WORDS) < names
    assert {value for name, value in vars(clashes).items() if name.isupper() and isinstance(value, str)} <= names
    configs = (
        resolved(CRITIC, "critic.checkpoint.save_lora_only=false"),
        resolved(VEOMNI, CRITIC),
        resolved(MEGATRON),
        resolved_sft(),
    )
    for name in names - {*WORDS, clashes.NO_MLP}:
        key = re.split("!?=", name.removeprefix("no "))[0]
        assert any(list(settings_of(f"{key}!=nonsense", config)) for config in configs), name


def test_defaults_have_no_clash_and_words_that_go_together_pass(folder: Path) -> None:
    assert check_clashes in CHECKS
    assert not list(find(resolved()))
    assert not list(check_clashes(resolved_sft()))
    validate(resolved("tree.capacity=auto", "tree.memory_gib=4"))
    validate(resolved(f"{ROLLOUT}.dtype=bfloat16", f"{MODEL}.path={folder}/LINEAR"))
    routes = [f"{REPLAY}=R3", f"{RETURNED}=true", GPU]
    assert not list(check_clashes(resolved(*routes)))


def test_kernels_run_on_a_cpu_where_they_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not list(check_clashes(resolved("tree.backend=triton")))
    assert list(check_clashes(resolved("tree.backend=fa4")))


def test_the_table_of_the_page_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "make_clashes.py", "--check"], check=True, timeout=60)
