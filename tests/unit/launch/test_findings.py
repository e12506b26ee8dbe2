"""What the checks find in a configuration stands in findings.csv: settings, and the words of the message.

A row is the CPU configuration with these settings (`sft`: that of fine-tuning): refused, warned of, or fine. There is
no other finding; beside a refusal there may be warnings. Of each message (` && `) there are the words that it begins
with, then others that it has (` | `). `check` finds the first; tables of values have no names. ACTOR, ROLLOUT and MODEL
are verl's groups, SEPARATE a mode with all that it needs. FOLDER has the files below; it is the working directory, the
home and a place of modules.
"""

import csv
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from input_cases import resolved, resolved_sft, write_model, write_rows

from verl_tree.launch.checks import CHECKS, find
from verl_tree.launch.checks.choices import CHOICES
from verl_tree.launch.checks.modes import check_checkpoint_engine
from verl_tree.launch.checks.values import RANGES
from verl_tree.sft.checks import find as find_sft

TABLE = list(csv.DictReader(Path(__file__).with_name("findings.csv").read_text().splitlines(), strict=True))
NAMED = {check.__name__: check for check in CHECKS if check not in CHOICES}

ELSEWHERE = {
    *("check_attention", "check_checkpoints", "check_chosen_checkpoint", "check_device", "check_owner_of_trees"),
    *("check_prompt_lens", "check_prompts", "check_secrets", "check_update_memory"),
}
"""Checks whose tests need rows that are drawn, a checkpoint, or another machine."""

SEPARATE = (
    "trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2 data.train_batch_size=8 "
    "ACTOR.ppo_mini_batch_size=4 ROLLOUT.nnodes=1 ROLLOUT.n_gpus_per_node=1 ray_kwargs.ray_init.num_gpus=2 "
    "ROLLOUT.checkpoint_engine.backend=mine ROLLOUT.checkpoint_engine.custom_backend_module=json"
)
SHORT = {name: f"actor_rollout_ref.{name.lower()}" for name in ("ACTOR", "ROLLOUT", "MODEL")}
VISION = {"vision_config": {}}
MODELS = {
    "vision": VISION,
    "audio": {"audio_config": {}},
    **{name: VISION | {"model_type": name} for name in ("qwen2_vl", "qwen3_vl", "gemma3", "qwen3_5")},
    "own_classifier": {"model_type": "lfm2", "auto_map": {"AutoModelForTokenClassification": "code.Critic"}},
    **{name: {"model_type": name} for name in ("qwen3_5_text", "lfm2", "olmo_hybrid", "granitemoehybrid")},
    **{name: {"model_type": name} for name in ("gemma3_text", "qwen3_next", "qwen3_moe", "llama", "of_the_user")},
    "heads_8_2": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "heads_8": {"num_attention_heads": 8},
    "heads_6": {"text_config": {"num_attention_heads": 6}},
    "layers_6": {"num_hidden_layers": 6},
    "experts_8": {"num_experts": 8},
    "heads_24_6": {"num_attention_heads": 24, "num_key_value_heads": 6},
    "heads_unknown": {"n_head": 3},  # another family, whose layers say so when they run
    **{
        name: {}
        for name in (
            "speaks",
            "speaks_more",
            "speaks_other",
            "model",
            "no_weights",
            "many_files",
            "bin",
            "index",
            "no_template",
            "template",
            "jinja",
        )
    },
}
WEIGHTS = {
    "many_files": "model-00001-of-00002.safetensors",
    "bin": "pytorch_model.bin",
    "index": "model.safetensors.index.json",
}
MEMORY = "_target_: rollout_hooks.loops.memory.MemoryAgentLoop"
TARGETS = (
    "my_loops.MyLoop",
    "my_rewinding.Retry",
    "my_loops.MyLoop.Nested",
    "my_package.loops.MyLoop",
    "my_folder.loops.MyLoop",
)
MISSING = ("my_lops.MyLoop", "my_package.sub.MyLoop", "my_folder.sub.MyLoop", "my_broken.loops.MyLoop", "MyLoop")
ROUTER = "router_class: rollout_hooks.capture.prompt_router.PromptRouter"
ROUTERS = {"fine": "max_ratio: 2\nmax_lead: 0", "below": "max_ratio: .5\nmax_lead: 8", "lacks": "max_ratio: 2"}
TEXTS = {
    "a_file": "",
    "no_template/tokenizer_config.json": "{}",
    "jinja/tokenizer_config.json": "{}",
    "speaks/tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 1}}}',
    "speaks_more/tokenizer.json": (
        '{"model": {"vocab": [["a", 0.5], ["b", 0.1]]}, "added_tokens": [{"content": "<think>", "id": 3}]}'
    ),
    "speaks_other/tokenizer.json": '{"model": {"vocab": {"a": 0, "b": 2}}}',
    "jinja/chat_template.jinja": "a",
    "template/tokenizer_config.json": '{"chat_template": "a"}',
    # The modules of the user's are not run: what they need may be in the environment of Ray's processes only.
    "mine.py": "import os\nSCALE = os.environ['ONLY_IN_RAY']\ndef graded(): ...\nclass Rows: ...\n",
    "my_loops.py": "import os\nMEMORY = os.environ['ONLY_IN_RAY']\nclass MyLoop: ...\n",
    "my_tools_with_state.py": (
        "from verl.tools.base_tool import BaseTool\n"
        "class Plain(BaseTool):\n    async def execute(self, *_): ...\n"
        "class Shell(BaseTool):\n    async def create(self, *_): ...\n"
        "class Bash(Shell): ...\n"
        "class Checked(Shell):\n    keeps_state = False\n"
        "class Forking(Shell):\n    async def snapshot(self, *_): ...\n    async def fork(self, *_): ...\n"
    ),
    "my_rewinding.py": (
        "from rollout_hooks.loops.tool_turns import ToolTurnsLoop\n"
        "class Retry(ToolTurnsLoop):\n    async def run_branches(self, root, **row):\n        root.rewind(3)\n"
    ),
    "my_package/__init__.py": "",
    "my_package/loops.py": "class MyLoop: ...\n",
    "my_folder/loops.py": "class MyLoop: ...\n",
    "pigeon_engine.py": "raise RuntimeError('imported')",
    "my_broken/__init__.py": "import no_such_dependency\n",
    "their_manager.py": (
        "from verl.experimental.agent_loop.agent_loop import AgentLoopManager, register\n"
        "@register('theirs')\nclass Loop: ...\nclass Manager(AgentLoopManager): ...\nclass Adapter: ...\n"
    ),
    "loops/memory.yaml": f"- name: mine\n  {MEMORY}\n",
    "loops/tool_agent.yaml": f"- name: tool_agent\n  {MEMORY}\n",
    "loops/empty.yaml": "",
    "loops/no_list.yaml": f"name: mine\n{MEMORY}\n",
    "loops/no_name.yaml": f"- {MEMORY}\n",
    "loops/no_target.yaml": f"- name: mine\n  {MEMORY}\n- name: other\n",
    "loops/words.yaml": "- mine\n",
    "loops/no_yaml.yaml": "- name: [\n",
    **{f"loops/{target}.yaml": f"- name: mine\n  _target_: {target}\n" for target in (*TARGETS, *MISSING)},
    "routers/theirs.yaml": "router_class: thier_router.Router",
    **{f"routers/{name}.yaml": f"{ROUTER}\n{rest}" for name, rest in ROUTERS.items()},
    "tools/good.yaml": "tools: [class_name: json.JSONDecoder]",
    "tools/no_tools.yaml": "- class_name: json.JSONDecoder",
    "tools/no_yaml.yaml": "tools: [",
    "tools/words.yaml": "calculator",
    "tools/no_class.yaml": "tools: [config: {type: native}]",
    "tools/gone.yaml": "tools: [class_name: verl.tools.gsm8k_tool.Gsm8kTool]",  # of verl's earlier GSM8K examples
    "tools/unknown.yaml": "tools: [class_name: my_tools.Gsm8kTool]",
    **{
        f"tools/{name}.yaml": f"tools: [class_name: my_tools_with_state.{name}]"
        for name in ("Plain", "Shell", "Bash", "Checked", "Forking")
    },
    "tools/no_module.yaml": "tools: [class_name: Gsm8kTool]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings")
    for name, settings in MODELS.items():
        write_model(folder / name, **settings)
    (folder / "no_weights/model.safetensors").unlink()
    for name, weights in WEIGHTS.items():
        (folder / name / "model.safetensors").rename(folder / name / weights)
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    write_rows(folder / "eight.parquet", num_rows=8)
    for name in ("rows", "images", "videos", "audios"):
        write_rows(folder / f"{name}.parquet", *([name] if name != "rows" else []))
    messages = [{"role": "user", "content": "a"}]
    for name, loop in (("named", "mine"), ("misnamed", "tool_agnt")):
        rows = pyarrow.table({"prompt": [messages] * 2, "agent_name": ["tool_agent", loop]})
        pyarrow.parquet.write_table(rows, folder / f"{name}.parquet")
    return folder


