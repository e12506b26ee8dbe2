"""The CPU as a verl platform (`verl.plugin.platform.PlatformBase`, 0.9.1).

The Ray resource is called `GPU`, because verl's resource checks know no other name. It is a *logical* resource that
`ray.init(num_gpus=...)` provides, one per training rank. Collectives run on gloo, and weights travel through shared
memory. There are no profilers, no streams and no IPC of device memory.
"""

import os
import resource
import sys
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed
from typing_extensions import override
from verl.plugin.platform import PlatformBase, PlatformRegistry

PLATFORM_NAME = "cpu"


class _CpuDeviceModule(ModuleType):
    """`torch.cpu` with the part of the `torch.cuda` interface that verl calls on a device module."""

    is_available = staticmethod(torch.cpu.is_available)
    device_count = staticmethod(torch.cpu.device_count)
    current_device = staticmethod(torch.cpu.current_device)
    synchronize = staticmethod(torch.cpu.synchronize)
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)
    Stream = torch.cpu.Stream
    Event = torch.Event

    manual_seed = staticmethod(torch.manual_seed)
    manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def _nothing(*_args: Any) -> None:
        """Do nothing: there is one device, its allocator has no cache, and the kernel measures peak memory."""

    set_device = empty_cache = ipc_collect = reset_peak_memory_stats = _nothing

    @staticmethod
    def get_device_name() -> str:
        """Return the name that verl's FLOPs counter looks up."""
        # verl takes every `CPU` for one of 448 GFLOP/s: `perf/mfu/*` is a share of that, not of this CPU's peak.
        return "CPU"

    @staticmethod
    def memory_allocated() -> int:
        """Return the resident memory of this process in bytes."""
        return psutil.Process().memory_info().rss

    # Nothing is reserved beyond the resident memory.
    memory_reserved = memory_allocated

    @staticmethod
    def max_memory_allocated() -> int:
        """Return the peak resident memory of this process in bytes."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    max_memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info() -> tuple[int, int]:
        """Return (available, total) memory of the machine in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total


_DEVICE_MODULE = _CpuDeviceModule("verl_tree.cpu_device")


@PlatformRegistry.register(platform=PLATFORM_NAME)
class PlatformCPU(PlatformBase):
    """verl's platform `cpu`, chosen where verl detects no other, or by `VERL_PLATFORM=cpu`."""

    @property
    @override
    def device_name(self) -> str:
        return "cpu"

    @property
    @override
    def vendor_name(self) -> str:
        return "cpu"

    @property
    @override
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    @override
    def is_available(self) -> bool:
        return True

    @override
    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # verl asks platforms in order of registration, so it has taken any accelerator before it asks this one.
        return not torch.cuda.is_available()

    @override
    def current_device(self) -> Any:
        # verl annotates an int, but formats it into device strings and passes it to `.to(...)`, where an index would
        # mean a CUDA device.
        return "cpu"

    @override
    def device_count(self) -> int:
        return 1

    def _nothing(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: there is one device, without streams, a cache or a profiler."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    @override
    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @override
    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    @override
    def communication_backend_name(self) -> str:
        return "gloo"

    @override
    def visible_devices_envvar(self) -> str:
        # Ray numbers its logical GPUs in this variable; torch's CPU build does not read it.
        return "CUDA_VISIBLE_DEVICES"

    @override
    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    @override
    def ray_resource_name(self) -> str:
        return "GPU"

    @override
    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    @override
    def is_ipc_supported(self) -> bool:
        return False


def ensure_cpu_process_group(*, timeout_s: float | None = None) -> None:
    """Initialise the default gloo process group from the environment, unless one exists.

    Call it before `verl.utils.distributed.initialize_global_process_group_ray` (verl 0.9.1). That function keeps an
    existing group; for a new one it would ask for the backend `cpu:gloo,cpu:gloo` (ValueError: duplicate device).
    `timeout_s` limits a collective; None is torch's default.
    """
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend="gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        timeout=None if timeout_s is None else timedelta(seconds=timeout_s),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )
