"""A model call on Megatron: the hidden states of its tokens, then scores from vocabulary-parallel logits.

A rank of the last stage has part of the vocabulary. Its logits are made where a loss reads them, some positions at a
time. They are sent to no other rank unless a loss reads the largest of the whole vocabulary (top-k distillation).

Legend: S tokens of a call with padding, Q without, P positions, K (position, label) pairs, V the vocabulary of this
rank, C kinds of scores, N hidden size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from typing_extensions import override
from verl.utils.megatron_utils import unwrap_model

from verl_tree.engine.megatron.build import CallParams, TreeParams
from verl_tree.engine.routes.router_replay import RouterReplay
from verl_tree.engine.verl_configs import as_verl_expects
from verl_tree.functional.scorer import LogitReading, ScoredPairs, Scorer
from verl_tree.relay.calls import RelayCall
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device


def call_hidden_states(
    chunk: torch.nn.Module,
    call: RelayCall,
    layout: TreeLayout,
    *,
    plan: AttentionPlan,
    replay: RouterReplay | None,
    is_flat: bool = False,
) -> Tensor:
    """Run this stage of the model on one call; (S, 1, N), or this rank's part of S with `sequence_parallel`.

    With `is_flat` the call is one path, and Megatron's own attention and positions compute it.
    """
    model: Any = unwrap_model(chunk)
    host, device = layout.on_host, plan.subtree_end_T.device
    token_Q = torch.from_numpy(call.token_Q)
    size = parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1
    padded = [F.pad(each[token_Q], (0, -len(token_Q) % size)) for each in (host.token_ids_T, host.position_T)]
    token_ids_S, position_S = to_device(tuple(padded), device)
    num_positions = int(padded[1].max()) + 1  # on the host
    routes_LNk = None
    if replay is not None and replay.imposed_LNk is not None:
        # Padding has routes of zeros: it is routed as ever.
        routes_SNk = F.pad(replay.imposed_LNk, (0, 0, 0, 0, 0, len(position_S) - len(token_Q)))
        routes_LNk = routes_SNk.chunk(size)[parallel_state.get_tensor_model_parallel_rank() if size > 1 else 0]
        replay.imposed_LNk = routes_LNk
    params: CallParams
    if is_flat:
        ends, longest = torch.tensor([0, len(position_S)], dtype=torch.int32, device=device), len(position_S)
        params = CallParams(
            qkv_format="thd",
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            cu_seqlens_q_padded=ends,
            cu_seqlens_kv_padded=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            replay=replay,
            routes_LNk=routes_LNk,
        )
    else:
        params = TreeParams(
            replay=replay, routes_LNk=routes_LNk, plan=plan, position_S=position_S, num_positions=num_positions
        )
    # Else a last stage makes the logits of all positions.
    with as_verl_expects(model, post_process=False):
        return chunk(token_ids_S[None], position_S[None], None, packed_seq_params=params)


def log_probs_of(
    chunk: torch.nn.Module,
    hidden_S1N: Tensor,
    call: RelayCall,
    layout: TreeLayout,
    *,
    temperature: float | Tensor,
    calculate_entropy: bool,
    reading: LogitReading | None,
    chunk_size: int,
) -> Tensor:
    """Return the log-probs of what the call scores and maybe more kinds, (C, K), on each rank of a last stage."""
    model: Any = unwrap_model(chunk)
    device = hidden_S1N.device
    scorer_K, scored_K = torch.from_numpy(call.scorer_K), torch.from_numpy(call.scored_K)
    pairs = ScoredPairs.of_scorers(scorer_K, layout.on_host.token_ids_T[scored_K])
    if isinstance(temperature, Tensor):
        temperature = temperature[torch.from_numpy(call.token_Q)[pairs.position_P]].to(device)
    on_device = to_device((pairs.position_P, pairs.pair_position_K, pairs.label_K), device)
    is_tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if is_tied else model.output_layer.weight
    hidden = _whole(hidden_S1N, model.config)[:, 0]
    scorer = VocabularyParallelScorer(
        pairs=ScoredPairs(*on_device),
        pair_bounds=pairs.chunk_bounds(chunk_size),
        model_name=type(model).__name__,
        num_tokens=len(hidden),
        temperature_P=temperature,
        calculate_entropy=calculate_entropy,
        chunk_size=chunk_size,
        reading=None if reading is None else reading.of_call(torch.from_numpy(call.token_Q), device=device),
    )
    rows = hidden[on_device[0]].to(weight.dtype)
    return scorer.score(rows[None], project=partial(F.linear, weight=weight))


def values_of(chunk: torch.nn.Module, hidden_S1N: Tensor, call: RelayCall) -> Tensor:
    """Return the values of what the call scores, (1, K), on each rank of a last stage."""
    model: Any = unwrap_model(chunk)
    values, _ = model.output_layer(hidden_S1N)
    (scorer_K,) = to_device((torch.from_numpy(call.scorer_K),), hidden_S1N.device)
    return values[:, 0, 0].float()[scorer_K][None]


def _whole(hidden: Tensor, config: Any) -> Tensor:
    """Return the hidden states of all tokens, whose gradients are then added up over the parts of the vocabulary."""
    if config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    return copy_to_tensor_model_parallel_region(hidden)


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyParallelScorer(Scorer):
    """A scorer whose logits are those of this rank's part of the vocabulary; each rank has all scores."""

    @override
    def _whole(self, logits_PV: Tensor) -> Tensor:
        return gather_from_tensor_model_parallel_region(logits_PV)

    @override
    def _kinds(self, logits_PV: Tensor, row_K: Tensor, label_K: Tensor) -> list[Tensor]:
        group: Any = parallel_state.get_tensor_model_parallel_group()
        size = logits_PV.shape[-1]
        largest_P = logits_PV.detach().amax(-1)
        dist.all_reduce(largest_P, op=dist.ReduceOp.MAX, group=group)
        shifted_PV = logits_PV - largest_P[:, None]
        exp_PV = shifted_PV.exp()
        total_P = reduce_from_tensor_model_parallel_region(exp_PV.sum(-1))
        place_K = label_K - size * dist.get_rank(group)
        is_mine_K = (place_K >= 0) & (place_K < size)
        mine_K = shifted_PV[row_K, place_K.clamp(0, size - 1)] * is_mine_K
        kinds = [reduce_from_tensor_model_parallel_region(mine_K) - total_P.log()[row_K]]
        if self.calculate_entropy:
            mean_P = reduce_from_tensor_model_parallel_region((exp_PV * shifted_PV).sum(-1)) / total_P
            kinds.append((total_P.log() - mean_P)[row_K])
        return kinds
