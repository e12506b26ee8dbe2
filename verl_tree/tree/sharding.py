"""How the tokens of one model call lie on several ranks: Ulysses sequence parallelism.

The ranks of a *team* compute one call together. Token i lies on rank i % R, its *shard*. Everything in a layer but
attention works token by token, so it runs on the shard alone. Around attention one exchange turns all heads of some
tokens into some heads of all tokens, and back. So a backend sees an ordinary pack with fewer heads.

Example, a call of five tokens a..e and four heads 0..3 on two ranks; `.` is padding::

            a shard          scatter_heads     attention       gather_heads
    rank 0  a c e, 0 1 2 3   ───────────────▶  a b c d e, 0 1  ──────────────▶  a c e, 0 1 2 3
    rank 1  b d ., 0 1 2 3   ───────────────▶  a b c d e, 2 3  ──────────────▶  b d ., 0 1 2 3

Neighbours lie on different ranks, because long stretches of a trajectory, its prompt for one, are not scored. So every
rank projects about as many tokens to the vocabulary.

Source: DeepSpeed-Ulysses (arXiv 2309.14509); verl 0.9.1, utils/ulysses.py.

Legend: Q tokens of a call, L of them on a rank (padded), R ranks of a team, H heads, D head dim, K scores of a call, M
of them made on this rank, C kinds of scores.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SequenceShard:
    """This rank's part of a call of `num_tokens` tokens; `team` is its process group, None for a rank alone."""

    # Not a dataclass: FSDP copies those among a module's arguments.

    def __init__(self, num_tokens: int, team: dist.ProcessGroup | None = None) -> None:
        self.num_tokens = num_tokens
        self.num_ranks = 1 if team is None else dist.get_world_size(team)
        self._team = team
        self._rank = 0 if team is None else dist.get_rank(team)

    @property
    def local_len(self) -> int:
        """Tokens on every rank of the team, padding included: L."""
        return -(-self.num_tokens // self.num_ranks)

    def slice(self, x_Q: Tensor) -> Tensor:
        """Return this rank's part, (L,), of one number per token; 0 for padding."""
        if self._team is None:
            return x_Q
        padding = self.local_len * self.num_ranks - self.num_tokens
        return torch.nn.functional.pad(x_Q, (0, padding))[self._rank :: self.num_ranks].contiguous()

    def own(self, place_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of these places in Q lie on this rank, (M,), and where in the shard, (M,)."""
        if self._team is None:
            return torch.arange(len(place_K), device=place_K.device), place_K
        index_M = (place_K % self.num_ranks == self._rank).nonzero().squeeze(1)
        return index_M, place_K[index_M] // self.num_ranks

    def collect(self, scores_CM: Tensor, index_M: Tensor, *, num_scores: int) -> Tensor:
        """Return the scores of all ranks, (C, K), from those made here, which are number `index_M` of K.

        Every rank computes the loss from them. The gradients of the first rank count, because a loss may draw random
        numbers. The backward pass multiplies them by R, because whoever averages the gradients of the parameters over
        all ranks, as FSDP does, divides by R too often.
        """
        if self._team is None:
            return scores_CM
        part_CK = scores_CM.new_zeros(scores_CM.shape[0], num_scores).index_copy(1, index_M, scores_CM)
        return _SumOverTeam.apply(part_CK, self._team, self._gradient_factor)

    def scatter_heads(self, q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of all tokens for this rank's heads, (Q, H / R, D); differentiable.

        Where there are fewer key-value heads than ranks, several ranks get the same one.

        Raises:
            ValueError: The heads cannot be dealt to the ranks evenly.
        """
        if self._team is None:
            return q_LHD, k_LHD, v_LHD
        reason = why_not_dealt(q_LHD.shape[1], k_LHD.shape[1], num_ranks=self.num_ranks)
        if reason:
            raise ValueError(f"ulysses_sequence_parallel_size={self.num_ranks}: {reason}")
        heads = [self._repeat(each) for each in (q_LHD, k_LHD, v_LHD)]
        q, k, v = self._all_to_all([each.unflatten(1, (self.num_ranks, -1)).transpose(0, 1) for each in heads])
        return self._in_order(q), self._in_order(k), self._in_order(v)

    def gather_heads(self, out_QHD: Tensor) -> Tensor:
        """Return all heads of this rank's tokens, (L, H, D), from some heads of all, (Q, H / R, D); differentiable."""
        if self._team is None:
            return out_QHD
        padding = self.local_len * self.num_ranks - self.num_tokens
        padded = torch.nn.functional.pad(out_QHD, (0, 0, 0, 0, 0, padding))
        (out_RLHD,) = self._all_to_all([padded.unflatten(0, (self.local_len, self.num_ranks)).transpose(0, 1)])
        return out_RLHD.transpose(0, 1).flatten(1, 2)

    def own_heads(self, x_H: Tensor) -> Tensor:
        """Return the numbers of this rank's query heads, (H / R,)."""
        return x_H.unflatten(0, (self.num_ranks, -1))[self._rank]

    @property
    def _gradient_factor(self) -> int:
        return self.num_ranks

    def _repeat(self, x_LHD: Tensor) -> Tensor:
        """Repeat heads until there is one for every rank."""
        num_heads = x_LHD.shape[1]
        return x_LHD if num_heads >= self.num_ranks else x_LHD.repeat_interleave(self.num_ranks // num_heads, dim=1)

    def _all_to_all(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Send block r of each tensor, (R, L, h, D), to rank r, and put there what rank r sent; all in one message."""
        flat = [each.flatten(2) for each in given]
        received = _AllToAll.apply(torch.cat(flat, dim=2), self._team).split([each.shape[2] for each in flat], dim=2)
        return [part.unflatten(2, each.shape[2:]) for part, each in zip(received, given, strict=True)]

    def _in_order(self, x_RLHD: Tensor) -> Tensor:
        """Return the tokens of all shards in the order of the call, without padding: (Q, h, D)."""
        return x_RLHD.transpose(0, 1).flatten(0, 1)[: self.num_tokens]


def why_not_dealt(num_heads: int, num_kv_heads: int, *, num_ranks: int) -> str | None:
    """Return why a team cannot deal a layer's heads to its ranks; None if it can."""
    if num_heads % num_ranks:
        return f"{num_heads} attention heads cannot be dealt to {num_ranks} ranks evenly; give a divisor of {num_heads}"
    if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
        return (
            f"{num_kv_heads} key-value heads cannot be dealt to {num_ranks} ranks evenly; give a divisor or a multiple "
            f"of {num_kv_heads}"
        )
    return None


class _AllToAll(torch.autograd.Function):
    """Block r of this rank becomes block `rank` of rank r. Done twice it changes nothing, so it is its own backward."""

    @staticmethod
    def forward(ctx: Any, x_RLn: Tensor, team: dist.ProcessGroup) -> Tensor:
        ctx.team = team
        return _exchange(x_RLn, team)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad_outputs[0], ctx.team), None


def _exchange(x_RLn: Tensor, team: dist.ProcessGroup) -> Tensor:
    received = torch.empty(x_RLn.shape, dtype=x_RLn.dtype, device=x_RLn.device)
    dist.all_to_all_single(received, x_RLn.contiguous(), group=team)
    return received


class _SumOverTeam(torch.autograd.Function):
    """The sum over a team, whose gradient is that of the first rank; see `SequenceShard.collect`."""

    @staticmethod
    def forward(ctx: Any, part_CK: Tensor, team: dist.ProcessGroup, factor: int) -> Tensor:
        ctx.team, ctx.factor = team, factor
        sum_CK = part_CK.clone()
        dist.all_reduce(sum_CK, group=team)
        return sum_CK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradient_CK = grad_outputs[0] * ctx.factor
        dist.broadcast(gradient_CK, group=ctx.team, group_src=0)
        return gradient_CK, None, None
