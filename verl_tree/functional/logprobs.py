"""Log-probs and entropy of tree tokens: token t is scored by the logits at its parent.

At a branch point one set of logits scores several next tokens. Only positions with a child that a loss reads are
projected to the vocabulary. They are projected in chunks whose logits are recomputed in the backward pass, so that the
logits of all positions never exist at once.

The projection must happen inside the model's own forward, because outside it FSDP2 holds only a shard of the head's
weight. So while the model runs, this instance of the head returns scores in place of logits (`scoring_head`).

Where several ranks compute a call together, a pair is scored on the rank that has the hidden state of its position. No
hidden state travels: the ranks add up their scores.

Legend: T tree tokens of a pack, Q tokens that the model computes, P projected positions, K (position, label) pairs, M
of them scored on this rank, V vocabulary, C kinds of scores, R rows that the model hands to its head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Self
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from verl_tree.attention.hf import no_mask
from verl_tree.attention.plan import AttentionPlan
from verl_tree.attention.sharding import SequenceShard
from verl_tree.functional.linear_choice import fused_log_probs
from verl_tree.functional.linear_log_probs import LabelledPairs, LogitTransform
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.transfer import to_device

_MIN_AUTO_CHUNK_SIZE = 1024
_MAX_AUTO_CHUNK_LOGITS = 2**25  # 128 MiB in float32

_LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}
"""Config keys of architectures that change the logits behind their head, with the value that changes nothing."""

_FUSED_TRANSFORMS: dict[str, Callable[[PretrainedConfig], LogitTransform]] = {
    "cohere": lambda config: LogitTransform(config.logit_scale),
    "cohere2": lambda config: LogitTransform(config.logit_scale),
    "gemma2": lambda config: LogitTransform(softcap=config.final_logit_softcapping),
    "granite": lambda config: LogitTransform(1.0 / config.logits_scaling),
    "granitemoe": lambda config: LogitTransform(1.0 / config.logits_scaling),
}
"""What some of them do, by model type. A fused kernel does it itself."""


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


@dataclass(frozen=True, slots=True, eq=False)
class TreeLogProbs:
    """Scores of a pack's tokens, 0.0 where a token was not scored."""

    log_probs_T: Tensor  # (T,) log-prob of each token after its path; float32, or float64 for a float64 model
    entropy_T: Tensor | None  # (T,) entropy of the distribution that each token was drawn from, in nats, or None


def tree_forward_log_probs(
    model: PreTrainedModel,
    layout: TreeLayout,
    *,
    plan: AttentionPlan,
    wanted_T: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    calculate_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int | None = None,
) -> TreeLogProbs:
    """Run a causal LM on one pack and score the wanted tokens.

    `wanted_T` (T,) bool marks the tokens whose scores are read; None: every token with a parent. It is best on the
    host, where it is read. The other arguments and the errors are those of `forward_scores`; the layout may be on any
    device.
    """
    host = layout.on_host
    token_K = scored_tokens(host, None if wanted_T is None else wanted_T.cpu())
    scores_CK = forward_scores(
        model,
        token_ids_Q=host.token_ids_T,
        position_Q=host.position_T,
        pairs=ScoredPairs.of_scorers(host.parent_T[token_K], host.token_ids_T[token_K]),
        plan=plan,
        temperature=temperature,
        calculate_entropy=calculate_entropy,
        entropy_requires_grad=entropy_requires_grad,
        chunk_size=chunk_size,
    )
    (token_K,) = to_device((token_K,), scores_CK.device)
    # Every scored token occurs once, so nothing is overwritten.
    scores_CT = scores_CK.new_zeros(scores_CK.shape[0], layout.num_tokens).index_copy(1, token_K, scores_CK)
    return TreeLogProbs(scores_CT[0], scores_CT[1] if calculate_entropy else None)


