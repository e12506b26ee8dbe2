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


def test_hub_model_that_is_not_cached_is_refused_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert f"{MODEL}=owner/model: no such folder, and HF_HUB_OFFLINE is set" in refusal(f"{MODEL}=owner/model")
    revision = tmp_path / "models--owner--model" / "refs" / "main"
    revision.parent.mkdir(parents=True)
    revision.write_text("0" * 40)
    write_model(tmp_path / "models--owner--model" / "snapshots" / ("0" * 40))
    validate(resolved(f"{MODEL}=owner/model"))


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
    own = f"actor_rollout_ref.rollout.prompt_length={limit}"
    assert [each.message.split(": ")[0] for each in find(resolved(*given, own))] == [own]
    for silent in (f"data.max_prompt_length={limit + 1}", "data.filter_overlong_prompts=true"):
        assert not list(find(resolved(*given, silent)))
    loops = tmp_path / "loops.yaml"
    for target, is_cut in (("memory.Memory", False), ("tree_search.TreeSearch", True), ("blackbox.Blackbox", False)):
        loops.write_text(f"- name: mine\n  _target_: rollout_hooks.loops.{target}AgentLoop\n  agent: asyncio:sleep\n")
        mine = [f"{LOOPS}={loops}", "actor_rollout_ref.rollout.agent.default_agent_loop=mine"]
        found = [each.message for each in find(resolved(*given, *mine, f"data.max_prompt_length={limit}"))]
        assert [message for message in found if "prompts of" in message] == [finding.message] * is_cut
