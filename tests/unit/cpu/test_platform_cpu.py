"""The processor as a verl platform, and the process group that verl cannot make on it."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from verl.plugin.platform import PlatformRegistry

from verl_tree.cpu.platform import PlatformCPU, ensure_cpu_process_group


def test_platform_is_registered_and_says_cpu() -> None:
    assert PlatformRegistry.get("cpu") is PlatformCPU
    platform = PlatformCPU()
    assert platform.device_name == "cpu"
    assert platform.is_available()
    assert torch.zeros(1, device=platform.current_device()).device.type == "cpu"
    assert platform.ray_resource_options(2) == {"num_gpus": 2}
    assert platform.communication_backend_name() == "gloo"
    assert not platform.is_ipc_supported()


def test_platform_leaves_a_gpu_to_others() -> None:
    assert PlatformCPU().is_platform_available(use_smi_check=True) == (not torch.cuda.is_available())


def test_device_module_answers_in_bytes() -> None:
    module = PlatformCPU().device_module
    available, total = module.mem_get_info()
    assert 0 < available <= total
    assert 0 < module.memory_allocated() < total
    # 64 MiB more are seen by both numbers.
    before, peak = module.memory_allocated(), module.max_memory_allocated()
    with mmap.mmap(-1, 64 * 2**20) as block:  # malloc might give memory that the process has freed before
        for start in range(0, len(block), mmap.PAGESIZE):
            block[start] = 1
        assert module.memory_allocated() - before > 32 * 2**20
        assert module.max_memory_allocated() >= max(peak, module.memory_allocated() - 2**20)


def test_device_module_keeps_the_generator() -> None:
    module = PlatformCPU().device_module
    torch.manual_seed(3)
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    PlatformCPU().manual_seed_all(3)
    assert torch.equal(module.get_rng_state(), state)


def test_process_group_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIST_INIT_METHOD", f"file://{tmp_path}/store")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ensure_cpu_process_group(timeout_s=30)
    try:
        group = torch.distributed.group.WORLD
        ensure_cpu_process_group()
        assert torch.distributed.group.WORLD is group
        assert torch.distributed.get_backend() == "gloo"
        value = torch.ones(2)
        torch.distributed.all_reduce(value)
        assert value.tolist() == [1.0, 1.0]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("variable", [{}, {"VERL_PLATFORM": "cpu"}])
def test_verl_takes_the_platform_from_the_plugin(variable: dict[str, str]) -> None:
    """In a fresh process, as in a Ray actor: the variable set by the entry point is all that is needed."""
    if torch.cuda.is_available() and not variable:
        pytest.skip("verl detects the GPU first, as it should")
    code = "import verl; from verl.utils.device import get_device_name; print('device', get_device_name())"
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "verl_tree.cpu.platform", **variable}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split()[-2:] == ["device", "cpu"]
    assert "Falling back" not in run.stderr