def written_out(text: str, folder: Path) -> str:
    for short, full in {"SEPARATE": SEPARATE, **SHORT, "FOLDER": str(folder)}.items():
        text = text.replace(short, full)
    return text


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["settings"])
def test_what_is_found(row: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message begins with a key, so a user hears first where to look, and says what to do."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    settings, words = (written_out(row[name], folder) for name in ("settings", "words"))
    kind, _, is_sft = row["kind"].partition(" ")
    messages = words.split(" && ") if words else []
    config = (resolved_sft if is_sft else resolved)(*settings.split())
    found = list((find_sft if is_sft else find)(config))
    of_kind = [each for each in found if kind != "refused" or not each.is_warning]
    assert [each.is_warning for each in of_kind] == [kind == "warned"] * len(messages), found
    assert not (folder / "a").exists(), "a check makes nothing"
    assert bool(messages) == (kind != "fine")
    if row["check"]:
        assert of_kind[0] in list(NAMED[row["check"]](config))
    for finding, message in zip(of_kind, messages, strict=True):
        begin, *parts = message.split(" | ")
        assert finding.message.startswith(begin)
        assert all(part in finding.message for part in parts), finding


def test_every_check_has_a_row() -> None:
    assert {row["check"] for row in TABLE} - {""} == NAMED.keys() - ELSEWHERE
    for table in (RANGES, CHOICES):
        assert len({each.key for each in table}) == len(table)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks about GPUs from a machine without one")
def test_an_engine_for_gpus_is_only_warned_of_where_there_are_none(folder: Path) -> None:
    engine = "ROLLOUT.checkpoint_engine.backend=pigeon ROLLOUT.checkpoint_engine.custom_backend_module=null"
    config = resolved(*written_out(f"SEPARATE {engine} trainer.device=cuda", folder).split())
    (finding,) = check_checkpoint_engine(config)
    assert finding.is_warning
    assert "checkpoint_engine.backend=pigeon" in finding.message
    assert "no CUDA device" in finding.message
