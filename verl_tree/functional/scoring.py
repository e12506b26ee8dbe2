"""`score`: how likely a model finds many continuations of one context, or one behind parts of a context; no gradient.

A judge asks 32 questions about one long answer; a retriever ranks 64 passages; a test has four choices. One after
another, the context runs for each of them. Here it runs once, all continuations are branches behind it, and nothing is
computed that nobody reads: a last token that only has to be scored is not run, and only positions whose distribution is
read are projected to the vocabulary.

Legend: K (position, label) pairs, S continuations, T tree tokens, Q tokens of a model call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.attention.hf import tree_attention_implementation
from verl_tree.functional.api import check_temperature, check_token_ids, num_embeddings
from verl_tree.functional.logprobs import forward_scores
from verl_tree.functional.relayed import forest_calls
from verl_tree.functional.scorer import ScoredPairs
from verl_tree.relay.run import call_plan
from verl_tree.relay.store import ContextStore
from verl_tree.tree import TokenForest
from verl_tree.tree.forest import as_token_ids
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class ContinuationScores:
    """Scores of the continuations of one context.

    Attributes:
        log_probs: One tensor for each continuation, in the order given, on the model's device: the log-probs of its
            tokens that were asked for, or of the labels. float32, or float64 for a float64 model.
        empty: (0,), of the same device and dtype: the sums and means of no continuations.
    """

    log_probs: list[Tensor]
    empty: Tensor

    @property
    def sums(self) -> Tensor:
        """The log-prob of each continuation, (S,): the sum over the tokens that were asked for."""
        return torch.stack([each.sum() for each in self.log_probs]) if self.log_probs else self.empty

    @property
    def means(self) -> Tensor:
        """The log-prob per token of each continuation, (S,), so that long ones can be compared with short ones."""
        return torch.stack([each.mean() for each in self.log_probs]) if self.log_probs else self.empty


def score(
    model: PreTrainedModel,
    context: ArrayLike,
    continuations: Sequence[ArrayLike],
    *,
    last: int | None = None,
    labels: ArrayLike | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
    capacity: int | None = None,
) -> ContinuationScores:
    """Score continuations of one context; see `score_batch`."""
    return score_batch(
        model,
        [(context, continuations)],
        last=last,
        labels=labels,
        temperature=temperature,
        backend=backend,
        capacity=capacity,
    )[0]


@torch.no_grad()
def score_batch(
    model: PreTrainedModel,
    contexts: Sequence[tuple[ArrayLike, Sequence[ArrayLike]]],
    *,
    last: int | None = None,
    labels: ArrayLike | None = None,
    temperature: float = 1.0,
    backend: str = "auto",
    capacity: int | None = None,
) -> list[ContinuationScores]:
    """Score continuations of several contexts, every shared token once, also what contexts share.

    Args:
        model: A transformers causal LM, bare or wrapped by PEFT. Its training mode stays as it is, so call
            `model.eval()` first if it has dropout.
        contexts: Pairs of a context and its continuations, all of them lists or 1-D arrays of token ids. A context has
            one token at least, and a continuation too, unless `labels` are given.
        last: Score only so many tokens at the end of each continuation. None: all of them.
        labels: Token ids. If given, what is scored is the token after each continuation: the log-probs of these ids.
        temperature: Divides the logits; a number above 0.
        backend: Attention backend, see `verl_tree.attention.BACKENDS`.
        capacity: Tree tokens that run at a time. None: no limit. Beyond it the model runs several times, each time
            behind the keys and values of what the tokens share with earlier ones (docs/relay.md), so a context may be
            of any length and still runs once.

    Returns:
        The scores of each context's continuations, in the order given.

    Raises:
        ValueError: A context or a continuation is empty or not of integers, a token id has no embedding, `last`, the
            temperature or the capacity is not positive, both `last` and `labels` are given, or the model or the backend
            cannot honour the tree.
    """
    check_temperature(temperature)
    reads = _Reads.of(contexts, last=last, labels=labels)
    empty = torch.empty(0, device=model.device, dtype=torch.promote_types(model.dtype, torch.float32))
    if not reads.sequences:
        return [ContinuationScores([], empty) for _ in contexts]
    forest = TokenForest.from_sequences(reads.sequences)
    check_token_ids(forest, model)
    vocab_size = num_embeddings(model)
    bad = reads.label_K[(reads.label_K < 0) | (reads.label_K >= vocab_size)]
    if len(bad):
        raise ValueError(
            f"a continuation or labels have the token id {bad[0]}, outside the vocabulary of {vocab_size} tokens: give "
            f"ids in 0..{vocab_size - 1}, from the tokenizer of this model"
        )
    layout = TreeLayout.from_forest(forest)
    # Continuations that begin alike read some distributions twice. Sorted, as the pairs of a call have to be.
    place_of = np.empty(layout.num_leaves, dtype=np.int64)
    place_of[layout.leaves] = np.arange(layout.num_leaves)
    flat_K = layout.leaf_offsets[place_of[reads.sequence_K]] + reads.position_K
    scorer_K = layout.tree_index_F.numpy()[flat_K].astype(np.int64)
    distinct, which_K = np.unique(scorer_K * vocab_size + reads.label_K, return_inverse=True)
    with tree_attention_implementation(model, max_path_len=int(forest.sequence_lens.max(initial=0))):
        found = _score_pairs(
            model,
            layout,
            scorer_K=distinct // vocab_size,
            label_K=distinct % vocab_size,
            temperature=temperature,
            backend=backend,
            capacity=capacity,
        )
    by_continuation = found[torch.from_numpy(which_K).to(found.device)].split(reads.num_read)
    bounds = [0, *accumulate(len(continuations) for _, continuations in contexts)]
    return [ContinuationScores(list(by_continuation[start:end]), empty) for start, end in pairwise(bounds)]


def score_without(
    model: PreTrainedModel,
    context: ArrayLike,
    spans: Sequence[tuple[int, int]],
    answer: ArrayLike,
    *,
    temperature: float = 1.0,
    backend: str = "auto",
    capacity: int | None = None,
) -> Tensor:
    """Score an answer behind a context, and behind the same context without each of some spans of it.

    What the answer owes to a note, a tool's result or a turn is the first number less that without it. All variants are
    one forest: each shares with the whole context what comes before its span. Behind a removed span tokens and
    positions close up, as if nothing had been there.

    Args:
        model: See `score_batch`.
        context: Token ids.
        spans: Where each span starts and where it ends (exclusive), as places in the context.
        answer: Token ids, one at least.
        temperature: See `score_batch`.
        backend: See `score_batch`.
        capacity: See `score_batch`.

    Returns:
        The log-prob of the answer, the sum over its tokens, (1 + spans,): behind all of the context, then without the
        first span, and so on. Of the model's device; float32, or float64 for a float64 model.

    Raises:
        ValueError: A span is empty, outside the context or all of it; or what `score_batch` refuses.
    """
    token_ids = as_token_ids(context, name="context")
    for start, end in spans:
        if not 0 <= start < end <= len(token_ids):
            raise ValueError(
                f"spans has ({start}, {end}) in a context of {len(token_ids)} tokens: give its start and its end "
                f"(exclusive), 0 <= start < end <= {len(token_ids)}"
            )
        if end - start == len(token_ids):
            raise ValueError(f"spans has ({start}, {end}), all of the context: a token must be left for the answer")
    variants = [token_ids, *(np.concatenate([token_ids[:start], token_ids[end:]]) for start, end in spans)]
    pairs = [(variant, [answer]) for variant in variants]
    scores = score_batch(model, pairs, temperature=temperature, backend=backend, capacity=capacity)
    return torch.cat([each.sums for each in scores])


class _Reads(NamedTuple):
    """What is to be run, and what is read of it."""

    sequences: list[IntArray]  # context and continuation, up to the last position that is read
    num_read: list[int]  # pairs of each continuation; the pairs lie one continuation after another
    sequence_K: IntArray
    position_K: IntArray  # in the sequence
    label_K: IntArray

    @classmethod
    def of(
        cls,
        contexts: Sequence[tuple[ArrayLike, Sequence[ArrayLike]]],
        *,
        last: int | None,
        labels: ArrayLike | None,
    ) -> Self:
        if last is not None and labels is not None:
            raise ValueError(
                f"last={last} and labels={labels}: labels stand behind a continuation, so give one of both"
            )
        if last is not None and last < 1:
            raise ValueError(f"last={last}: give a positive number of tokens, or None for all of a continuation")
        label_ids = None if labels is None else as_token_ids(labels, name="labels")
        if label_ids is not None and not len(label_ids):
            raise ValueError("labels is empty: give the token ids whose log-probs are wanted, or None")
        sequences, positions, label_parts = [], [], []
        for number, (context, continuations) in enumerate(contexts):
            start = as_token_ids(context, name=f"context {number}")
            if not len(start):
                raise ValueError(
                    f"context {number} is empty, and nothing says how likely a first token is: give at least the token "
                    "that begins a text for this model"
                )
            for place, continuation in enumerate(continuations):
                tokens = as_token_ids(continuation, name=f"continuation {place} of context {number}")
                if label_ids is None and not len(tokens):
                    raise ValueError(f"continuation {place} of context {number} is empty: give a token to score")
                whole = np.concatenate([start, tokens])
                if label_ids is None:
                    read, end = tokens[-(last or len(tokens)) :], len(whole) - 1
                    positions.append(np.arange(end - len(read), end))
                else:
                    read, end = label_ids, len(whole)
                    positions.append(np.full(len(read), end - 1))
                sequences.append(whole[:end])
                label_parts.append(read)
        num_read = [len(each) for each in label_parts]
        empty = np.empty(0, dtype=np.int64)
        return cls(
            sequences,
            num_read,
            sequence_K=np.repeat(np.arange(len(sequences)), num_read),
            position_K=np.concatenate([empty, *positions]),
            label_K=np.concatenate([empty, *label_parts]),
        )


def _score_pairs(
    model: PreTrainedModel,
    layout: TreeLayout,
    *,
    scorer_K: IntArray,
    label_K: IntArray,
    temperature: float,
    backend: str,
    capacity: int | None,
) -> Tensor:
    """Run a forest forward in as many sections as the capacity asks for; return the log-probs of the pairs, (K,).

    `layout` is on the host, and `scorer_K` ascending.
    """
    calls = forest_calls(layout, capacity=capacity, scores_tokens=False)  # pairs are scored instead
    store = ContextStore(calls.num_spine_tokens, num_cut_tokens=calls.num_cut_tokens)
    scores = []
    for call in calls.sections:
        # A section is a range of the preorder, and the pairs are in preorder.
        first, end = scorer_K.searchsorted([call.token_Q[0], call.token_Q[-1] + 1])
        token_Q = torch.from_numpy(call.token_Q)
        scores.append(
            forward_scores(
                model,
                token_ids_Q=layout.token_ids_T[token_Q],
                position_Q=layout.position_T[token_Q],
                pairs=ScoredPairs.of_scorers(
                    torch.from_numpy(scorer_K[first:end] - call.token_Q[0]), torch.from_numpy(label_K[first:end])
                ),
                plan=call_plan(call, store, writes=True, device=model.device, backend=backend),
                temperature=temperature,
            )[0]
        )
    return torch.cat(scores)
