"""Which lines of a training run's output are for people, decided on lines that real runs printed."""

import pytest

from verl_tree.launch.run.lines import LineFilter, find_milestone, for_people, split_process, without_colours

LIBRARY = "/env/lib/python3.11/site-packages/verl/workers/engine/__init__.py"
RUNNER, AGENTS, WORKER, SERVER = (
    f"({name} pid=426) " for name in ("TreeTaskRunner", "TreeAgentLoopWorkerBase", "WorkerDict", "vLLMHttpServer")
)


@pytest.mark.parametrize(
    "line",
    [
        "start   2.1 s: configuration composed (2.0 s); checking it",
        "actor_rollout_ref.actor.strategy=fsdp2: runs as fsdp_tree: FSDP2 on trees",
        "[2026-11-22 13:50:28,413][verl_tree.launch.checks][WARNING] - reward.num_workers=0: verl's agents fail",
        "(raylet) The node with node id 1234 has been marked dead",
        f"{RUNNER}step 1/10: reward 0.42 (leaves), 0.50 (sessions) | 4.0 leaves a session",
        f"{RUNNER}WARNING:2026-11-22 13:30:26,062:step 1 (train): 8 sessions failed",
        f"{RUNNER}INFO:2026-11-22 14:09:00,068:Resuming from checkpoints/global_step_4, setting global step to 4",
        f"{RUNNER}INFO:2026-11-22 14:09:24,549:Saving checkpoint to checkpoints/global_step_8",
        f"{RUNNER}wandb: 🚀 View run test at: https://wandb.ai/mine/runs/1",
        f"{AGENTS}the tool answered 42",
        f"{AGENTS}/home/me/my_agents.py:12: UserWarning: the index is old",
        "(RewardLoopWorker pid=7, ip=10.0.0.2) score 0.5",
        "(ToolServer pid=8) listening",
        f"{WORKER}WARNING:2026-11-22 13:30:26,062:tree.capacity=auto: the probes were cut short",
        f"{WORKER}ERROR:2026-11-22 13:30:26,062:NCCL is gone",
        f"{AGENTS}ERROR:2026-11-22 13:30:26,062:Failed to call the tool: it is gone",
        f"{WORKER}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        f"{SERVER}(EngineCore pid=725) ERROR 11-23 04:40:41 [core.py:1435] EngineCore encountered a fatal error.",
        "(pid=426) ModuleNotFoundError: No module named 'my_agents'",
        f"{WORKER}[rank0]:[E1122 13:31:18.321000 573 ProcessGroupNCCL.cpp:616] Watchdog caught collective timeout",
        f"{WORKER}[2026-11-23 04:39:10,641 E 123 456] core_worker.cc:1: it failed",
        f"{WORKER}*** SIGSEGV received at time=1763 on cpu 3 ***",
    ],
)
def test_people_see(line: str) -> None:
    assert LineFilter().shows(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "[2026-11-22 13:28:22,340][verl.plugin.platform.platform_manager][INFO] - Platform override from VERL_PLATFORM",
        "ray init kwargs: {'num_cpus': 8}",
        "Error executing job with overrides: ['profile=cpu']",
        "2026-11-22 13:28:27,934\tWARNING authentication_token_setup.py:85 -- Token authentication is enabled for this",
        f"{LIBRARY}:32: UserWarning: torchtitan engine is not available: ModuleNotFoundError('torchtitan')",
        "/work/verl_tree/main_ppo.py:69: UserWarning: Disabled critic as algorithm.adv_estimator != gae.",
        f"{RUNNER}INFO:2026-11-22 13:29:19,938:Total training steps: 10",
        f"{RUNNER}Checkpoint tracker file does not exist: /runs/mine/latest_checkpointed_iteration.txt",
        f"{RUNNER}Found checkpoint: %s /runs/mine/global_step_2",
        f"{RUNNER}step:1 - global_seqlen/min:664.0 - actor/loss:0.1",
        f"{RUNNER}{{'actor_rollout_ref': {{'actor': {{'_target_': 'verl.workers.config.FSDPActorConfig',",
        f"{RUNNER}'log_tail_lines'",
        f"{RUNNER}: 40,",
        f"{RUNNER}False,",
        f"{RUNNER}Training Progress:  50%|█████     | 5/10 [00:18<01:30, 18.05s/it]",
        f"{RUNNER}Generating train split: 0 examples [00:00, ? examples/s]",
        f"{RUNNER}wandb:              actor/entropy ▁▃▅█",
        f"{RUNNER}wandb: For more information, check out the docs at: https://weave-docs.wandb.ai",
        f"{AGENTS}WARNING:2026-11-22 13:31:11,544:Triton is installed, but doesn't include CPU backend.",
        # transformers hands its warnings to the root logger where the variable CI is set.
        f"{WORKER}WARNING:2026-11-23 14:04:43,714:`Qwen2VLImageProcessor` requires torchvision (not installed); "
        "falling back to `Qwen2VLImageProcessorPil` for backward compatibility.",
        f"{AGENTS}Using dataset class: RLHFDataset",
        f"{AGENTS}ERROR:2026-11-22 13:31:11,544:Failed to decode tool call: Expecting value: line 1 column 1 (char 0)",
        f"{AGENTS}ERROR:2026-11-22 13:31:11,544:Failed to parse Gemma4 tool call: 'name'",
        f"{WORKER}Qwen3ForCausalLM contains 64.77K parameters",
        f"{WORKER}[rank0]:W1122 13:31:18.321000 573 torch/fx/_symbolic_trace.py:56] is_fx_tracing will return true",
        f"{SERVER}(MainProcess pid=969) WARNING 11-22 13:30:26 [cpu.py:207] Triton is not installed.",
        f"{SERVER}(APIServer pid=969) INFO 11-22 13:30:26 [loader.py:1] an error: none",
        "(pid=426) loading",
        "(TransferQueueController pid=5) 2026-11-22 13:57:42,835 - INFO - transfer_queue.utils.perf_utils - TQ: fine",
    ],
)
def test_people_do_not_see(line: str) -> None:
    assert not LineFilter().shows(line)


