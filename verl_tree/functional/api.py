"""`tree_log_probs`: the log-probs of trajectories that share prefixes, from any transformers causal LM."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        log_probs: For each sequence, in the order given, (len - 1,) log-probs of its tokens but the first;
            differentiable.
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
    """Log-probs of trajectories that share prefixes, every shared prefix computed once, forward and backward.

    Any transformers causal LM will do whose layers call transformers' attention interface; its attention implementation
    is "tree_attention" during the call, and what it was before afterwards.

    Args:
        model: A causal LM, bare or wrapped by PEFT. Its training mode stays as it is.
        sequences: Lists or 1-D arrays of token ids, each with at least one token.
        temperature: Divides the logits.
        calculate_entropy: Also return the entropy of the distribution before each token.
        backend: Attention backend, see `verl_tree.attention.BACKENDS`.
        capacity: Tree tokens that one forward pass may hold. None: no limit.
        packing: Method of `verl_tree.packing.pack`.

    Returns:
        The scores, in the order of `sequences`.

    Raises:
        ValueError: A sequence is empty, longer than the capacity or holds an id that the model has no embedding for, or
            the model or the backend cannot honour the tree.
    """
    forest = TokenForest.from_sequences(sequences)
    packs = pack(forest, capacity=capacity, method=packing)
    log_probs: list[Tensor | None] = [None] * len(sequences)
    entropy: list[Tensor | None] = [None] * len(sequences)
    with tree_attention_implementation(model, max_path_len=int(forest.sequence_lens.max(initial=0))):
        _check_token_ids(forest, model)
        for one in packs.packs:
            layout = TreeLayout.from_forest(forest, one.leaves, device=model.device)
            scores = tree_forward_log_probs(
                model,
                layout,
                plan=AttentionPlan.from_layout(layout, backend=backend),
                temperature=temperature,
                calculate_entropy=calculate_entropy,
            )
            _scatter(scores.log_probs_T, layout, into=log_probs)
            if calculate_entropy:
                _scatter(scores.entropy_T, layout, into=entropy)
    return SequenceLogProbs(
        log_probs=log_probs,
        entropy=entropy if calculate_entropy else None,
        num_tree_tokens=packs.num_tokens,
        num_flat_tokens=packs.num_flat_tokens,
    )


@contextmanager
def tree_attention_implementation(model: PreTrainedModel, *, max_path_len: int) -> Iterator[None]:
    """Sets the model's attention implementation to "tree_attention" and restores what it was, also on error.

    Gradient checkpointing runs layers a second time in the backward pass, after this has ended. Those runs get the
    implementation back for their duration.

    Args:
        model: A causal LM, bare or wrapped by PEFT.
        max_path_len: Tokens of the longest trajectory.

    Raises:
        ValueError: The model cannot honour the tree.
    """
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    check_model(base, max_path_len=max_path_len)
    register()
    checkpointed = [module for module in base.modules() if "_gradient_checkpointing_func" in vars(module)]
    checkpoints = [module._gradient_checkpointing_func for module in checkpointed]
    for module in checkpointed:
        module._gradient_checkpointing_func = _checkpoint_with_tree(module._gradient_checkpointing_func, base)
    try:
        with _attention_name(base, ATTENTION_NAME):
            yield
    finally:
        for module, function in zip(checkpointed, checkpoints, strict=True):
            module._gradient_checkpointing_func = function


@contextmanager
def _attention_name(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _checkpoint_with_tree(checkpoint: Callable[..., Any], model: PreTrainedModel) -> Callable[..., Any]:
    """A checkpoint function whose function runs with tree attention, now and when it is run again."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        def with_tree(*inner_args: Any) -> Any:
            with _attention_name(model, ATTENTION_NAME):
                return function(*inner_args)

        return checkpoint(with_tree, *args)

    return run


def _check_token_ids(forest: TokenForest, model: PreTrainedModel) -> None:
    """Refuses ids without an embedding, on the host: on a GPU their look-up ends the process's use of the device."""
    # The rows that are looked up, which need not be the config's number. PEFT's wrappers have the weight, too.
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if forest.tokens.min(initial=0) >= 0 and forest.tokens.max(initial=0) < vocab_size:
        return
    flat = int(((forest.tokens < 0) | (forest.tokens >= vocab_size)).argmax())
    sequence = int(forest.sequence_offsets.searchsorted(flat, side="right")) - 1
    position = flat - int(forest.sequence_offsets[sequence])
    raise ValueError(
        f"sequence {sequence} has the token id {forest.tokens[flat]} at position {position}, outside the vocabulary of "
        f"{vocab_size} tokens: give ids in 0..{vocab_size - 1}, from the tokenizer of this model"
    )


def _scatter(values_T: Tensor, layout: TreeLayout, *, into: list[Tensor | None]) -> None:
    """Puts the expanded values of each leaf, but its first token's, at the place of its sequence."""
    lens = (layout.leaf_offsets[1:] - layout.leaf_offsets[:-1]).tolist()
    for sequence, values in zip(layout.leaves.tolist(), expand(values_T, layout).split(lens), strict=True):
        into[sequence] = values[1:]
