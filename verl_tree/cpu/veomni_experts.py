"""VeOmni's experts in parallel on a CPU: its exchange of tokens, around the experts of a rank one after another.

VeOmni 0.1.12 has kernels for GPUs and NPUs only. Without one its experts run, too, as long as each rank has all.
"""

from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

KERNEL = "fused_cpu"
"""What `veomni.moe_implementation` calls it."""


class _OwnExperts:
    """The experts of this rank, as VeOmni calls one of its autograd functions."""

    @staticmethod
    def apply(token_NH: Tensor, end_E: Tensor, gate_up_E2IH: Tensor, down_EHI: Tensor) -> Tensor:
        """Return what the experts make of their tokens, (N, H); those of expert e end at `end_E[e]`."""
        outputs, start = [], 0
        for expert, end in enumerate(end_E.tolist()):
            gate, up = F.linear(token_NH[start:end], gate_up_E2IH[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down_EHI[expert]))
            start = end
        return torch.cat(outputs)


def _gather(output_RE: Tensor, own_E: Tensor, group: dist.ProcessGroup) -> None:
    """Gather a row from each rank. VeOmni asks for it in a shape that gloo does not take."""
    dist.all_gather(list(output_RE.unbind()), own_E, group=group)


def register() -> None:
    """Make the kernel known to VeOmni in this process, before a model is built."""
    # While its kernels are imported they look for tuned sizes, and ask the GPU which one it is.
    gpu = mock.patch.object(torch.cuda, "get_device_capability", return_value=(0, 0))
    name_of_gpu = mock.patch.object(torch.cpu, "get_device_name", create=True, return_value="CPU")
    with gpu, name_of_gpu:
        from veomni.distributed.moe.moe_layer import dispatch_to_ep_class
        from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
        from veomni.ops.kernels import moe

    def experts(module: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        weights = (module.gate_up_proj, module.down_proj)
        with mock.patch.object(dist, "all_gather_into_tensor", _gather):
            return dispatch_to_ep_class(
                cast("Any", _OwnExperts), module.num_experts, weight_Tk, expert_Tk, hidden_TH, *weights
            )

    name, bind = KERNEL.removeprefix("fused_"), moe.apply_veomni_fused_moe_patch
    hardware = HardwareRequirement(device_type="any")
    spec = KernelSpec(name, op_name="moe_experts", variant="standard", factory=lambda: experts, hardware=hardware)
    KERNEL_REGISTRY.register(spec, force=True)

    def bind_others(fused_moe_kernel: str = "triton") -> None:
        # Models read the registry. This pointer is for older ones, and takes no names but VeOmni's own.
        if fused_moe_kernel != name:
            bind(fused_moe_kernel)

    moe.apply_veomni_fused_moe_patch = bind_others
