"""What is not there, or no text, is refused before Ray starts: data, models, folders."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from input_cases import refusal, resolved, write_model, write_rows

from recipes.demo.tokenizer import build_tokenizer
from verl_tree.launch.checks import find, find_before_the_queue, validate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model.path"
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


def test_missing_data_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here, missing = write_rows(tmp_path / "rows.parquet"), tmp_path / "typo.parquet"
    for good in (here, f"[{here},{here}]", "rows.parquet", "ro*.parquet", "hdfs://x/y.parquet", "s3://x/y.parquet"):
        validate(resolved(f"data.train_files={good}", f"data.val_files={good}"))
    assert f"data.train_files={missing}: no such file: {missing}" in refusal(f"data.train_files={missing}")
    assert f"no such file: {missing}" in refusal(f"data.val_files=[{here},{missing}]")
    assert f"data.val_files=rows.json: no such file in {tmp_path}" in refusal("data.val_files=rows.json")
    assert "data.val_files=None: names no file" in refusal("data.val_files=null")
    (tmp_path / "mine.py").write_text("class Rows: ...\n")
    validate(resolved(f"data.train_files={missing}", "data.custom_cls.path=mine.py", "data.custom_cls.name=Rows"))


def test_tilde_is_written_out_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither datasets nor transformers expand it, so a folder that exists would not be found either."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "rows.parquet")
    write_model(tmp_path / "model")
    message = refusal("data.train_files=~/rows.parquet")
    assert f"data.train_files=~/rows.parquet: ~ is not expanded; give {tmp_path}/rows.parquet" in message
    assert f"{MODEL}=~/model: ~ is not expanded; give {tmp_path}/model" in refusal(f"{MODEL}=~/model")


@pytest.mark.parametrize("key", [MODEL, "critic.model.path"])
def test_missing_model_is_refused(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    write_model(tmp_path / "good")
    (tmp_path / "empty").mkdir()
    for good in ("good", f"{tmp_path}/good", "Qwen/Qwen3-0.6B", "gpt2", "hdfs://x/y"):
        validate(resolved("critic.enable=true", f"{key}={good}"))
    for missing in (f"{tmp_path}/typo", "./typo", "../typo", "a/b/typo"):
        message = refusal("critic.enable=true", f"{key}={missing}")
        assert f"{key}={missing}: no such folder" in message
        assert "owner/model" in message
    assert f"{key}=empty: the folder has no config.json" in refusal("critic.enable=true", f"{key}=empty")
    assert f"{key}=good/: " in refusal("critic.enable=true", f"{key}=good/")


def test_model_of_a_critic_that_is_not_used_may_be_missing() -> None:
    validate(resolved("critic.enable=false", "critic.model.path=/no/such/folder"))


def test_hub_model_that_is_not_cached_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert f"{MODEL}=owner/model: no such folder, and HF_HUB_OFFLINE is set" in refusal(f"{MODEL}=owner/model")
    revision = tmp_path / "models--owner--model" / "refs" / "main"
    revision.parent.mkdir(parents=True)
    revision.write_text("0" * 40)
    write_model(tmp_path / "models--owner--model" / "snapshots" / ("0" * 40))
    validate(resolved(f"{MODEL}=owner/model"))


@pytest.mark.parametrize("tower", ["vision_config", "audio_config"])
def test_multimodal_model_is_refused(tmp_path: Path, tower: str) -> None:
    assert tower in refusal(f"{MODEL}={write_model(tmp_path, **{tower: {}})}")
    validate(resolved(f"{MODEL}={write_model(tmp_path)}"))


def test_hybrids_are_served_on_text_rows_by_one_rank(tmp_path: Path) -> None:
    """Every published checkpoint of Qwen3.5 has a vision tower."""
    model = f"{MODEL}={write_model(tmp_path, model_type='qwen3_5', vision_config={})}"
    validate(resolved(model))
    team = ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"]
    assert "(qwen3_5), one rank computes recurrent layers alone" in refusal(model, *team)


@pytest.mark.parametrize(
    ("model_type", "title"),
    [
        ("qwen3_next", "Qwen3-Next"),
        ("qwen3_5_text", "Qwen3.5"),
        ("qwen3_5_moe_text", "Qwen3.5-MoE"),
        ("olmo_hybrid", "OLMo-Hybrid"),
        ("lfm2", "LFM2"),
        ("lfm2_moe", "LFM2-MoE"),
        ("granitemoehybrid", "Granite-4 hybrid"),
    ],
)
def test_one_rank_computes_models_with_a_recurrent_layer(
    tmp_path: Path, model_type: str, title: str, record_property: Callable[[str, object], None]
) -> None:
    """Some Granite-4 have the class of hybrids, but attention only."""
    team = ["tree.relay=never", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"]
    model = write_model(tmp_path, model_type=model_type, layer_types=["mamba", "attention"])
    assert f"({model_type}), one rank computes recurrent layers alone; set 1" in refusal(f"{MODEL}={model}", *team)
    validate(resolved(f"{MODEL}={write_model(tmp_path, model_type=model_type, layer_types=['attention'])}", *team))
    record_property(f"{title} | Ulysses", "refused")


def test_multimodal_rows_are_refused(tmp_path: Path) -> None:
    text, images = write_rows(tmp_path / "text.parquet"), write_rows(tmp_path / "images.parquet", "images")
    validate(resolved(f"data.train_files={text}", f"data.val_files=[{text}]"))
    message = refusal(f"data.train_files={text}", f"data.val_files=[{text},{images}]")
    assert message.startswith(f"data.image_key=images: {images}")


def test_folder_of_trees_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/trees"):
        assert f"tree.dump_dir={tmp_path}/{name}: {tmp_path}/file is a file" in refusal(
            f"tree.dump_dir={tmp_path}/{name}"
        )
    assert "tree.dump_dir=s3://x/trees: this must be a local folder" in refusal("tree.dump_dir=s3://x/trees")
    # Where not even root may write.
    for key in ("tree.dump_dir", "trainer.default_local_dir"):
        assert f"{key}=/proc/nope: /proc cannot be written to (No such file" in refusal(f"{key}=/proc/nope")
    validate(resolved(f"tree.dump_dir={tmp_path}/a/b"))
    assert not (tmp_path / "a").exists(), "a check makes nothing"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_of_trees_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert f"{tmp_path} cannot be written to" in refusal(f"tree.dump_dir={tmp_path}/trees")


ELSEWHERE = ["trainer.nnodes=2", "+ray_kwargs.ray_init.address=auto", "RAY_ADDRESS"]


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_missing_files_are_warned_of_where_other_machines_may_have_them(
    elsewhere: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = ["data.train_files=/no/rows.parquet", f"{MODEL}=/no/model", f"{LOOPS}=/no/loops.yaml"]
    if elsewhere == "RAY_ADDRESS":
        monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    overrides = [elsewhere] if "=" in elsewhere else []
    with caplog.at_level(logging.WARNING):
        validate(resolved(*overrides, *missing))
    for each in missing:
        assert f"{each}: no such" in caplog.text


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "olmo_hybrid", "granitemoehybrid", "gemma3_text"])
def test_a_critic_without_a_token_classifier_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    model = f"critic.model.path={write_model(tmp_path, model_type=model_type)}"
    for flat in ([], ["tree.enabled=false"]):
        message = refusal(model, "critic.enable=true", *flat)
        assert f"critic.enable=True: with {model} ({model_type}) and " in message
        assert "has no token classifier for its type; give a model of another type" in message
    validate(resolved(model))
    own = {"AutoModelForTokenClassification": "code.Critic"}
    write_model(tmp_path, model_type=model_type, auto_map=own)
    validate(resolved(model, "critic.enable=true"))


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_next", "qwen3_moe", "llama", "a_type_of_the_user"])
def test_other_critics_are_served(model_type: str, tmp_path: Path) -> None:
    validate(resolved(f"critic.model.path={write_model(tmp_path, model_type=model_type)}", "critic.enable=true"))


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    weights = model / "model.safetensors"
    for name in ("model-00001-of-00002.safetensors", "pytorch_model.bin", "model.safetensors.index.json"):
        weights = weights.rename(tmp_path / name)
        validate(resolved(f"{MODEL}={model}"))
    weights.unlink()
    assert f"{MODEL}={model}: the folder has no weights (*.safetensors or *.bin)" in refusal(f"{MODEL}={model}")


def test_what_a_run_lacks_is_warned_of_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop is asked about a run on GPUs."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model, rows = write_model(tmp_path), write_rows(tmp_path / "rows.parquet", num_rows=1)
    (model / "model.safetensors").unlink()
    given = ["trainer.device=cuda", f"{MODEL}={model}", f"data.train_files={rows}", f"{ROLLOUT}.free_cache_engine=true"]
    found = [
        each
        for each in find_before_the_queue(resolved(*given))
        if "no weights" in each.message or "one batch" in each.message
    ]
    assert [each.is_warning for each in found] == [True, True]


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text("{}")
    message = refusal(f"{MODEL}={model}")
    assert message.startswith(f"{MODEL}={model}: its tokenizer has no chat template; give actor_rollout_ref.model.cus")
    assert "add chat_template.jinja" in message
    validate(resolved(f"{MODEL}={model}", "actor_rollout_ref.model.custom_chat_template=a"))
    other = write_model(tmp_path / "other")
    (other / "tokenizer_config.json").write_text('{"chat_template": "a"}')
    tokenizer = "actor_rollout_ref.model.tokenizer_path"
    validate(resolved(f"{MODEL}={other}"))
    validate(resolved(f"{MODEL}={model}", f"{tokenizer}={other}"))
    assert refusal(f"{MODEL}={other}", f"{tokenizer}={model}").startswith(f"{tokenizer}={model}: its tokenizer")
    (model / "chat_template.jinja").write_text("a")
    validate(resolved(f"{MODEL}={model}"))


def test_a_batch_that_is_larger_than_the_data_is_refused(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.parquet", num_rows=8)
    batch, files = ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=8"], f"data.train_files={rows}"
    message = refusal(*batch, files)
    assert message.startswith("data.train_batch_size=16: data.train_files have 8 rows, fewer than one batch; lower it")
    validate(resolved(*batch, f"data.train_files=[{rows},{rows}]"))
    most = "data.train_max_samples=15"
    assert f"have {most} rows" in refusal(*batch, f"data.train_files=[{rows},{rows}]", most)
    validate(resolved(*batch, "data.train_files=s3://x/rows.parquet"))


def test_prompts_that_are_cut_are_warned_of(tmp_path: Path) -> None:
    model, rows = write_model(tmp_path / "model"), write_rows(tmp_path / "rows.parquet", num_rows=300)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False)
    limit = len(tokenizer.encode(text)) - 1
    given = [
        f"{MODEL}={model}",
        f"data.train_files={rows}",
        "data.train_batch_size=1",
        f"{ACTOR}.ppo_mini_batch_size=1",
    ]
    (finding,) = find(resolved(*given, f"data.max_prompt_length={limit}"))
    assert finding.is_warning
    assert finding.message.startswith(f"data.max_prompt_length={limit}: 200 of the first 200 prompts of {rows} are")
    assert f"up to {limit + 1} tokens" in finding.message
    assert "data.filter_overlong_prompts=true" in finding.message
    for silent in (f"data.max_prompt_length={limit + 1}", "data.filter_overlong_prompts=true"):
        assert not list(find(resolved(*given, silent)))
    loops = tmp_path / "loops.yaml"
    for target, is_cut in (("memory.Memory", False), ("tree_search.TreeSearch", True), ("blackbox.Blackbox", False)):
        loops.write_text(f"- name: mine\n  _target_: rollout_hooks.loops.{target}AgentLoop\n  agent: asyncio:sleep\n")
        mine = [f"{LOOPS}={loops}", "actor_rollout_ref.rollout.agent.default_agent_loop=mine"]
        found = [each.message for each in find(resolved(*given, *mine, f"data.max_prompt_length={limit}"))]
        assert [message for message in found if "prompts of" in message] == [finding.message] * is_cut
