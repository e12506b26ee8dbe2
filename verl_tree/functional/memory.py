"""How many tree tokens fit into a memory: probes of a model, and the size of relayed keys and values.

A probe is a forward and a backward of the training run's own model on a drawn pack. The peak of its memory is that of
its dearest phase: the logits of a chunk, the gradients of a layer, a weight that the ranks exchange. A phase takes some
bytes, and at most some more per token. So bytes per token fall as packs grow, and those of a probe bound those of every
larger pack. (A line through two probes bounds nothing: where the logits are the peak, two packs hardly differ.) Each
probe is as large as the one before allows, and the last one decides.

Not in a probe: what a loss keeps of a row, about 100 bytes per flat token, and memory that the allocator cannot use
because it is in pieces. On a CPU also what kernels take around torch's allocator.

Legend: T tree tokens of a pack.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig

from verl_tree.families import RECURRENT_LAYERS
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

GIB = 2**30

NUM_PROBES = 5
MIN_PROBE_TOKENS, MAX_PROBE_TOKENS = 256, 16_384
MAX_GROWTH = 4
"""How many times the tokens of a probe the next one may have."""

PROBE_BRANCHES = 7
"""Branches of a drawn prompt. Backends that merge attention over ancestors need memory for nearly all tokens there."""

SPINE_PATHS = 2
"""Longest paths that a spine is taken to have. Groups of the shapes of `verl_tree.testing.synthetic` have at most 1.4
of them under a capacity of one longest path, but up to 10 under a quarter of it."""

RESERVED_SHARE = 0.1
"""Share of a device's memory that `free_bytes` leaves to the collectives, the rollout engine and fragmentation."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A pack that was computed, and the most bytes that this took at once, above those that were there before."""

    num_tokens: int
    peak_bytes: int

    def capacity(self, memory_bytes: int) -> int:
        """Return the most tree tokens that are sure to fit, if the probe itself does."""
        return self.num_tokens * memory_bytes // self.peak_bytes


def largest_probe(measure: Callable[[int], Probe], *, memory_bytes: int) -> Probe:
    """Measure packs that are sure to fit, each larger than the one before, and return the last.

    `measure` computes a pack of about as many tokens as it is told. The first has `MIN_PROBE_TOKENS`, and may not fit.
    Another that comes out above the memory is the last.
    """
    probe = measure(MIN_PROBE_TOKENS)
    for _ in range(NUM_PROBES - 1):
        num_tokens = min(probe.capacity(memory_bytes), MAX_GROWTH * probe.num_tokens, MAX_PROBE_TOKENS)
        if num_tokens <= probe.num_tokens:
            break
        probe = measure(num_tokens)
    return probe


def probe_layout(num_tokens: int, *, max_path_len: int, node_len: int | None = None) -> TreeLayout:
    """Lay out about `num_tokens` tokens as prompts with `PROBE_BRANCHES` branches, all of one length.

    Paths have at most `max_path_len` tokens, because the RoPE of some models changes beyond. `node_len` is that length
    where paths may be so long; then a small pack is one tree, whatever `num_tokens` is. None: nodes are as long as they
    can be.
    """
    num_nodes = 1 + PROBE_BRANCHES
    longest = max(1, max_path_len // 2)
    if node_len is None:
        num_trees = math.ceil(num_tokens / (num_nodes * longest))
        node_len = max(1, num_tokens // (num_nodes * num_trees))
    else:
        node_len = min(node_len, longest)
        num_trees = max(1, num_tokens // (num_nodes * node_len))
    sequences = [[0] * node_len + [branch] * node_len for branch in range(1, num_nodes)] * num_trees
    tree_of_sequence = np.arange(num_trees).repeat(PROBE_BRANCHES).tolist()
    return TreeLayout.from_forest(TokenForest.from_sequences(sequences, merge_keys=tree_of_sequence))


def peak_bytes(run: Callable[[], None], *, device: torch.device) -> int:
    """Run, and return the most bytes that were allocated at once, above those allocated before.

    On a CPU these are the events of this thread. What gloo's threads free counts as held, so with a team of ranks the
    result may be some percent too large.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    profiled = profile(profile_memory=True)
    with profiled:
        run()
    results: Any = profiled.kineto_results  # torch's stubs lack `nbytes`
    allocations = [event for event in results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        allocated += event.nbytes()  # negative where memory is freed
        peak = max(peak, allocated)
    return peak


@contextmanager
def gradients_aside(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Run the body without gradients in the parameters, and restore those of before."""
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient


@contextmanager
def leaving_no_trace(parameters: Sequence[torch.nn.Parameter], *, device: torch.device) -> Iterator[None]:
    """Run the body without gradients in the parameters, and restore their gradients and the random generators."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            with gradients_aside(parameters):
                yield
        finally:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)  # verl reports the peak


def free_bytes(device: torch.device, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a CUDA device that packs may use, besides all that is allocated now.

    `RESERVED_SHARE` is taken off. So are two numbers per trained weight, as Adam keeps them, if the optimiser has not
    made its own yet.
    """
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    coming = 0
    if optimizer is not None and not optimizer.state:
        coming = 2 * sum(_local_bytes(each) for group in optimizer.param_groups for each in group["params"])
    return free + cached - coming - int(RESERVED_SHARE * total)


def _local_bytes(parameter: torch.Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """The size of a model's keys and values.

    `dims` counts their numbers per token and layer. Layers that share keys, or see a window only, count like others.
    Recurrent layers have none.
    """

    dims: int
    num_layers: int
    dtype_bytes: int

    @classmethod
    def of_model(cls, config: PretrainedConfig, *, dtype: torch.dtype, num_ranks: int = 1) -> "KeysAndValues":
        """Read the sizes from a transformers config, for one of the ranks that share its heads."""
        text = config.get_text_config(decoder=True).to_dict()
        num_heads = text["num_attention_heads"]
        head_dim = text.get("head_dim") or text["hidden_size"] // num_heads
        # Latent attention (DeepSeek) has keys and values of different lengths.
        key_dim, value_dim = text.get("qk_head_dim") or head_dim, text.get("v_head_dim") or head_dim
        # Where there are fewer heads than ranks, several ranks have the same one.
        own_heads = max(1, (text.get("num_key_value_heads") or num_heads) // num_ranks)
        dims = own_heads * (key_dim + value_dim)
        num_recurrent = sum(each in RECURRENT_LAYERS for each in text.get("layer_types") or [])
        return cls(dims=dims, num_layers=text["num_hidden_layers"] - num_recurrent, dtype_bytes=dtype.itemsize)

    def relayed_bytes(
        self, max_path_len: int, *, trains: bool, recomputes: bool, on_host: bool = False, spine_len: int | None = None
    ) -> int:
        """Return the bytes of a relay on the device: the store, and a section's copies of its context.

        The spine has `spine_len` tokens; if that is not known, `SPINE_PATHS` longest paths. In training each of its
        numbers has a float32 gradient. A store on the host has two layers on the device, one in use and the next. The
        context has one longest path. Every layer whose activations are kept holds a copy of it, which is one layer if
        they are recomputed (gradient checkpointing), and the layer in its backward holds the copy's gradient.
        """
        path = max_path_len * self.dims
        stored_layers = min(2, self.num_layers) if on_host else self.num_layers
        spine = SPINE_PATHS * path if spine_len is None else spine_len * self.dims
        stored = spine * stored_layers * (self.dtype_bytes + (4 if trains else 0))
        num_copies = (1 if recomputes else self.num_layers) + 1 if trains else 1
        return stored + path * num_copies * self.dtype_bytes
