"""Shared parts of the tests of the recipes: one task of the demo, a model that solves it, and checks of `prepare`."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
import pytest
from loop_cases import call
from omegaconf import OmegaConf
from scripted_llm import ScriptedClient, run_loop, tokenizer
from scripted_llm import row as dataset_row

from recipes.demo.settings import Settings, WarmStartSettings
from recipes.demo.tasks import Part, Task
from recipes.demo.tools import Calculator, LookupMemory, make_tools, write_memory
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree

ROOT = Path(__file__).parents[2]
RECIPES = (
    "arithmetic_tools",
    "blackbox_openai_agent",
    "calculator",
    "coding_agent",
    "gsm8k",
    "memory_qa",
    "multi_turn_thinking",
    "sums",
    "textworld",
    "tree_search_reasoning",
)
TASK = Task(
    parts=(
        Part(shown="84 + 23", expression="84 + 23", answer="107", key=None),
        Part(shown="k41 - 17", expression="53 - 17", answer="36", key="k41"),
    )
)
BOTH_CALLS = call("calculator", expression="84 + 23") + "\n" + call("lookup", key="k41")
LAST_CALL = call("calculator", expression="53 - 17")
ANSWER = "<answer>107 36</answer>"
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}
TINY = WarmStartSettings(num_skilled_steps=1, num_mixed_steps=1, num_sessions=2, hidden_size=32, head_dim=16)

Prepare = Callable[..., Path]


def task_tools(folder: Path) -> tuple[Calculator, LookupMemory]:
    """Make the real tools. The memory is a file in `folder` and has what `TASK` needs."""
    write_memory(folder / "memory.sqlite", memory={"k41": 53, "k10": 99})
    return make_tools(folder / "memory.sqlite")


def right(prompt: str) -> str:
    """Answer as a scripted model that does everything right."""
    has_sum, has_stored = "[84 + 23 = 107]" in prompt, "[k41 = 53]" in prompt
    if "[53 - 17 = 36]" in prompt:
        return ANSWER
    if has_sum and has_stored:
        return LAST_CALL
    if has_sum:
        return "Partial result: 107"
    return "Partial result: 53" if has_stored else BOTH_CALLS


def instead(said: str, wrong: str) -> Callable[[str], str]:
    """Make the same model, but it says `wrong` instead of `said`."""
    return lambda prompt: wrong if right(prompt) == said else right(prompt)


def loop_of(recipe: str, name: str) -> dict[str, Any]:
    """Read an entry of a recipe's ``loops.yaml``."""
    entries = OmegaConf.to_container(OmegaConf.load(ROOT / "recipes" / recipe / "loops.yaml"))
    (entry,) = (entry for entry in entries if entry["name"] == name)
    return entry


def play(
    entry: dict[str, Any], reply: Any, *, tools: Any = (), extra_info: Any = None, **rollout: Any
) -> tuple[list, ScriptedClient]:
    """Make the loop of a configuration entry as verl's worker does, and run it on `TASK`."""

    def make(**kwargs: Any) -> Any:
        reward = OmegaConf.load(ROOT / "recipes/tree_search_reasoning/configs/tree_search_reasoning.yaml").reward
        kwargs["trainer_config"].config.reward.custom_reward_function = reward.custom_reward_function
        loop = hydra.utils.instantiate(config=OmegaConf.create(entry), **kwargs)
        if tools:
            loop.tools = {tool.name: tool for tool in tools}
        return loop

    client = ScriptedClient(reply)
    row = dataset_row(
        raw_prompt=TASK.messages,
        data_source="arithmetic_tools",
        reward_model={"ground_truth": TASK.answer},
        extra_info=extra_info,
    )
    limits = {"prompt_length": 1024, "response_length": 1024, "multi_turn__max_assistant_turns": 4, **rollout}
    recording = RecordingClient(client, tree=SessionTree(decode=tokenizer().decode))
    return run_loop(make, recording, SAMPLING, row=row, **limits), client


def check_prepared(prepare: Prepare, cache_dir: Path, *, settings: Settings, first: Any) -> tuple[Path, pd.DataFrame]:
    """Prepare few tasks and a tiny model twice, and return the folder and its training rows.

    The second call must make nothing, and `first` must be the first task.
    """
    settings = replace(settings, num_train_tasks=8, num_validation_tasks=4, warm_start=TINY)
    folder = prepare(cache_dir, settings=settings)
    assert prepare(cache_dir, settings=settings) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    rows = pd.read_parquet(folder / "train.parquet")
    assert len(rows) == 8
    assert len(pd.read_parquet(folder / "validation.parquet")) == 4
    assert rows.reward_model[0]["ground_truth"] == first.answer
    return folder, rows


def check_given_model(prepare: Prepare, cache_dir: Path, *, model: Path, settings: Settings) -> Path:
    """Prepare with a given model folder and return the prepared folder; no model is made, and refusals are clear."""
    settings = replace(settings, num_train_tasks=8, num_validation_tasks=4, warm_start=None)
    with pytest.raises(ValueError, match=r"config\.json"):
        prepare(cache_dir, settings=settings, model=cache_dir)
    with pytest.raises(ValueError, match="warm_start=None"):
        prepare(cache_dir, settings=settings)
    folder = prepare(cache_dir, settings=settings, model=model)
    assert (folder / "model/config.json").resolve() == (model / "config.json").resolve()
    return folder
