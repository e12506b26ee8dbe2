"""Megatron on a CPU: what it takes from CUDA and from Transformer Engine, for tests and `profile=cpu` alone.

Bridges know Transformer Engine's layers by the names of their parameters. Megatron has a protocol for who makes layers
(`BackendSpecProvider`). So a provider without Transformer Engine gives layers of the same names, and weights load and
leave as on a GPU. Source: megatron-core 0.16.1, mbridge 0.15.1.

Legend: S tokens, Hq and Hkv query and key-value heads, D head dim, N hidden size.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import gpt_layer_specs, moe_module_specs
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import transformer_block
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

UNFUSED: dict[str, Any] = {
    "use_cpu_initialization": True,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Options of Megatron's config for kernels that a CPU lacks; the dispatcher of experts is the one that gloo serves."""


class _OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where Megatron asks for CUDA by name."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _NoStream:
    """A CUDA stream or event that has nothing to wait for."""

    def __init__(self, *_args: Any, **_options: Any) -> None: ...

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_options: self

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_error: object) -> None: ...


class Norm(torch.nn.RMSNorm):
    """RMSNorm with the constructor of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_options: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NormLinear(ColumnParallelLinear):
    """A norm and a linear layer behind it, under the parameter names of Transformer Engine's fused layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_weight, self._eps = weight, config.layernorm_epsilon

    @override
    def forward(self, input_: Tensor, *args: Any, **options: Any) -> Any:
        normed = F.rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self._eps)
        return super().forward(normed, *args, **options)


class GroupedLinear(MegatronModule):
    """One linear layer for each expert of this rank, under the names of Transformer Engine's grouped layer."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_options: Any) -> None:
        super().__init__(config=config)
        for number in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            # Ranks with other experts have no gradient for it.
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """Run each expert on its tokens, which stand in the order of the experts."""
        parts = x.split(tokens_per_expert)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.parameters(), strict=True)]), None


class FlatAttention(MegatronModule):
    """Causal attention of packed rows, which Transformer Engine has in kernels."""

    def __init__(self, config: Any, layer_number: int, **_options: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number

    @override
    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_args: Any, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        """Attend within each row: (S, Hq, D) and twice (S, Hkv, D) give (S, Hq * D)."""
        assert packed_seq_params is not None, "rows are packed (use_remove_padding=true)"
        padded = packed_seq_params.cu_seqlens_q_padded
        ends = (packed_seq_params.cu_seqlens_q if padded is None else padded)[1:].tolist()
        outputs = []
        for start, end in pairwise([0, *ends, len(query)]):  # padding behind the last row is one more
            q, k, v = (each[start:end].transpose(0, 1) for each in (query, key, value))
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


def _as_list_of_numbers(tensor: Tensor | None, *, as_numpy: bool = False, **_options: bool) -> Any:
    return tensor.numpy() if as_numpy and tensor is not None else tensor


def with_tied_head(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights that leave the model, a tied head of its own: vLLM reloads it apart on a CPU."""
    for name, weight in weights:
        yield name, weight
        if name == "model.embed_tokens.weight":
            yield "lm_head.weight", weight


@contextmanager
def torch_optimizer_loads(optimizer: Any) -> Iterator[None]:
    """Let Megatron's shared-out optimiser load its states, in float32 and without Transformer Engine, while active.

    It loads into states that torch's Adam has after a step only, which is taken first: the weights of the checkpoint
    come after it. Its weights are views of the model's. And the number of steps comes back with the groups of
    parameters only, and as one tensor for all states, which each of them would count up.
    """
    of_torch = [each for each in optimizer.chained_optimizers if isinstance(each, DistributedOptimizer)]
    for each in of_torch:
        if not each.optimizer.state:
            each._init_optimizer_states_with_dummy_values()
    with torch.no_grad():
        yield
    for each in of_torch:
        for group in each.optimizer.param_groups:
            for parameter in each.optimizer.state.keys() & set(group["params"]):
                each.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))


class _Provider:
    """Layers without Transformer Engine: Megatron's `BackendSpecProvider`."""

    def linear(self) -> type:
        return ColumnParallelLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormLinear

    def layer_norm(self, **_options: bool) -> type:
        return Norm

    def core_attention(self) -> type:
        return FlatAttention

    def grouped_mlp_modules(self, *_wanted: bool) -> tuple[type, MLPSubmodules]:
        return TEGroupedMLP, MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)

    def activation_func(self) -> None:
        return None


@cache
def prepare() -> None:
    """Let Megatron build and run models on this process's CPU, once and for its life."""
    cuda: Any = torch.cuda
    cuda.current_device, cuda.synchronize = (lambda: torch.device("cpu")), (lambda *_: None)
    cuda.Stream = cuda.Event = _NoStream
    cuda.stream = cuda.current_stream = _NoStream
    torch.Tensor.cuda = lambda self, *_args, **_options: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    _OnCpu().__enter__()
    type_of = torch.Tensor.type

    def as_on_cuda(tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Return the name of a tensor's type as it is on CUDA, by which optimisers know a dtype."""
        found = type_of(tensor, *args, **options)
        return re.sub(r"^torch\.(?!cuda)", "torch.cuda.", found) if isinstance(found, str) else found

    torch.Tensor.type = as_on_cuda  # type: ignore[method-assign]

    tracker: Any = random.CudaRNGStatesTracker
    # The generators of a GPU; nothing draws from them, but a checkpoint without any would be refused.
    tracker.fork = lambda *_: nullcontext()
    tracker.add = lambda self, name, seed: self.states_.update({name: seed})
    generators: Any = random
    generators._get_cuda_rng_state, generators._set_cuda_rng_state = (lambda **_: None), (lambda *_, **_options: None)
    moe: Any = moe_utils
    moe.te_general_gemm = None
    # Numbers of tokens are exchanged as lists, and what is on the host already would stay a tensor.
    dispatcher: Any = token_dispatcher
    dispatcher.maybe_move_tensor_to_cpu = _as_list_of_numbers
    specs: Any = gpt_layer_specs
    specs.HAVE_TE, specs.TESpecProvider, specs.TENorm, specs.TEFusedMLP = True, _Provider, Norm, None
    of_experts: Any = moe_module_specs
    of_experts.TESpecProvider = _Provider
    block: Any = transformer_block
    block.TENorm = block.LayerNormImpl = Norm