def scored_tokens(layout: TreeLayout, wanted_T: Tensor | None = None) -> Tensor:
    """Return the tokens of a pack that are wanted and have a parent, (K,) int64, ordered by their parents.

    The children of one position stay in DFS order. Roots have no parent that could score them.
    """
    is_scored_T = layout.parent_T >= 0 if wanted_T is None else (layout.parent_T >= 0) & wanted_T
    token_K = is_scored_T.nonzero().squeeze(1)
    return token_K[layout.parent_T[token_K].sort(stable=True).indices]


def forward_scores(
    model: PreTrainedModel,
    *,
    token_ids_Q: Tensor,
    position_Q: Tensor,
    pairs: ScoredPairs,
    plan: AttentionPlan,
    temperature: float | Tensor = 1.0,
    calculate_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int | None = None,
) -> Tensor:
    """Run a causal LM on the queries of a plan and score the pairs, (C, K): log-probs and, if asked for, entropy.

    The ranks of the plan's shard call it together with the same arguments, and all get all scores. The model is on the
    plan's device, tokens and pairs are on the host.

    Args:
        model: A transformers causal LM whose attention implementation is "tree_attention", bare or wrapped by PEFT or
            FSDP2.
        token_ids_Q: (Q,) int64, the tokens that the model computes.
        position_Q: (Q,) int64, their positions.
        pairs: What is scored.
        plan: The attention plan. Its context, if any, comes from the store that it carries.
        temperature: Divides the logits; a number, or (Q,) by the position whose logits it divides, on either device.
        calculate_entropy: Also compute the entropy.
        entropy_requires_grad: Whether gradients flow through the entropy.
        chunk_size: Positions projected at a time. None: at least 1,024, more while their logits stay below 2**25
            numbers. Several chunks are recomputed in the backward pass. A single one is kept, as nothing would be
            saved.

    Raises:
        ValueError: The chunk size is not positive; or the model has no output head, does not run it once on the wanted
            or on all positions, or changes the logits behind it in a way that is not known here.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: give a positive number of positions, or None")
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: log-probs need a causal LM")
    shard = plan.shard
    own, index_M = pairs.on_shard(shard)
    chunk_size = _auto_chunk_size(model) if chunk_size is None else chunk_size
    by_token = [token_ids_Q, position_Q]
    if isinstance(temperature, Tensor) and temperature.dim():
        by_token.append(temperature)
    device = plan.subtree_end_T.device
    of_pairs = (own.position_P, own.pair_position_K, own.label_K, index_M)
    position_P, pair_position_K, label_K, index_M, token_ids_L, position_L, *temperatures = to_device(
        (*of_pairs, *map(shard.slice, by_token)), device
    )
    scorer = _Scorer(
        ScoredPairs(position_P, pair_position_K, label_K),
        pair_bounds=own.chunk_bounds(chunk_size),
        model_name=type(model).__name__,
        num_tokens=shard.local_len,
        temperature_P=temperatures[0][position_P] if temperatures else temperature,
        calculate_entropy=calculate_entropy,
        entropy_requires_grad=entropy_requires_grad,
        chunk_size=chunk_size,
    )
    inputs = {
        "input_ids": token_ids_L.unsqueeze(0),
        "position_ids": position_L.unsqueeze(0),
        "attention_mask": no_mask(model.config, device),
        "use_cache": False,
        "logits_to_keep": position_P,
        "tree_plan": plan,
    }
    if transforms_logits(model):
        with transformed_head(head, scorer, _fused_transform(model)) as fused:
            logits_1XX = model(**inputs).logits
        # Zeros, added for the backward hooks that FSDP2 hangs on the model's outputs.
        scores_CM = fused[0] + 0.0 * logits_1XX[0] if fused else scorer.score(logits_1XX)
    else:
        with scoring_head(head, scorer) as calls:
            logits_1CM = model(**inputs).logits
        _check_untouched(model, calls, logits_1CM)
        scores_CM = logits_1CM[0]
    return shard.collect(scores_CM, index_M, num_scores=len(pairs.label_K))


def transforms_logits(model: PreTrainedModel) -> bool:
    """Return whether the architecture caps or scales the logits behind its head."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return any(config.get(key, neutral) not in (neutral, None) for key, neutral in _LOGIT_TRANSFORMS.items())


