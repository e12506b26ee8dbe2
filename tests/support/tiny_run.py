"""Whole runs of `python -m verl_tree.main_ppo` on a random two-layer Qwen3: real Ray, vLLM, TransferQueue and FSDP2."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from tiny_models import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,?!"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_inputs(folder: Path) -> None:
    """Write `model/`, `train.parquet`, `val.parquet` and `loops.yaml`."""
    vocabulary = {token: index for index, token in enumerate(["<end>", "<pad>", "<unk>", ":", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder / "model")
    tiny_model(size="vllm", seed=3, vocab_size=len(vocabulary)).save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"task {number} of this run?"}],
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(16)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    loops = {"forking": "forking_loop.ForkingLoop", "long_tail": "long_tail_loop.LongTailLoop"}
    (folder / "loops.yaml").write_text(
        "".join(f"- name: {name}\n  _target_: {target}\n" for name, target in loops.items())
    )


def command(folder: Path, *overrides: str) -> list[str]:
    """Return the command line of a training run of ten steps, two optimiser steps each, with a reference model."""
    return [
        sys.executable,
        "-m",
        "verl_tree.main_ppo",
        "profile=cpu",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=48",
        "data.shuffle=false",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.optim.lr=0.1",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=256",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=256",
        "actor_rollout_ref.rollout.max_model_len=128",
        "actor_rollout_ref.rollout.agent.default_agent_loop=forking",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/loops.yaml",
        "reward.num_workers=0",
        "trainer.total_training_steps=10",
        "trainer.total_epochs=100",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.resume_mode=disable",
        "tree.console=all",
        *overrides,
    ]


def environment(metrics: Path) -> dict[str, str]:
    """Return variables that say where to log metrics, and where Ray's processes find the test's agent loop."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "VERL_FILE_LOGGER_PATH": str(metrics), "PYTHONPATH": os.pathsep.join(paths)}


def read_metrics(metrics: Path) -> dict[int, dict[str, Any]]:
    """Return the logged metrics of each step. A last line that is still being written is left out."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    written = (line for line in lines if line.endswith("\n"))
    return {record["step"]: record["data"] for record in map(json.loads, written)}


def run(folder: Path, name: str, *overrides: str, timeout_s: int = 600) -> dict[int, dict[str, Any]]:
    """Run to the end and return the metrics of every step, or fail with the end of the log."""
    done = _run(folder, name, *overrides, timeout_s=timeout_s)
    assert done.returncode == 0, done.stdout[-6000:]
    return read_metrics(folder / f"{name}.jsonl")


def run_to_error(folder: Path, name: str, *overrides: str, timeout_s: int = 600) -> tuple[dict, str]:
    """Run until the training run fails by itself, and return the metrics of the steps before and the log."""
    done = _run(folder, name, *overrides, timeout_s=timeout_s)
    assert done.returncode != 0, done.stdout[-6000:]
    return read_metrics(folder / f"{name}.jsonl"), done.stdout


def _run(folder: Path, name: str, *overrides: str, timeout_s: int) -> subprocess.CompletedProcess[str]:
    """Run until the training run ends, and write its log."""
    done = subprocess.run(
        command(folder, *overrides),
        env=environment(folder / f"{name}.jsonl"),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    (folder / f"{name}.log").write_text(done.stdout)
    return done


def run_and_kill_engine(
    folder: Path, name: str, *overrides: str, after_step: int, timeout_s: float = 600.0, end_timeout_s: float = 120.0
) -> str:
    """Start a training run, kill its vLLM worker once a step is logged, and return the log of the failure."""
    log = folder / f"{name}.log"
    with _running(folder, name, *overrides, after_step=after_step, timeout_s=timeout_s) as process:
        engines = [each for each in _descendants(process) if title_of(each).startswith("VLLM::Worker")]
        assert engines, log.read_text()[-6000:]
        os.kill(engines[0].pid, signal.SIGKILL)
        process.wait(timeout=end_timeout_s)
    assert process.returncode not in (0, -signal.SIGKILL)
    return log.read_text()


def run_and_kill_driver(
    folder: Path, name: str, *overrides: str, after_step: int, timeout_s: float = 600.0
) -> dict[int, dict[str, Any]]:
    """Start a training run, kill its driver once a step is logged, and return the metrics of the steps until then."""
    with _running(folder, name, *overrides, after_step=after_step, timeout_s=timeout_s) as process:
        cluster = _descendants(process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for each in cluster:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    return read_metrics(folder / f"{name}.jsonl")


def run_and_terminate(
    folder: Path, name: str, *overrides: str, after_step: int, timeout_s: float = 600.0, end_timeout_s: float = 120.0
) -> tuple[int, str]:
    """Start a training run, send SIGTERM to its driver once a step is logged; return its exit status and its log."""
    with _running(folder, name, *overrides, after_step=after_step, timeout_s=timeout_s) as process:
        process.terminate()
        status = process.wait(timeout=end_timeout_s)
    return status, (folder / f"{name}.log").read_text()


@contextmanager
def _running(
    folder: Path, name: str, *overrides: str, after_step: int, timeout_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training run and enter the context once a step is logged; afterwards kill what is left of it."""
    metrics, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(folder, *overrides),
            env=environment(metrics),
            cwd=folder,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + timeout_s
        while after_step not in read_metrics(metrics):
            assert process.poll() is None, log.read_text()[-6000:]
            assert time.monotonic() < deadline, f"step {after_step} was not logged in {timeout_s} s"
            time.sleep(0.05)
        yield process
    finally:
        left = _descendants(process)
        process.kill()
        for each in left:
            each.kill()


def _descendants(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def title_of(process: psutil.Process) -> str:
    """Return a process's command line, or an empty string where it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.NoSuchProcess:
        return ""
