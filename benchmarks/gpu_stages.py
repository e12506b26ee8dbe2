"""What a session with a GPU runs first, in five stages of at most 8 minutes, from correctness to other engines.

    python benchmarks/gpu_stages.py [correctness] [layers] [models] [recurrence] [engines] [--out gpu_check]

`scripts/gpu_check.sh` calls this with caches and flash-attn-4 prepared. Every backend, contender and model is a process
of its own (`jobs.py`), so one that breaks the device's context, or hangs, does not take the others with it. Kernels are
compiled first, in as many processes as there are cores, into the caches on disk. `benchmarks/report_gpu.py` makes the
tables. Without a GPU the same jobs run on small inputs on the CPU, where `varlen` serves and the other backends say why
they do not: a rehearsal, no result. Exit status 1 if any job did not pass.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from contenders import CONTENDERS, FLEX, FLEX_SHAPES
from harness import append_record, environment
from jobs import Job, run_jobs

from verl_tree.attention.fa4 import installation_reasons

BUDGET_S = 465.0
"""Of a stage: eight minutes, less what it takes to unpack flash-attn-4 and to end the last job."""
BACKENDS = ("fa4", "triton", "varlen")
MODELS = ("1.7B", "8B", "0.6B", "4B")
TIMED_FIRST = ("GRPO star 1k + 16 x (1-4k)", "MCTS, nodes of 30-100")
"""Shapes that the stage of correctness times, so that this stage alone says how fast the kernels are."""

BENCHMARKS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the jobs run: `cuda` or `cpu`, the cores that compile, and a folder for what nobody keeps."""

    device: str
    num_cores: int
    scratch: Path

    @property
    def is_rehearsal(self) -> bool:
        """Whether this only shows that the stages work."""
        return self.device == "cpu"

    def job(self, name: str, program: str, *arguments: str, limit_s: float) -> Job:
        """Return the job that runs a benchmark, small in a rehearsal."""
        small = ["--small"] if self.is_rehearsal else []
        of_job = ["--device", self.device, *small, "--seconds", "{seconds}", "--out", "{out}"]
        return Job(name, [sys.executable, str(BENCHMARKS / program), *of_job, *arguments], limit_s)


def correctness(machine: Machine) -> list[list[Job]]:
    """Return the jobs of the first stage: compile, compute the oracles, check backends, time shapes."""
    oracles = str(machine.scratch / "oracles")
    num_each = max(machine.num_cores // 2, 1)

    def check(backend: str, *, limit_s: float) -> Job:
        asked = ("--backends", backend, "--oracles", oracles)
        return machine.job(f"check-{backend}", "check_attention.py", *asked, limit_s=limit_s)

    def compile_share(backend: str, index: int) -> Job:
        asked = ("--backends", backend, "--compile", f"{index}/{num_each}")
        return machine.job(f"compile-{backend}-{index}", "check_attention.py", *asked, limit_s=80)

    compiling = [compile_share(backend, index) for index in range(num_each) for backend in ("fa4", "triton")]
    timed = [_time(machine, contender, limit_s=25, shapes=TIMED_FIRST) for contender in BACKENDS]
    return [
        [check("oracle", limit_s=80), *compiling],
        *([check(backend, limit_s=limit_s)] for backend, limit_s in zip(BACKENDS, (100, 100, 60), strict=True)),
        *([job] for job in timed),
    ]


def layers(machine: Machine) -> list[list[Job]]:
    """Return the jobs of the second stage: compile, then time every contender alone on the device."""
    contenders = [contender for contender in CONTENDERS if contender != FLEX]
    compiling = [
        machine.job(
            f"compile-{_file_name(contender)}", "attention.py", "--contender", contender, "--compile", limit_s=55
        )
        for contender in contenders
    ]
    timed = [_time(machine, contender, limit_s=36) for contender in contenders]
    flex = _time(machine, FLEX, limit_s=80, shapes=FLEX_SHAPES)
    return [compiling, *([job] for job in timed), [flex]]


def models(machine: Machine) -> list[list[Job]]:
    """Return the jobs of the third stage: one model after another; in a rehearsal a tiny one."""
    if machine.is_rehearsal:
        return [[machine.job("model-tiny", "por.py", limit_s=150)]]
    limits_s = zip(MODELS, (90, 185, 65, 120), strict=True)
    return [[machine.job(f"model-{name}", "por.py", "--models", name, limit_s=limit_s)] for name, limit_s in limits_s]


def recurrence(machine: Machine) -> list[list[Job]]:
    """Return the jobs of the fourth stage: the rule of recurrent layers, checked and then timed.

    Most of their time, flash-linear-attention tries configurations of its kernels.
    """
    return [
        [machine.job("check-recurrence", "check_recurrence.py", limit_s=260)],
        [machine.job("time-recurrence", "check_recurrence.py", "--time", limit_s=200)],
    ]


def engines(machine: Machine) -> list[list[Job]]:
    """Return the jobs of the fifth stage: an update on each of the other engines, if the machine has them."""
    names = ("megatron", "veomni")
    return [[machine.job(f"engine-{name}", "check_engines.py", "--engine", name, limit_s=200)] for name in names]


STAGES: dict[str, Callable[[Machine], list[list[Job]]]] = {
    "correctness": correctness,
    "layers": layers,
    "models": models,
    "recurrence": recurrence,
    "engines": engines,
}


def main() -> None:
    """Run the stages that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of the results")
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"stage {unknown[0]!r} does not exist; choose of {', '.join(STAGES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        print("\n*** No GPU: this is a REHEARSAL ON THE CPU with tiny inputs. It shows no result. ***\n", flush=True)
    passed = True
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an outer limit ends the jobs, too
    with tempfile.TemporaryDirectory() as scratch:
        machine = Machine(device, os.cpu_count() or 1, Path(scratch))
        # flash-attn-4 finds a compiled kernel by its own sources and our mask, not by what the mask calls. So its
        # kernels are kept no longer than this run.
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1"
        os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = str(machine.scratch / "fa4")
        for name in options.stages or STAGES:
            print(f"== {name}", flush=True)
            folder = options.out / name
            append_record(_machine_record(machine, name), folder / "machine.jsonl")
            passed &= run_jobs(STAGES[name](machine), folder=folder, budget_s=BUDGET_S)
    print("all jobs passed" if passed else "some jobs did not pass: see jobs.jsonl", flush=True)
    sys.exit(0 if passed else 1)


def _time(machine: Machine, contender: str, *, limit_s: float, shapes: tuple[str, ...] = ()) -> Job:
    asked = ("--contender", contender, *(("--shapes", *shapes) if shapes else ()))
    return machine.job(f"time-{_file_name(contender)}", "attention.py", *asked, limit_s=limit_s)


def _file_name(contender: str) -> str:
    return contender.replace(" ", "-").replace(",", "")


def _machine_record(machine: Machine, stage: str) -> dict[str, object]:
    """Return what the machine says of itself, with the whole of nvidia-smi."""
    record: dict[str, object] = {"kind": "machine", "stage": stage, "rehearsal": machine.is_rehearsal}
    record |= environment()
    if machine.is_rehearsal:
        # Later `fa4` says so itself. Here it refuses for want of a GPU, whether the packages are complete or not.
        record["fa4"] = "; ".join(installation_reasons()) or "its packages are complete"
    else:
        record["nvidia_smi"] = subprocess.run(["nvidia-smi", "-q"], capture_output=True, text=True, check=False).stdout
    return record


if __name__ == "__main__":
    main()