def _fused_transform(model: PreTrainedModel) -> LogitTransform | None:
    """Return what the architecture does to the logits behind its head, or None if a fused kernel does not know it."""
    config = model.config.get_text_config(decoder=True)
    return _FUSED_TRANSFORMS[config.model_type](config) if config.model_type in _FUSED_TRANSFORMS else None


class _HeadCall(NamedTuple):
    """One call of the output head: its scores, and the copy of them that the model got in place of logits."""

    scores_CK: Tensor
    logits_1CK: Tensor


@contextmanager
def scoring_head(head: torch.nn.Module, scorer: "_Scorer") -> Iterator[list[_HeadCall]]:
    """Let `head` map hidden states to scores instead of logits while active, and yield the list of its calls.

    The head's own forward (LoRA and all) still makes the logits. Only this instance is changed, and it is restored also
    on error.
    """
    # The backward pass, which recomputes chunks after the head is restored, calls this `project` too.
    project = head.forward
    calls: list[_HeadCall] = []

    def forward(hidden_1RD: Tensor) -> Tensor:
        scores_CK = scorer.score(hidden_1RD, head=head, project=project)
        # A copy: FSDP2 hangs its backward hook on the model's outputs, and a view could lose it.
        calls.append(_HeadCall(scores_CK.detach(), torch.stack([scores_CK])))
        return calls[-1].logits_1CK

    with _replaced_forward(head, forward):
        yield calls


@contextmanager
def transformed_head(
    head: torch.nn.Module, scorer: "_Scorer", transform: LogitTransform | None
) -> Iterator[list[Tensor]]:
    """Let a fused kernel score the hidden states that `head` gets, if the transform behind the head is known to it.

    Yields the list of its scores, (C, K). The model gets zeros in place of logits, so that its transform does no harm.
    The list stays empty, and the model gets its logits, where no kernel serves.
    """
    project = head.forward
    calls: list[Tensor] = []

    def forward(hidden_1RD: Tensor) -> Tensor:
        if transform is not None:
            fused_CK = scorer.score_fused(hidden_1RD, head=head, project=project, transform=transform)
            if fused_CK is not None:
                calls.append(fused_CK)
                return torch.stack([fused_CK - fused_CK.detach()])
        return project(hidden_1RD)

    with _replaced_forward(head, forward):
        yield calls


