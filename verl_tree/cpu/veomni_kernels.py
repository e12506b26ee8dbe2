"""What VeOmni 0.1.12 has for GPUs and NPUs only, on a CPU: experts in parallel, and the recurrent layers of Qwen3.5.

Experts keep VeOmni's exchange of tokens, around those of a rank one after another. Recurrent layers run one sequence
after another, by torch's convolution and transformers' rule in torch.
"""

from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

KERNEL = "cpu"
"""What VeOmni's options `..._implementation` call each of them; that of experts says `fused_cpu`."""


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


def _conv(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor, **_of_kernel: object
) -> tuple[Tensor, None]:
    """Convolve each of the sequences of x, (1, T, D), with what stands before in it."""
    assert activation == "silu", activation
    channels, width = weight.shape
    outputs = [
        F.conv1d(F.pad(part.transpose(1, 2), (width - 1, 0)), weight.unsqueeze(1), bias, groups=channels)
        for part in x.split(cu_seqlens.diff().tolist(), dim=1)
    ]
    return F.silu(torch.cat(outputs, dim=2)).transpose(1, 2), None


def _rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, None]:
    """Run the gated delta rule along each of the sequences, (1, T, H, D)."""
    lens = cu_seqlens.diff().tolist()
    parts = zip(*(x.split(lens, dim=1) for x in (query, key, value, g, beta)), strict=True)
    return torch.cat([torch_chunk_gated_delta_rule(*part, **options)[0] for part in parts], dim=1), None


def register() -> None:
    """Make the kernels known to VeOmni in this process, before a model is built."""
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

    def known(op_name: str, kernel: Callable[..., Any]) -> None:
        hardware = HardwareRequirement(device_type="any")
        spec = KernelSpec(KERNEL, op_name=op_name, variant="standard", factory=lambda: kernel, hardware=hardware)
        KERNEL_REGISTRY.register(spec, force=True)

    known("moe_experts", experts)
    known("causal_conv1d", _conv)
    known("chunk_gated_delta_rule", _rule)
    bind = moe.apply_veomni_fused_moe_patch

    def bind_others(fused_moe_kernel: str = "triton") -> None:
        # Models read the registry. This pointer is for older ones, and takes no names but VeOmni's own.
        if fused_moe_kernel != KERNEL:
            bind(fused_moe_kernel)

    moe.apply_veomni_fused_moe_patch = bind_others