def shown(*lines: str) -> list[str]:
    filters = LineFilter()
    return [line for line in lines if filters.shows(line)]


def test_an_indented_line_goes_with_the_one_before_it_of_its_process() -> None:
    lines = [
        f"{RUNNER}WARNING:2026-11-22 13:30:26,062:step 1 (train): 8 sessions failed",
        f"{LIBRARY}:32: FutureWarning: gone soon",
        f"{RUNNER}  8 x KeyError: 'answer' (first: 000000000-1_0)",
        "  wrapper = lookup(vars(value))",
        f"{RUNNER}INFO:2026-11-22 13:30:27,062:hidden",
        f"{RUNNER}  and its second line",
    ]
    assert shown(*lines) == [lines[0], lines[2]]


def test_the_ends_of_logs_in_a_report_are_for_the_log() -> None:
    lines = [
        "--- last 40 lines of stderr of TaskRunnerV1 (pid 7 on node 10.0.0.1)",
        "  INFO:2026-11-22 13:29:19,938:Total training steps: 10",
        "  Traceback (most recent call last):",
        "  ERROR:2026-11-22 13:30:26,062:it is gone",
        "the driver goes on",
    ]
    assert shown(*lines) == lines[-1:]


def test_a_traceback_is_whole_and_what_its_process_says_behind_it_is_shown_until_the_next_known_line() -> None:
    lines = [
        "(WorkerDict pid=1) Traceback (most recent call last):",
        '(WorkerDict pid=1)   File "/me/reward.py", line 3, in score',
        "(WorkerDict pid=1)     raise KeyError(row)",
        "(vLLMHttpServer pid=2) another process goes on",
        "(WorkerDict pid=1) my_module.Failure: row 3",
        "(WorkerDict pid=1) has no answer",
        "(WorkerDict pid=1) ",
        "(WorkerDict pid=1) INFO:2026-11-22 13:30:27,062:known",
        "(WorkerDict pid=1) quiet again",
    ]
    assert shown(*lines) == [*lines[:3], *lines[4:7]]


def test_processes_have_the_names_that_ray_gives_them() -> None:
    assert split_process("(WorkerDict pid=12, ip=10.0.0.3) text (pid=3)") == ("WorkerDict", "text (pid=3)")
    assert split_process("(pid=12) text") == ("?", "text")
    assert split_process("(raylet) text") == ("", "(raylet) text")
    assert without_colours("\x1b[36m(TreeTaskRunner pid=1)\x1b[0m a") == "(TreeTaskRunner pid=1) a"


def test_lines_of_the_task_runner_need_no_name() -> None:
    assert for_people(f"{RUNNER}step 1/3: reward") == "step 1/3: reward"
    saving = "Saving checkpoint to here: INFO"
    assert for_people(f"{RUNNER}INFO:2026-11-22 14:09:24,549:{saving}") == saving
    assert for_people(f"{AGENTS}text") == f"{AGENTS}text"


def test_the_start_is_told() -> None:
    told = [
        find_milestone(line)
        for line in (
            "2026-11-22 13:28:57,403\tINFO worker.py:2029 -- Started a local Ray instance. View the dashboard at "
            "http://127.0.0.1:8265 ",
            "2026-11-22 13:28:57,403\tINFO worker.py:1821 -- Connected to Ray cluster.",
            f"{RUNNER}INFO:2026-11-22 13:29:19,938:Total training steps: 10",
            f"{RUNNER}INFO:2026-11-22 13:29:19,938:reward loop manager initialized",
            f"{RUNNER}INFO:2026-11-22 13:29:19,938:all initialize finished, ready to fit",
            f"{RUNNER}agent loops started",
            f"{RUNNER}step 1/10: all initialize finished, ready to fit",
            "INFO:2026-11-22 13:29:19,938:Total training steps: 10",
            f"{RUNNER}2026-11-22 13:28:57,403\tINFO worker.py:1821 -- Connected to Ray cluster.",
        )
    ]
    assert told == [
        ("Ray started, dashboard at http://127.0.0.1:8265", "starting the trainer, reading the data"),
        ("Ray started", "starting the trainer, reading the data"),
        ("data read", "loading the models"),
        ("models loaded", "starting the rollout engine"),
        ("rollout engine started", "starting the agent loops"),
        ("agent loops started", "training"),
        None,
        None,  # another process tells what the task runner wrote
        None,
    ]