@contextmanager
def _replaced_forward(head: torch.nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    instance_forward = vars(head).get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if instance_forward is None:
            del head.forward
        else:
            head.forward = instance_forward


_compared: WeakSet[torch.nn.Module] = WeakSet()
"""Models whose logits were compared once and came out unchanged."""


def _check_untouched(model: torch.nn.Module, calls: list[_HeadCall], logits_1CK: Tensor) -> None:
    """Refuse a model that did not run its head exactly once, or changed the logits behind it."""
    model_name = type(model).__name__
    if len(calls) != 1:
        raise ValueError(
            f"{model_name} ran its output head {len(calls)} times in one forward: log-probs need a forward that "
            "projects its hidden states once (fused losses do not: with verl set use_fused_kernels=false)"
        )
    scores_CK, given_1CK = calls[0]
    # Usually it is the same tensor, never written to, which the host knows. Comparing values waits for the device, so
    # that is done once for a model.
    if logits_1CK is given_1CK and not given_1CK.is_inference() and given_1CK._version == 0:
        return
    if model in _compared and scores_CK.unsqueeze(0).shape == logits_1CK.shape:
        return
    before, after = scores_CK.unsqueeze(0).to(logits_1CK.dtype), logits_1CK.detach()
    if before.shape != after.shape or not torch.equal(before.nan_to_num(), after.nan_to_num()):
        raise ValueError(
            f"{model_name} changes the logits behind its output head in a way that is not known here: add the config "
            f"key that says so to {sorted(_LOGIT_TRANSFORMS)} in verl_tree.functional.logprobs"
        )
    if scores_CK.numel():
        _compared.add(model)


def _auto_chunk_size(model: PreTrainedModel) -> int:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return max(_MIN_AUTO_CHUNK_SIZE, _MAX_AUTO_CHUNK_LOGITS // vocab_size)


def _at(temperature: float | Tensor, index: Tensor | slice) -> float | Tensor:
    """Return the temperature at some positions: a part of a tensor, or the one number of all."""
    return temperature[index] if isinstance(temperature, Tensor) and temperature.dim() else temperature


@dataclass(frozen=True, slots=True, eq=False)
class _Scorer:
    """The way from hidden states, or logits, to (C, K) scores: log-probs and maybe entropy."""

    pairs: ScoredPairs  # on the device of the hidden states
    pair_bounds: list[int]  # `ScoredPairs.chunk_bounds`
    model_name: str
    num_tokens: int
    temperature_P: float | Tensor
    calculate_entropy: bool
    entropy_requires_grad: bool
    chunk_size: int

    def score(
        self,
        rows_1RX: Tensor,
        *,
        head: torch.nn.Module | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Score all pairs as (C, K): by a fused kernel or chunk by chunk.

        `rows_1RX` are the hidden states (1, R, X) of the P wanted or of all T positions; without `head` and its forward
        `project`, the logits.
        """
        if head is not None and project is not None:
            fused_CK = self.score_fused(rows_1RX, head=head, project=project, transform=LogitTransform())
            if fused_CK is not None:
                return fused_CK
        rows_PX = self._wanted(rows_1RX.flatten(0, -2))
        num_positions = rows_PX.shape[0]
        starts = list(range(0, num_positions, self.chunk_size)) or [0]
        chunks = []
        for number, start in enumerate(starts):
            rows, pairs = slice(start, start + self.chunk_size), slice(*self.pair_bounds[number : number + 2])
            row_K, label_K = self.pairs.pair_position_K[pairs] - start, self.pairs.label_K[pairs]
            args = (rows_PX[rows], project, _at(self.temperature_P, rows), row_K, label_K)
            if len(starts) > 1 and torch.is_grad_enabled():
                chunks.append(checkpoint(self._score_chunk, *args, use_reentrant=False))
            else:
                chunks.append(self._score_chunk(*args))
        return torch.cat(chunks, dim=1)

    def score_fused(
        self,
        hidden_1RX: Tensor,
        *,
        head: torch.nn.Module,
        project: Callable[[Tensor], Tensor],
        transform: LogitTransform,
    ) -> Tensor | None:
        """Score all pairs with a fused kernel, or return None where it does not serve."""
        labelled = LabelledPairs(
            self.pairs.pair_position_K,
            self.pairs.label_K,
            self.temperature_P,
            transform,
            calculate_entropy=self.calculate_entropy,
            entropy_requires_grad=self.entropy_requires_grad,
        )
        return fused_log_probs(head, project, self._wanted(hidden_1RX.flatten(0, -2)), labelled)

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
    ) -> Tensor:
        logits_PV = rows_PX if project is None else project(rows_PX)
        logits_PV = logits_PV if logits_PV.dtype == torch.float64 else logits_PV.float()
        if isinstance(temperature_P, Tensor):
            logits_PV = logits_PV / temperature_P.to(logits_PV.dtype).unsqueeze(-1)
        elif temperature_P != 1.0:  # a division by one would still be a pass over all logits
            logits_PV = logits_PV / temperature_P
        log_probs_PV = logits_PV.log_softmax(-1)
        log_probs_K = log_probs_PV[row_K, label_K]
        if not self.calculate_entropy:
            return log_probs_K.unsqueeze(0)
        with torch.set_grad_enabled(self.entropy_requires_grad and torch.is_grad_enabled()):
            entropy_P = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
        return torch.stack((log_probs_K, entropy_P[row_K]))
