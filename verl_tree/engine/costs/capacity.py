"""The capacity of an engine's packs and sections: what the options say, or what fits into the memory of its ranks."""

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_tree.engine.model_calls import ModelCalls
from verl_tree.engine.rows.columns import gather
from verl_tree.engine.rows.micro_batch import device_of_rank
from verl_tree.functional.memory import (
    GIB,
    MIN_PROBE_TOKENS,
    KeysAndValues,
    Probe,
    free_bytes,
    largest_probe,
    leaving_no_trace,
    peak_bytes,
    probe_layout,
)
from verl_tree.recurrence.bind import num_bound_mixers
from verl_tree.recurrence.fla import WORST_NODE_LEN


class CapacityChoice:
    """The capacity of one engine's mini-batches.

    `tree.capacity=auto` is decided at the first mini-batch with a backward, and at the first without one. By then the
    rollout engine has taken its memory.
    """

    def __init__(self, engine: ModelCalls) -> None:
        self._engine = engine
        self._chosen: dict[bool, int] = {}

    def of(self, data: TensorDict, *, forward_only: bool, longest_row: int) -> int:
        """Return the capacity for a mini-batch whose longest row on this rank has `longest_row` tokens.

        It counts the tokens of one pass, on all ranks of a team together. verl's `max_token_len_per_gpu` is per rank.

        Raises:
            ValueError: It is `auto`, and the memory is not known or too small.
        """
        option = self._engine.tree_config.capacity
        if option is None:
            return int(tu.get(data, "max_token_len_per_gpu")) * self._engine.team_size
        if isinstance(option, int):
            return option
        if forward_only not in self._chosen:
            choice = choose_capacity(self._engine, forward_only=forward_only, longest_row=longest_row)
            self._chosen[forward_only] = choice
        return self._chosen[forward_only]


def choose_capacity(engine: ModelCalls, *, forward_only: bool, longest_row: int) -> int:
    """Return the most tree tokens that fit into the memory of every rank; all ranks call it together.

    `tree.max_path_len` bounds the relayed paths; without it, the longest row of all ranks does.
    """
    device = device_of_rank()
    max_path_len = engine.tree_config.max_path_len or max(gather(longest_row))
    # States of recurrent layers go by nodes, so the probe has as many as may be.
    node_len = WORST_NODE_LEN if num_bound_mixers(engine.module) else None
    first = probe_layout(MIN_PROBE_TOKENS, max_path_len=max_path_len, node_len=node_len)

    def measure(num_tokens: int) -> Probe:
        layout = probe_layout(num_tokens, max_path_len=max_path_len, node_len=node_len)
        # Gradients of earlier packs, which wait for the last pack's exchange, are no part of its peak.
        engine.probe(first, forward_only=forward_only, is_last=False)
        peak = peak_bytes(lambda: engine.probe(layout, forward_only=forward_only, is_last=True), device=device)
        return Probe(layout.num_tokens, max(gather(peak)))

    with leaving_no_trace(list(engine.module.parameters()), device=device):
        # The first calls compile kernels and allocate what stays: gradients, and those that wait for their exchange.
        for is_last in (True, False):
            engine.probe(first, forward_only=forward_only, is_last=is_last)
        memory_bytes = min(gather(_memory_bytes(engine, device)))
        relayed_bytes = _relayed_bytes(engine, forward_only=forward_only, max_path_len=max_path_len)
        probe = largest_probe(measure, memory_bytes=memory_bytes - relayed_bytes)
    relayed = f"{relayed_bytes / GIB:.3g} GiB for relayed keys and values of paths of {max_path_len} tokens"
    given = f"{memory_bytes / GIB:.3g} GiB ({_source(engine)})"
    took = f"{probe.num_tokens} tokens took {probe.peak_bytes / GIB:.3g} GiB"
    # A larger probe may come out above the memory, too (see `peak_bytes`). It then says that fewer tokens fit.
    if relayed_bytes + probe.peak_bytes > memory_bytes and probe.num_tokens == first.num_tokens:
        raise ValueError(
            f"tree.capacity=auto: {given} do not hold {relayed} and one pack: {took}. Set "
            "model.enable_gradient_checkpointing=true, shorten the trajectories, or give more memory (tree.memory_gib)"
        )
    capacity = probe.capacity(memory_bytes - relayed_bytes)
    if dist.get_rank() == 0:
        kind = "without gradients" if forward_only else "with gradients"
        print(f"tree.capacity=auto: {capacity} tree tokens {kind}: {given} less {relayed}; {took}", flush=True)
    return capacity


def _memory_bytes(engine: ModelCalls, device: torch.device) -> int:
    """Return the bytes that packs and relayed keys and values may take on this rank."""
    if engine.tree_config.memory_gib is not None:
        return int(engine.tree_config.memory_gib * GIB)
    if device.type != "cuda":
        raise ValueError(
            "tree.memory_gib=None: tree.capacity=auto can ask only a CUDA device for its memory; give the GiB that one "
            "rank may use, or set tree.capacity to a number of tokens"
        )
    return free_bytes(device, engine.optimizer)


def _source(engine: ModelCalls) -> str:
    return "free on the device" if engine.tree_config.memory_gib is None else "tree.memory_gib"


def _relayed_bytes(engine: ModelCalls, *, forward_only: bool, max_path_len: int) -> int:
    """Return the bytes that the store and the gathered context of a section may take on the device."""
    options = engine.tree_config
    if options.relay == "never":
        return 0
    num_ranks = engine.team_size
    size = KeysAndValues.of_model(engine.module.config, dtype=engine.compute_dtype, num_ranks=num_ranks)
    return size.relayed_bytes(
        max_path_len,
        trains=not forward_only,
        recomputes=engine.model_config.enable_gradient_checkpointing,
        on_host=options.relay_store == "host",
    )
