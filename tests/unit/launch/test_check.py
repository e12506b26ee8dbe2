"""`verl_tree.check`: all findings about a command at once, its translations, its capacity, and what will run where."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from input_cases import write_model, write_rows

from verl_tree.check import main, report

ROOT = Path(__file__).parents[3]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def arguments(folder: Path, *overrides: str) -> list[str]:
    """Return a command for 2 x 8 GPUs with a model and data that exist."""
    rows, model = write_rows(folder / "rows.parquet"), write_model(folder / "model")
    paths = [f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={model}"]
    return ["profile=gpu", *paths, "trainer.nnodes=2", f"{ROLLOUT}.n=4", *overrides]


def test_a_command_that_can_run(tmp_path: Path) -> None:
    is_valid, text = report(
        arguments(
            tmp_path,
            f"{ACTOR}.strategy=fsdp2",
            f"{ACTOR}.use_kl_loss=true",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            "data.max_response_length=900",
        )
    )
    assert is_valid, text
    blocks = {block.splitlines()[0]: block.splitlines()[1:] for block in text.split("\n\n")}
    assert list(blocks)[:3] == ["Translated", "Capacity", "What runs where"]
    assert blocks["Translated"] == [
        f"  {role}.strategy=fsdp2: runs as fsdp_tree: FSDP2 on trees" for role in (ACTOR, "actor_rollout_ref.ref")
    ]
    named = "1412 tokens (data.max_prompt_length=512 + data.max_response_length=900)"
    assert blocks["Capacity"][:2] == [
        f"  longest trajectory: {named}",
        f"  {ACTOR}.ppo_max_token_len_per_gpu=1000: the longest trajectory is longer, so it is relayed in sections",
    ]
    assert blocks["What runs where"] == [
        "  trainer: sync, 2 x 8 ranks (nodes x devices), cuda",
        f"  actor: fsdp_tree, {tmp_path}/model",
        "  reference: fsdp_tree",
        "  critic: none",
        "  rollout: vllm, 8 x 2 ranks (replicas x size), the trainer's",
        "  agents: default single_turn_agent, num_workers=8",
        "  reward: verl's function for the data source, manager naive, num_workers=8",
        "  step: 1024 x 4 sessions (prompts x n), mini-batches of 256 prompts, ppo_epochs=1",
        "  update: computes all rows (actor.use_kl_loss=True)",
        "  objective: advantages tree_grpo, loss vanilla, token-mean, session_weight=leaf",
    ]


@pytest.mark.parametrize("num_nodes", [0, 2])
def test_where_the_teacher_is(tmp_path: Path, num_nodes: int) -> None:
    """On the training ranks it takes the place of the reference model; servers have ranks of their own."""
    teacher = write_model(tmp_path / "teacher")
    key = "distillation.teacher_models.teacher_model.model_path"
    settings = ("distillation.enabled=true", f"{key}={teacher}", f"distillation.nnodes={num_nodes}")
    is_valid, text = report(arguments(tmp_path, *settings))
    assert is_valid, text
    here, servers = f"  teacher: fsdp_tree, {teacher}\n", f"  teachers: {teacher}, 2 x 8 ranks of their own\n"
    assert (here in text, servers in text) == ((True, False) if num_nodes == 0 else (False, True)), text


def test_teams_and_ranks_of_the_rollout(tmp_path: Path) -> None:
    """A limit per GPU is that of one rank of a team: 400 is a quarter of a pass that holds 1,412 tokens."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = write_model(tmp_path / "heads", architectures=["Qwen3ForCausalLM"], **heads)
    is_valid, text = report(
        arguments(
            tmp_path,
            f"actor_rollout_ref.model.path={model}",
            f"{ACTOR}.ulysses_sequence_parallel_size=4",
            f"{ACTOR}.ppo_max_token_len_per_gpu=400",
            f"{ROLLOUT}.log_prob_max_token_len_per_gpu=350",
            "data.max_response_length=900",
            "tree.session_weight=session",
            "tree.role_weight={planner: 0.5}",
            "tree.keep_tokens=0.5",
            "trainer.v1.trainer_mode=separate_async",
            "actor_rollout_ref.hybrid_engine=false",
            "data.train_batch_size=512",
            "trainer.v1.separate_async.parameter_sync_step=2",
            f"{ROLLOUT}.nnodes=1",
            f"{ROLLOUT}.n_gpus_per_node=4",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            f"{ROLLOUT}.checkpoint_engine.backend=mine",
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module=json",
            "reward.num_workers=0",
        )
    )
    assert is_valid, text
    lines = [line.strip() for line in text.splitlines()]
    for expected in (
        f"{ACTOR}.ppo_max_token_len_per_gpu=400: 1600 tokens on the 4 ranks of a team; the longest trajectory fits",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=350: 1400 tokens on the 4 ranks of a team; the longest trajectory "
        "is longer, so it is relayed in sections",
        "trainer: separate_async, 2 x 8 ranks (nodes x devices), cuda, 4 x 4 ranks (teams x size) compute each model "
        "call together",
        "rollout: vllm, 2 x 2 ranks (replicas x size), 1 x 4 ranks (nodes x devices) of its own, which get the weights "
        "over mine",
        "reward: that of the agents (reward.num_workers=0)",
        "weight sync: every 2 updates (parameter_sync_step)",
        "update: leaves out rows whose advantages are all 0, and draws 0.5 of the tokens of the others",
        "objective: advantages tree_grpo, loss vanilla, token-mean, session_weight=session, "
        "role_weight={'planner': 0.5}",
    ):
        assert expected in lines


