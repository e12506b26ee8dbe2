"""A device that pretends: its tensors live in host memory, and every wait of the host for it is noted.

On CUDA kernels run behind the host. Some operations make the host wait until all of them are done: a *host sync*.
Nothing in a result shows it, so it is counted here without a GPU. `PretendTensor` claims to be on `DEVICE` and holds a
CPU tensor. Every operation runs on that, so values, gradients and devices (mixing them raises, as on CUDA) are right. A
`TorchDispatchMode` sees every operation below autograd, recomputation and backward pass included, and notes as a sync

- a number that goes to Python: `item`, `tolist`, `bool`, `int`, `float`, `torch.equal`;
- a result whose shape depends on values: `nonzero`, a boolean index, `masked_select`, `unique`, `repeat_interleave`
  without `output_size` (torch tags these operations, so none is listed by hand);
- a copy to the host;
- a copy to the device, unless it is non-blocking and from pinned memory. torch waits for a blocking copy, and CUDA
  stages a copy from pageable memory only after the work before it. `torch.tensor(..., device=...)` is such a copy too.

A non-blocking copy from pinned memory is noted as a copy, not as a sync. Not seen: what a CUDA kernel of torch does
inside, allocations, and operations that only CUDA has. numpy is host work and no sync.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")
"""A device that torch knows without a driver, and whose backward pass runs on the thread that asks for it."""

PACKAGES = ("verl_tree", "transformers", "verl")
"""Whose code an event belongs to: the innermost frame in one of these. Else it is the caller's own."""

aten = torch.ops.aten

_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")


Module = TypeVar("Module", bound=torch.nn.Module)


class PretendTensor(torch.Tensor):
    """A tensor that claims to be on `DEVICE` and computes on `held`, a CPU tensor."""

    held: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "PretendTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _all_ours(types):
            return NotImplemented
        return _run(HostEvents(), func, args, dict(kwargs or {}))  # nobody counts

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.held!r})"

    def data_ptr(self) -> int:
        """Return the address of the values, which tells tensors apart."""
        return self.held.data_ptr()

    def tolist(self) -> Any:
        """Return the values; torch's own method refuses subclasses."""
        return self.cpu().tolist()


class Event(NamedTuple):
    """A wait of the host, or a copy that it does not wait for."""

    kind: str
    package: str  # One of `PACKAGES`, or "" for the caller
    place: str  # file:line in this package


class HostEvents:
    """What the host did with the pretended device while `noted()` was active, in order."""

    def __init__(self) -> None:
        self.syncs: list[Event] = []
        self.copies: list[Event] = []
        self.pinned: set[int] = set()  # addresses of storages; the host's memory is not used again while they count

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Serve the pretended device in the body, and note its events."""
        with _ListsToDevice(), _Dispatch(self):
            yield

    def syncs_of(self, *packages: str) -> list[Event]:
        """Return the syncs that the code of these packages asked for."""
        return [event for event in self.syncs if event.package in packages]


def held(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the values of a tensor on the pretended device, without noting it."""
    assert isinstance(tensor, PretendTensor)
    return tensor.held


def to_pretended(module: Module) -> Module:
    """Move the parameters and buffers of a module to the pretended device, where they are no parameters of torch's."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            moved = torch.nn.Parameter(PretendTensor(parameter.detach()), requires_grad=parameter.requires_grad)
            owner._parameters[name] = moved
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = PretendTensor(buffer)
    return module


class _ListsToDevice(TorchFunctionMode):
    """Makes `torch.tensor(..., device=DEVICE)` a copy from the host, as it is for a real device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            del kwargs["device"]
            return torch.tensor(*args, **kwargs).to(DEVICE)
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    def __init__(self, events: HostEvents) -> None:
        super().__init__()
        self._events = events

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _all_ours(types):
            return NotImplemented
        return _run(self._events, func, args, dict(kwargs or {}))


def _all_ours(types: Iterable[type]) -> bool:
    """Return whether no other subclass takes part. A nested tensor takes itself apart first."""
    return all(each is torch.Tensor or issubclass(each, (PretendTensor, torch.nn.Parameter)) for each in types)


def _run(events: HostEvents, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors inside, and note what it makes the host wait for."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    from_device = any(isinstance(each, PretendTensor) for each in given)
    to_device = kwargs.get("device", DEVICE if from_device else None) == DEVICE
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    pins = kwargs.pop("pin_memory", None)
    _note(events, func, args, kwargs, to_device=to_device)
    inner_args, inner_kwargs = tree_map_only(PretendTensor, lambda each: each.held, (args, kwargs))
    if func is aten._to_copy.default and from_device != to_device:
        inner_args = (inner_args[0].clone(), *inner_args[1:])  # the two never share memory
    made = func(*inner_args, **inner_kwargs)
    if pins:
        events.pinned.add(made.untyped_storage().data_ptr())
    if not to_device:
        return made
    made = tree_map_only(torch.Tensor, PretendTensor, made)
    return return_and_correct_aliasing(func, args, kwargs, made) if from_device else made


def _note(events: HostEvents, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, to_device: bool) -> None:
    """Note what the host waits for, and refuse operands that CUDA would refuse."""
    if func in (aten._to_copy.default, aten.copy_.default):
        is_new = func is aten._to_copy.default
        source, from_device = args[not is_new], isinstance(args[not is_new], PretendTensor)
        if from_device == (to_device if is_new else isinstance(args[0], PretendTensor)):
            return
        is_free = kwargs.get("non_blocking", False) and source.untyped_storage().data_ptr() in events.pinned
        if from_device:
            events.syncs.append(_event("copy to the host"))
        else:
            (events.copies if is_free else events.syncs).append(_event("copy to the device"))
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    name = func.overloadpacket.__name__
    if not any(isinstance(each, PretendTensor) for each in given):
        return
    if any(not isinstance(each, PretendTensor) and each.dim() for each in given):
        assert name in _INDEXING, f"{name} got tensors of the host and of the device"
        events.syncs.append(_event("copy to the device"))  # torch moves such an index by itself
    if _depends_on_values(func, args, kwargs):
        events.syncs.append(_event(name.removeprefix("_")))


def _depends_on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the host has to know values to go on after an operation."""
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _event(kind: str) -> Event:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        parts = frame.f_code.co_filename.split("/")
        for package in PACKAGES:
            if package in parts[:-1] and "tests" not in parts:
                inside = "/".join(parts[len(parts) - parts[::-1].index(package) :])
                return Event(kind, package, f"{inside}:{frame.f_lineno}")
        frame = frame.f_back
    return Event(kind, "", "")
