"""The processor as a verl platform: what verl asks of an accelerator, answered for a machine without one.

verl reaches its device through `verl.plugin.platform.PlatformBase` (0.9.1). Two answers are worth knowing: the
Ray resource is called `GPU`, because verl's resource checks know no other name, and it is a *logical* resource
that `ray.init(num_gpus=...)` provides, one per training rank; and collectives run on gloo.

What is left out: profilers, streams, IPC of device memory. Weights travel through shared memory instead.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

import psutil
import torch
import torch.distributed
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

    @staticmethod
    def set_device(device: Any) -> None:
        """Does nothing: there is one device."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Returns the name that verl's FLOPs counter looks up; unknown to it, so no MFU is reported."""
        return "CPU"

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """Returns the state of torch's CPU generator."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Sets the state of torch's CPU generator."""
        torch.set_rng_state(state)

    @staticmethod
    def empty_cache() -> None:
        """Does nothing: the CPU allocator keeps no cache that could be returned."""

    @staticmethod
    def ipc_collect() -> None:
        """Does nothing: no memory is shared by handle."""

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """Returns the resident memory of this process in bytes."""
        return psutil.Process().memory_info().rss

    @staticmethod
    def memory_reserved(device: Any = None) -> int:
        """Returns the resident memory of this process in bytes: nothing is reserved beyond it."""
        return psutil.Process().memory_info().rss

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """Returns the peak resident memory of this process in bytes."""
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    @staticmethod
    def max_memory_reserved(device: Any = None) -> int:
        """Returns the peak resident memory of this process in bytes."""
        return _CpuDeviceModule.max_memory_allocated()

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """Does nothing: the kernel keeps the peak for the life of the process."""

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Returns (available, total) memory of the machine in bytes."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total


_DEVICE_MODULE = _CpuDeviceModule("verl_tree.cpu_device")


@PlatformRegistry.register(platform=PLATFORM_NAME)
class PlatformCPU(PlatformBase):
    """verl platform `cpu` (registered at import; chosen when verl detects nothing else, or `VERL_PLATFORM=cpu`)."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # verl asks in order of registration, so an accelerator that is present has been taken before.
        return not torch.cuda.is_available()

    def current_device(self) -> str:
        # verl formats this into device strings and passes it to `.to(...)`: an index would mean a CUDA device.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Ray numbers its logical GPUs in this variable; torch's CPU build does not read it.
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def ensure_cpu_process_group(*, timeout_s: float | None = None) -> None:
    """Initialises the default gloo process group from the environment, unless one exists.

    To be called before `verl.utils.distributed.initialize_global_process_group_ray` (verl 0.9.1), which would
    ask for the backend `cpu:gloo,cpu:gloo` (ValueError: duplicate device) and leaves an existing group alone.

    Args:
        timeout_s: Seconds that a collective may take; None for torch's default.
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
