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

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.attention.hf import no_mask
from verl_tree.families import LOGIT_TRANSFORMS
from verl_tree.functional.images import CallImages, distinct_images
from verl_tree.functional.scorer import (
    LogitReading,
    ScoredPairs,
    Scorer,
    auto_chunk_size,
    transforms_logits,
)
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.transfer import to_device


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
    images: CallImages | None = None,
    temperature: float | Tensor = 1.0,
    calculate_entropy: bool = False,
    reading: LogitReading | None = None,
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
        images: What a vision-language model reads besides the tokens, on the host, for a rank that computes alone; its
            positions stand in for `position_Q`. None for every other model.
        temperature: Divides the logits; a number, or (Q,) by the position whose logits it divides, on either device.
        calculate_entropy: Also compute the entropy.
        reading: Further kinds of scores of the positions, for a rank that computes alone.
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
    chunk_size = auto_chunk_size(model) if chunk_size is None else chunk_size
    by_token = [token_ids_Q, position_Q]
    if isinstance(temperature, Tensor) and temperature.dim():
        by_token.append(temperature)
    device = plan.subtree_end_T.device
    of_pairs = (own.position_P, own.pair_position_K, own.label_K, index_M)
    position_P, pair_position_K, label_K, index_M, token_ids_L, position_L, *temperatures = to_device(
        (*of_pairs, *map(shard.slice, by_token)), device
    )
    scorer = Scorer(
        ScoredPairs(position_P, pair_position_K, label_K),
        pair_bounds=own.chunk_bounds(chunk_size),
        model_name=type(model).__name__,
        num_tokens=shard.local_len,
        temperature_P=temperatures[0][position_P] if temperatures else temperature,
        calculate_entropy=calculate_entropy,
        chunk_size=chunk_size,
        reading=reading,
    )
    assert reading is None or shard.num_ranks == 1, "top-k distillation is refused where several ranks compute a call"
    inputs = {
        "input_ids": token_ids_L.unsqueeze(0),
        "position_ids": position_L.unsqueeze(0),
        "attention_mask": no_mask(model.config, device),
        "use_cache": False,
        "logits_to_keep": position_P,
        "tree_plan": plan,
    }
    tower = nullcontext()
    if images is not None:
        assert shard.num_ranks == 1, "images are refused where several ranks compute a call"
        images = images.to(device)
        inputs |= images.model_inputs(model.config)
        tower = distinct_images(model, images)
    if transforms_logits(model):
        with tower:
            scores_CM = scorer.score(model(**inputs).logits)
    else:
        with tower, scoring_head(head, scorer) as calls:
            logits_1CM = model(**inputs).logits
        _check_untouched(model, calls, logits_1CM)
        scores_CM = logits_1CM[0]
    return shard.collect(scores_CM, index_M, num_scores=len(pairs.label_K))


class _HeadCall(NamedTuple):
    """One call of the output head: its scores, and the copy of them that the model got in place of logits."""

    scores_CK: Tensor
    logits_1CK: Tensor


@contextmanager
def scoring_head(head: torch.nn.Module, scorer: Scorer) -> Iterator[list[_HeadCall]]:
    """Let `head` map hidden states to scores instead of logits while active, and yield the list of its calls.

    The head's own forward (LoRA and all) still makes the logits. Only this instance is changed, and it is restored also
    on error.
    """
    # The backward pass, which recomputes chunks after the head is restored, calls this `project` too.
    project = head.forward
    calls: list[_HeadCall] = []

    def forward(hidden_1RD: Tensor) -> Tensor:
        scores_CK = scorer.score(hidden_1RD, project=project)
        # A copy: FSDP2 hangs its backward hook on the model's outputs, and a view could lose it.
        calls.append(_HeadCall(scores_CK.detach(), torch.stack([scores_CK])))
        return calls[-1].logits_1CK

    instance_forward = vars(head).get("forward")
    head.forward = forward
    try:
        yield calls
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
            f"key that says so to {sorted(LOGIT_TRANSFORMS)} in verl_tree.families"
        )
    if scores_CK.numel():
        _compared.add(model)