@pytest.mark.parametrize(
    "other",
    [
        ["model_engine=torchtitan"],
        ["model_engine=torchtitan", f"{ACTOR}.torchtitan.no_such_key=1"],
        ["model_engine=mindspeed"],
        ["+model_engine=torchtitan"],
    ],
)
def test_another_engine_is_refused_by_its_name(tmp_path: Path, other: list[str]) -> None:
    """It comes before what Hydra says about its files, which lack keys of FSDP, and its options."""
    is_valid, text = report(arguments(tmp_path, *other))
    assert not is_valid
    (refused,) = text.split("Refused\n")[1].split("\n\n")[0].splitlines()
    engine = other[0].partition("=")[2]
    assert refused.startswith(f"  model_engine={engine}: trees run on dp (FSDP2), veomni (VeOmni), megatron (Megatron)")


def test_all_findings_come_at_once(tmp_path: Path) -> None:
    wrong = ["trainer.use_v1=false", "tree.gate=max", f"{ROLLOUT}.tensor_model_parallel_size=3"]
    is_valid, text = report(arguments(tmp_path, *wrong))
    refused = text.split("Refused\n")[1].splitlines()
    assert not is_valid
    assert [each.strip().partition(":")[0].partition(" ")[0] for each in refused] == [
        "tree.gate='max'",
        "trainer.use_v1=False",
        f"{ROLLOUT}.tensor_model_parallel_size=3",
    ]


def test_ranks_that_cannot_be_shared_are_not_said_to_be(tmp_path: Path) -> None:
    """There is no replica of 32 ranks on 16, and no 5 replicas of 3."""
    for size in (32, 3):
        sizes = (f"{ROLLOUT}.tensor_model_parallel_size={size}", f"{ACTOR}.ulysses_sequence_parallel_size={size}")
        is_valid, text = report(arguments(tmp_path, *sizes))
        assert not is_valid
        lines = [line.strip() for line in text.splitlines()]
        assert f"rollout: vllm, 16 ranks not divisible into replicas of {size}, the trainer's" in lines
        teams = f"16 ranks not divisible into teams of {size} compute each model call together"
        assert f"trainer: sync, 2 x 8 ranks (nodes x devices), cuda, {teams}" in lines


def test_what_verl_refuses_is_found_too(tmp_path: Path) -> None:
    is_valid, text = report(arguments(tmp_path, f"{ACTOR}.loss_agg_mode=median"))
    assert not is_valid
    assert "verl refuses the configuration" in text
    assert "Invalid loss_agg_mode: median" in text


def test_what_cannot_be_composed_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "alone.yaml").write_text("data:\n  train_files: a\n")
    for command, part in (
        (["trainer.typo=1"], "trainer.typo: no such option. One that your own code reads is added with a plus"),
        (["tree.backened=triton"], "tree.backened: no such option; did you mean tree.backend? One that"),
        (["tree.watchdogs.poll_s=1"], "tree.watchdogs.poll_s: no such option; did you mean tree.watchdog.poll_s?"),
        (["trainr.nnodes=1"], "trainr.nnodes: no such option; did you mean trainer.nnodes?"),
        (["trainer.nnodes=1}"], "nnodes=1}"),
        ([f"{ROLLOUT}.multi_turn.interaction_config_path=a"], "interaction_config_path: no such option in verl 0.9.1"),
        ([f"{ROLLOUT}.multi_turn.interactions_config_path=a"], "interactions_config_path: no such option. One that"),
        (
            ["critic.model.fsdp_config.param_offload=true"],
            "param_offload: no such option in verl 0.9.1: it is critic.fsdp",
        ),
        ([f"{ACTOR}.policy_loss.tau_pos=1"], f"no such option in verl 0.9.1: it is {ACTOR}.tau_pos"),
        (["--config-name=typo"], "typo"),
        ([f"{ACTOR}.strategy=${{oc.env:NO_SUCH_VARIABLE}}"], "NO_SUCH_VARIABLE"),
        (
            ["trainer.project_name=???", "reward.reward_model.enable=false"],
            "trainer.project_name=???: no value; give it",
        ),
        (["reward.reward_model.enable=true"], "reward.reward_model.rollout.name=???: no value"),
        ([f"--config-path={tmp_path}", "--config-name=alone"], "list `ppo_trainer` or `tree_ppo` first"),
    ):
        is_valid, text = report(command)
        assert not is_valid
        assert text.startswith("Refused\n")
        assert part in text


def test_the_exit_status_and_what_stays_away(tmp_path: Path) -> None:
    """0 or 1, nothing written, and neither Ray nor vLLM nor a GPU started.

    The refused command is not even composed, which saves the import of verl.
    """
    program = (
        "import sys; from verl_tree.check import main\n"
        "try:\n    main()\n"
        "finally:\n    ray = sys.modules.get('ray')\n"
        "    assert not (ray and ray.is_initialized()) and 'vllm' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for overrides, status in (([], 0), (["tree.typo=1"], 1)):
        command = [sys.executable, "-c", program, *arguments(tmp_path, *overrides)]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr[-3000:]
        assert f"The command {'cannot' if status else 'can'} run." in done.stdout
        assert "Traceback" not in done.stderr
    assert list(elsewhere.iterdir()) == []


def test_help_says_what_the_command_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    assert "python -m verl_tree.check" in capsys.readouterr().out
