"""`tree_log_probs`: the log-probs of trajectories that share prefixes, from any transformers causal LM."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.attention.hf import tree_attention_implementation
from verl_tree.functional.expansion import expand
from verl_tree.functional.logprobs import TreeLogProbs, tree_forward_log_probs
from verl_tree.functional.relayed import relayed_log_probs
from verl_tree.packing import pack
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLogProbs:
    """Scores of whole trajectories.

    Attributes:
        log_probs: Per sequence, in the order given, (len - 1,) log-probs of its tokens but the first; differentiable.
        entropy: The same shapes, in nats, or None.
        num_tree_tokens: Tree tokens. With several packs, a token counts in each of them that computes it.
        num_flat_tokens: Tokens of all sequences.
    """

    log_probs: list[Tensor]
    entropy: list[Tensor] | None
    num_tree_tokens: int
    num_flat_tokens: int


def tree_log_probs(
    model: PreTrainedModel,
    sequences: Sequence[ArrayLike],
    *,
    temperature: float = 1.0,
    calculate_entropy: bool = False,
    backend: str = "auto",
    capacity: int | None = None,
    packing: str | None = None,
) -> SequenceLogProbs:
    """Compute the log-probs of trajectories that share prefixes, every shared prefix once, forward and backward.

    It works for any transformers causal LM whose layers call transformers' attention interface. During the call the
    attention implementation is "tree_attention"; afterwards it is restored.

    Args:
        model: A causal LM, bare or wrapped by PEFT. Its training mode stays as it is.
        sequences: Lists or 1-D arrays of token ids, each with at least one token.
        temperature: Divides the logits; a number above 0.
        calculate_entropy: Also return the entropy of the distribution before each token.
        backend: Attention backend, see `verl_tree.attention.BACKENDS`.
        capacity: Tree tokens whose activations are held at a time, in the forward and in the backward pass. None: no
            limit. A forest that exceeds it runs in sections (docs/relay.md): without gradient in the forward pass, and
            again in the backward pass. That costs one forward pass more, and a store of keys and values.
        packing: A method of `verl_tree.packing.pack`, to make packs of a forest that exceeds the capacity instead. They
            run forward once, but a prefix runs in every pack that needs it, and the activations of all packs are held
            until the backward pass.

    Raises:
        ValueError: A sequence is empty or holds an id that the model has no embedding for; the temperature is no number
            above 0; a sequence is longer than a pack; the model or the backend cannot honour the tree; or the forest
            runs in sections and needs gradients, while the model draws random numbers or its parameters are sharded.
    """
    check_temperature(temperature)
    forest = TokenForest.from_sequences(sequences)
    parts: list[tuple[TreeLayout, TreeLogProbs]] = []
    with tree_attention_implementation(model, max_path_len=int(forest.sequence_lens.max(initial=0))):
        check_token_ids(forest, model)
        if packing is None and capacity is not None and forest.num_tokens > capacity:
            layout = TreeLayout.from_forest(forest, device=model.device)
            relayed = relayed_log_probs(
                model,
                layout,
                capacity=capacity,
                backend=backend,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
            )
            parts.append((layout, relayed))
        else:
            for part in pack(forest, capacity=capacity, method=packing or "auto").packs:
                layout = TreeLayout.from_forest(forest, part.leaves, device=model.device)
                packed = tree_forward_log_probs(
                    model,
                    layout,
                    plan=AttentionPlan.from_layout(layout, backend=backend),
                    temperature=temperature,
                    calculate_entropy=calculate_entropy,
                )
                parts.append((layout, packed))
    entropies = [(layout, scores.entropy_T) for layout, scores in parts if scores.entropy_T is not None]
    return SequenceLogProbs(
        log_probs=_by_sequence([(layout, scores.log_probs_T) for layout, scores in parts]),
        entropy=_by_sequence(entropies) if calculate_entropy else None,
        num_tree_tokens=sum(layout.num_tokens for layout, _ in parts),
        num_flat_tokens=forest.num_flat_tokens,
    )


def check_temperature(temperature: object) -> None:
    """Refuse what is no number above 0, and any tensor: sections and fused kernels would lose its gradient.

    Raises:
        ValueError: It is one of these, infinite or no number.
    """
    if isinstance(temperature, Tensor):
        raise ValueError(f"temperature={temperature!r}: a tensor gets no gradient here; give its value (.item())")
    if not isinstance(temperature, Real) or not 0 < float(temperature) < math.inf:
        raise ValueError(f"temperature={temperature!r}: give a finite number above 0")


def num_embeddings(model: PreTrainedModel) -> int:
    """Return how many token ids a model has embeddings for; the number in its config may differ."""
    # The weight has it under PEFT's wrappers, too.
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def check_token_ids(forest: TokenForest, model: PreTrainedModel) -> None:
    """Refuse ids without an embedding.

    On a GPU such an id is a device assert, which kills the process. So it is found on the host.

    Raises:
        ValueError: A sequence has such an id.
    """
    vocab_size = num_embeddings(model)
    if forest.tokens.min(initial=0) >= 0 and forest.tokens.max(initial=0) < vocab_size:
        return
    flat = int(((forest.tokens < 0) | (forest.tokens >= vocab_size)).argmax())
    sequence = int(forest.sequence_offsets.searchsorted(flat, side="right")) - 1
    position = flat - int(forest.sequence_offsets[sequence])
    raise ValueError(
        f"sequence {sequence} has the token id {forest.tokens[flat]} at position {position}, outside the vocabulary of "
        f"{vocab_size} tokens: give ids in 0..{vocab_size - 1}, from the tokenizer of this model"
    )


def _by_sequence(parts: Sequence[tuple[TreeLayout, Tensor]]) -> list[Tensor]:
    """Expand values (T,) to the sequences in the order given, without the first token of each."""
    values: dict[int, Tensor] = {}
    for layout, values_T in parts:
        rows = expand(values_T, layout).split(np.diff(layout.leaf_offsets).tolist())
        values |= {sequence: row[1:] for sequence, row in zip(layout.leaves.tolist(), rows, strict=True)}
    return [values[sequence] for sequence in range(len(values))]
