"""Log-probs and entropy of tree tokens: token t is scored by the logits at its parent.

A position has one set of logits but, at a branch point, several next tokens; reading the logits at `parent[t]` for
every token t scores the first token of each branch like any other. Only positions with a child that a loss reads are
projected to the vocabulary, in chunks whose logits are recomputed in the backward pass, so that they never live all
at once.

The projection must happen inside the model's own forward (under FSDP2 the head's weight is a shard outside it). So
while the model runs, the output head's *instance* has a forward that receives the hidden states of the wanted
positions and returns scores in place of logits.

Legend: T tree tokens, P projected positions, K (position, label) pairs, V vocabulary, C rows of the score table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from verl_tree.attention.plan import AttentionPlan
from verl_tree.tree.layout import TreeLayout

_MIN_AUTO_CHUNK_SIZE = 1024
_MAX_AUTO_CHUNK_LOGITS = 2**25  # 128 MiB in float32

_LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}
"""Config keys of architectures that change the logits behind their head, with the value that changes nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class ScoringPlan:
    """Which positions are projected to the vocabulary, and which log-probs are read there.

    Attributes:
        position_P: (P,) int64 tree indices of the positions, ascending.
        pair_position_K: (K,) int64 index into P, ascending.
        pair_token_K: (K,) int64 tree index of the token that the pair scores.
        label_K: (K,) int64 token id of that token.
    """

    position_P: Tensor
    pair_position_K: Tensor
    pair_token_K: Tensor
    label_K: Tensor

    @classmethod
    def from_layout(cls, layout: TreeLayout, wanted_T: Tensor | None = None) -> Self:
        """Finds the positions that must be projected.

        Args:
            layout: The pack.
            wanted_T: (T,) bool, the tokens whose log-prob or entropy a loss reads. None: all. Roots have no parent that
                could score them and are left out either way.
        """
        is_scored_T = layout.parent_T >= 0 if wanted_T is None else (layout.parent_T >= 0) & wanted_T
        token_K = is_scored_T.nonzero().squeeze(1)
        # Stable: the children of one position stay in DFS order.
        parent_K, by_parent = layout.parent_T[token_K].sort(stable=True)
        position_P, pair_position_K = torch.unique_consecutive(parent_K, return_inverse=True)
        token_K = token_K[by_parent]
        return cls(position_P, pair_position_K, token_K, layout.token_ids_T[token_K])


@dataclass(frozen=True, slots=True, eq=False)
class TreeLogProbs:
    """Scores of a pack's tokens, 0.0 where a token was not scored.

    Attributes:
        log_probs_T: (T,) log-prob of each token after its path; float32, or float64 for a float64 model.
        entropy_T: (T,) entropy of the distribution that each token was drawn from, in nats, or None.
    """

    log_probs_T: Tensor
    entropy_T: Tensor | None


