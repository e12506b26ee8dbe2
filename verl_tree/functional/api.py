"""`tree_log_probs`: the log-probs of trajectories that share prefixes, from any transformers causal LM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.attention.hf import ATTENTION_NAME, check_model, register
from verl_tree.attention.plan import AttentionPlan
from verl_tree.functional.expansion import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.packing import pack
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout


@dataclass(frozen=True, slots=True, eq=False)
class SequenceLogProbs:
    """Scores of whole trajectories.

    Attributes:
        log_probs: Per sequence, in the order given, (len - 1,) log-probs of its tokens but the first; differentiable.
        entropy: The same shapes, in nats, or None.
        num_tree_tokens: Tokens that were computed, over all packs.
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
    packing: str = "auto",
) -> SequenceLogProbs:
    """Compute the log-probs of trajectories that share prefixes, every shared prefix once, forward and backward.

    It works for any transformers causal LM whose layers call transformers' attention interface. During the call the
    attention implementation is "tree_attention"; afterwards it is restored.

    Args:
        model: A causal LM, bare or wrapped by PEFT. Its training mode stays as it is.
        sequences: Lists or 1-D arrays of token ids, each with at least one token.
        temperature: Divides the logits.
        calculate_entropy: Also return the entropy of the distribution before each token.
        backend: Attention backend, see `verl_tree.attention.BACKENDS`.
        capacity: Tree tokens that one forward pass may hold. None: no limit.
        packing: Method of `verl_tree.packing.pack`.

    Raises:
        ValueError: A sequence is empty, longer than the capacity or holds an id that the model has no embedding for; or
            the model or the backend cannot honour the tree.
    """
    forest = TokenForest.from_sequences(sequences)
    packed = pack(forest, capacity=capacity, method=packing)
    log_probs: dict[int, Tensor] = {}
    entropy: dict[int, Tensor] = {}
    with tree_attention_implementation(model, max_path_len=int(forest.sequence_lens.max(initial=0))):
        _check_token_ids(forest, model)
        for part in packed.packs:
            layout = TreeLayout.from_forest(forest, part.leaves, device=model.device)
            scores = tree_forward_log_probs(
                model,
                layout,
                plan=AttentionPlan.from_layout(layout, backend=backend),
                temperature=temperature,
                calculate_entropy=calculate_entropy,
            )
            log_probs |= _by_sequence(scores.log_probs_T, layout)
            if scores.entropy_T is not None:
                entropy |= _by_sequence(scores.entropy_T, layout)
    order = range(len(sequences))
    return SequenceLogProbs(
        log_probs=[log_probs[sequence] for sequence in order],
        entropy=[entropy[sequence] for sequence in order] if calculate_entropy else None,
        num_tree_tokens=packed.num_tokens,
        num_flat_tokens=packed.num_flat_tokens,
    )


@contextmanager
def tree_attention_implementation(model: PreTrainedModel, *, max_path_len: int) -> Iterator[None]:
    """Set the attention implementation to "tree_attention", and restore what it was, also on error.

    `model` may be wrapped by PEFT. `max_path_len` is the length of the longest trajectory.

    Raises:
        ValueError: The model cannot honour the tree.
    """
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    check_model(base, max_path_len=max_path_len)
    register()
    # Gradient checkpointing runs layers again in the backward pass, after the `with` block. These runs need tree
    # attention, too.
    name = "_gradient_checkpointing_func"
    checkpoints = [(vars(module), vars(module)[name]) for module in base.modules() if name in vars(module)]
    for attributes, function in checkpoints:
        attributes[name] = _checkpoint_with_tree(function, base)
    try:
        with _attention_name(base, ATTENTION_NAME):
            yield
    finally:
        for attributes, function in checkpoints:
            attributes[name] = function


@contextmanager
def _attention_name(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    assert before is not None, "a model that is built has an attention implementation"
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _checkpoint_with_tree(checkpoint: Callable[..., Any], model: PreTrainedModel) -> Callable[..., Any]:
    """Return a checkpoint function that runs its layers with tree attention, also in the backward pass."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        def with_tree(*inner_args: Any) -> Any:
            with _attention_name(model, ATTENTION_NAME):
                return function(*inner_args)

        return checkpoint(with_tree, *args)

    return run


def _check_token_ids(forest: TokenForest, model: PreTrainedModel) -> None:
    """Refuse ids without an embedding."""
    # On a GPU such an id is a device assert, which kills the process. So it is found on the host. The weight has the
    # true number of ids, also under PEFT's wrappers. The number in the config may differ.
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    vocab_size = weight.shape[0]
    if forest.tokens.min(initial=0) >= 0 and forest.tokens.max(initial=0) < vocab_size:
        return
    flat = int(((forest.tokens < 0) | (forest.tokens >= vocab_size)).argmax())
    sequence = int(forest.sequence_offsets.searchsorted(flat, side="right")) - 1
    position = flat - int(forest.sequence_offsets[sequence])
    raise ValueError(
        f"sequence {sequence} has the token id {forest.tokens[flat]} at position {position}, outside the vocabulary of "
        f"{vocab_size} tokens: give ids in 0..{vocab_size - 1}, from the tokenizer of this model"
    )


def _by_sequence(values_T: Tensor, layout: TreeLayout) -> dict[int, Tensor]:
    """Expand values to the layout's sequences, without the first token of each."""
    values = expand(values_T, layout).split(np.diff(layout.leaf_offsets).tolist())
    return {sequence: each[1:] for sequence, each in zip(layout.leaves.tolist(), values, strict=True)}
