"""What a model call scores, and the way from hidden states, or logits, to scores.

Positions are projected to the vocabulary in chunks whose logits are recomputed in the backward pass.

Legend: Q tokens of a model call, T tokens that the model computes on this rank, P projected positions, K (position,
label) pairs, M of them on this rank, V vocabulary, C kinds of scores, R rows that the model hands to its head, X hidden
size or V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from verl_tree.families import LOGIT_TRANSFORMS
from verl_tree.tree.sharding import SequenceShard

_MIN_AUTO_CHUNK_SIZE = 1024
_MAX_AUTO_CHUNK_LOGITS = 2**25  # 128 MiB in float32


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPairs:
    """Which positions are projected to the vocabulary, and which log-probs are read there."""

    position_P: Tensor  # (P,) int64, places of the positions among the tokens that the model computes, ascending
    pair_position_K: Tensor  # (K,) int64, index into P, ascending
    label_K: Tensor  # (K,) int64, token id that the pair scores

    def chunk_bounds(self, chunk_size: int) -> list[int]:
        """Return where the pairs of each chunk of positions start, and one past the last pair; on the host."""
        starts = torch.arange(0, max(1, len(self.position_P)), chunk_size)
        return [*torch.searchsorted(self.pair_position_K, starts).tolist(), len(self.label_K)]

    @classmethod
    def of_scorers(cls, scorer_K: Tensor, label_K: Tensor) -> Self:
        """Pair places, (K,) int64 ascending, with the ids of the tokens that are scored there."""
        position_P, pair_position_K = torch.unique_consecutive(scorer_K, return_inverse=True)
        return cls(position_P, pair_position_K, label_K)

    def on_shard(self, shard: SequenceShard) -> tuple[Self, Tensor]:
        """Return the pairs whose positions lie on this rank, with places in its shard, and which they are, (M,)."""
        index_M, place_M = shard.own(self.position_P[self.pair_position_K])
        own = self if shard.num_ranks == 1 else self.of_scorers(place_M, self.label_K[index_M])
        return own, index_M


class LogitReading(Protocol):
    """What else is read of the logits than the log-prob of a label and the entropy: further kinds of scores."""

    def of_call(self, token_Q: Tensor, *, device: torch.device) -> Self:
        """Return the reading of one model call, of which `token_Q` (Q,) are the tree tokens, on the host."""
        ...

    def __call__(self, logits_PV: Tensor, position_P: Tensor) -> Tensor:
        """Return the kinds, (C, P), at some places among the Q tokens; the logits are divided by the temperature."""
        ...


def transforms_logits(model: PreTrainedModel) -> bool:
    """Return whether the architecture caps or scales the logits behind its head."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return any(config.get(key, neutral) not in (neutral, None) for key, neutral in LOGIT_TRANSFORMS.items())


def auto_chunk_size(model: PreTrainedModel) -> int:
    """Return how many positions are projected at a time where the caller does not say."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return max(_MIN_AUTO_CHUNK_SIZE, _MAX_AUTO_CHUNK_LOGITS // vocab_size)


def _at(temperature: float | Tensor, index: Tensor | slice) -> float | Tensor:
    """Return the temperature at some positions: a part of a tensor, or the one number of all."""
    return temperature[index] if isinstance(temperature, Tensor) and temperature.dim() else temperature


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """The way from hidden states, or logits, to (C, K) scores: log-probs and maybe entropy."""

    pairs: ScoredPairs  # on the device of the hidden states
    pair_bounds: list[int]  # `ScoredPairs.chunk_bounds`
    model_name: str
    num_tokens: int
    temperature_P: float | Tensor
    calculate_entropy: bool
    chunk_size: int
    reading: LogitReading | None = None

    def score(self, rows_1RX: Tensor, *, project: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Score all pairs as (C, K), chunk by chunk: log-probs, maybe entropy, and what `reading` makes.

        `rows_1RX` are the hidden states (1, R, X) of the P wanted or of all T positions; without `project`, the head's
        forward, the logits.
        """
        rows_PX = self._wanted(rows_1RX.flatten(0, -2))
        num_positions = rows_PX.shape[0]
        starts = list(range(0, num_positions, self.chunk_size)) or [0]
        chunks = []
        for number, start in enumerate(starts):
            rows, pairs = slice(start, start + self.chunk_size), slice(*self.pair_bounds[number : number + 2])
            row_K, label_K = self.pairs.pair_position_K[pairs] - start, self.pairs.label_K[pairs]
            position_P = self.pairs.position_P[rows]
            args = (rows_PX[rows], project, _at(self.temperature_P, rows), row_K, label_K, position_P)
            if len(starts) > 1 and torch.is_grad_enabled():
                chunks.append(checkpoint(self._score_chunk, *args, use_reentrant=False))
            else:
                chunks.append(self._score_chunk(*args))
        return torch.cat(chunks, dim=1)

    def _wanted(self, rows_RX: Tensor) -> Tensor:
        """Select the wanted positions if the model's forward did not."""
        num_rows, num_wanted = rows_RX.shape[0], self.pairs.position_P.shape[0]
        if num_rows == num_wanted:
            return rows_RX
        # A forward without `logits_to_keep`, as verl patches into vision models, hands over all positions. These are
        # more than the wanted ones, as the last token of a pack has no child.
        if num_rows == self.num_tokens:
            return rows_RX.index_select(0, self.pairs.position_P)
        raise ValueError(
            f"{self.model_name} projects {num_rows} positions where {num_wanted} of {self.num_tokens} are wanted: its "
            "forward must honour `logits_to_keep`, or project all positions in one call of its output head"
        )

    def _score_chunk(
        self,
        rows_PX: Tensor,
        project: Callable[[Tensor], Tensor] | None,
        temperature_P: float | Tensor,
        row_K: Tensor,
        label_K: Tensor,
        position_P: Tensor,
    ) -> Tensor:
        logits_PV = rows_PX if project is None else project(rows_PX)
        logits_PV = logits_PV if logits_PV.dtype == torch.float64 else logits_PV.float()
        if isinstance(temperature_P, Tensor):
            logits_PV = logits_PV / temperature_P.to(logits_PV.dtype).unsqueeze(-1)
        elif temperature_P != 1.0:  # a division by one would still be a pass over all logits
            logits_PV = logits_PV / temperature_P
        kinds_CK = [each.unsqueeze(0) for each in self._kinds(logits_PV, row_K, label_K)]
        if self.reading is not None:
            kinds_CK.append(self.reading(self._whole(logits_PV), position_P)[:, row_K].to(kinds_CK[0].dtype))
        return torch.cat(kinds_CK) if len(kinds_CK) > 1 else kinds_CK[0]

    def _whole(self, logits_PV: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary, which a reading wants."""
        return logits_PV

    def _kinds(self, logits_PV: Tensor, row_K: Tensor, label_K: Tensor) -> list[Tensor]:
        """Return the log-probs of the pairs and, if asked for, their entropies, (K,) each."""
        log_probs_PV = logits_PV.log_softmax(-1)
        kinds = [log_probs_PV[row_K, label_K]]
        if self.calculate_entropy:
            entropy_P = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
            kinds.append(entropy_P[row_K])
        return kinds