def tree_forward_log_probs(
    model: torch.nn.Module,
    layout: TreeLayout,
    *,
    plan: AttentionPlan,
    wanted_T: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    calculate_entropy: bool = False,
    entropy_requires_grad: bool = True,
    chunk_size: int | None = None,
) -> TreeLogProbs:
    """Runs a causal LM on one pack.

    Args:
        model: A transformers causal LM whose attention implementation is "tree_attention", bare or wrapped by PEFT or
            FSDP2.
        layout: The pack, on the model's device.
        plan: The pack's attention plan.
        wanted_T: (T,) bool, the tokens whose scores are read. None: every token with a parent.
        temperature: Divides the logits; a number, or (T,) by the position whose logits it divides.
        calculate_entropy: Also compute the entropy.
        entropy_requires_grad: Whether gradients flow through the entropy.
        chunk_size: Positions projected at a time. None: at least 1,024, more while their logits stay below 2**25
            numbers. With several chunks each is recomputed in the backward pass; a single one is kept, as nothing
            would be saved.

    Returns:
        The scores of the wanted tokens.

    Raises:
        ValueError: The chunk size is not positive, or the model has no output head or changes the logits behind it in a
            way that is not known here.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: give a positive number of positions, or None")
    scoring = ScoringPlan.from_layout(layout, wanted_T)
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings: log-probs need a causal LM")
    scorer = _Scorer(
        scoring,
        temperature_P=temperature[scoring.position_P] if _is_per_position(temperature) else temperature,
        calculate_entropy=calculate_entropy,
        entropy_requires_grad=entropy_requires_grad,
        chunk_size=_auto_chunk_size(model) if chunk_size is None else chunk_size,
    )
    inputs = {
        "input_ids": layout.token_ids_T.unsqueeze(0),
        "position_ids": layout.position_T.unsqueeze(0),
        "attention_mask": None,
        "use_cache": False,
        "logits_to_keep": scoring.position_P,
        "tree_plan": plan,
    }
    if transforms_logits(model):
        scores_CK = scorer.score(model(**inputs).logits[0])
    else:
        with scoring_head(head, scorer) as returned:
            scores_CK = model(**inputs).logits[0]
        _check_untouched(model, returned, scores_CK)
    # A gather's opposite: every scored token occurs once.
    scores_CT = scores_CK.new_zeros(scores_CK.shape[0], layout.num_tokens).index_copy(
        1, scoring.pair_token_K, scores_CK
    )
    return TreeLogProbs(scores_CT[0], scores_CT[1] if calculate_entropy else None)


def transforms_logits(model: torch.nn.Module) -> bool:
    """Whether the architecture caps or scales the logits behind its head, so that the head alone does not give them."""
    config = model.config.get_text_config(decoder=True).to_dict()
    return any(config.get(key, neutral) not in (neutral, None) for key, neutral in _LOGIT_TRANSFORMS.items())


@contextmanager
def scoring_head(head: torch.nn.Module, scorer: "_Scorer") -> Iterator[list[Tensor]]:
    """While active, `head` maps hidden states of the projected positions to scores instead of logits.

    Only this instance is changed, and it is restored also on error. What the backward pass recomputes is bound here.

    Args:
        head: The output head; its own forward (LoRA and all) maps hidden states to logits.
        scorer: What to compute from them.

    Yields:
        A list that receives what the head returned.
    """
    project, instance_forward = head.forward, vars(head).get("forward")
    returned: list[Tensor] = []

    def forward(hidden_1PD: Tensor) -> Tensor:
        scores_CK = scorer.score(hidden_1PD[0], project=project)
        returned.append(scores_CK.detach())
        # A copy: FSDP2 hangs its backward hook on the model's outputs, and a view could lose it.
        return torch.stack([scores_CK])

    head.forward = forward
    try:
        yield returned
    finally:
        if instance_forward is None:
            del head.forward
        else:
            head.forward = instance_forward


def _check_untouched(model: torch.nn.Module, returned: list[Tensor], scores_CK: Tensor) -> None:
    """Refuses a model that did something with the logits between its head and its output."""
    assert len(returned) == 1, f"the output head ran {len(returned)} times in one forward"
    before, after = returned[0].to(scores_CK.dtype), scores_CK.detach()
    if before.shape != after.shape or not torch.equal(before.nan_to_num(), after.nan_to_num()):
        raise ValueError(
            f"{type(model).__name__} changes the logits behind its output head in a way that is not known here: add "
            f"the config key that says so to {sorted(_LOGIT_TRANSFORMS)} in verl_tree.functional.logprobs"
        )


def _auto_chunk_size(model: torch.nn.Module) -> int:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return max(_MIN_AUTO_CHUNK_SIZE, _MAX_AUTO_CHUNK_LOGITS // vocab_size)


def _is_per_position(temperature: float | Tensor) -> bool:
    return isinstance(temperature, Tensor) and temperature.dim() > 0


class _Scorer:
    """Turns hidden states (or logits) of the projected positions into (C, K) scores: log-probs and maybe entropy."""

    def __init__(
        self,
        plan: ScoringPlan,
        *,
        temperature_P: float | Tensor,
        calculate_entropy: bool,
        entropy_requires_grad: bool,
        chunk_size: int,
    ) -> None:
        self.plan = plan
        self.temperature_P = temperature_P
        self.calculate_entropy = calculate_entropy
        self.entropy_requires_grad = entropy_requires_grad
        self.chunk_size = chunk_size

    def score(self, rows_PX: Tensor, *, project: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Scores all pairs, chunk by chunk.

        Args:
            rows_PX: (P, X) hidden states, or logits where there is nothing to project.
            project: Maps hidden states to logits.

        Returns:
            (C, K) scores.
        """
        num_positions = rows_PX.shape[0]
        starts = list(range(0, num_positions, self.chunk_size)) or [0]
        bounds = torch.tensor([*starts, num_positions], device=rows_PX.device)
        pair_bounds = torch.searchsorted(self.plan.pair_position_K, bounds).tolist()
        chunks = []
        for number, start in enumerate(starts):
            pairs = slice(pair_bounds[number], pair_bounds[number + 1])
            row_K = self.plan.pair_position_K[pairs] - start
            end = min(start + self.chunk_size, num_positions)
            temperature = self.temperature_P[start:end] if _is_per_position(self.temperature_P) else self.temperature_P
            args = (rows_PX[start:end], project, temperature, row_K, self.plan.label_K[pairs])
            if len(starts) > 1 and torch.is_grad_enabled():
                chunks.append(checkpoint(self._score_chunk, *args, use_reentrant=False))
            else:
                chunks.append(self._score_chunk(*args))
        return torch.cat(chunks, dim=1)

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
        if _is_per_position(temperature_P):
            temperature_P = temperature_P.to(logits_PV.dtype).unsqueeze(1)
        # A division by one would still be a pass over all logits.
        if isinstance(temperature_P, Tensor) or temperature_P != 1.0:
            logits_PV = logits_PV / temperature_P
        log_probs_PV = logits_PV.log_softmax(-1)
        log_probs_K = log_probs_PV[row_K, label_K]
        if not self.calculate_entropy:
            return log_probs_K.unsqueeze(0)
        with torch.set_grad_enabled(self.entropy_requires_grad and torch.is_grad_enabled()):
            entropy_P = -(log_probs_PV.exp() * log_probs_PV).sum(-1)
        return torch.stack((log_probs_K, entropy_P[row_K]))
