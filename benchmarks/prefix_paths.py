"""The ways to compute the gradients of a group that shared_prefix.py compares, on the same rows.

Rows are cut as the engine cuts them (`split_into_packs`), and all paths have the log-prob code and the loss in common:
a random coefficient times the log-prob of each token of a response.

- `full`: the tree, `tree.sharing=full`.
- `prompt`: the prompts are shared and nothing else, `tree.sharing=prompt`.
- `none`: flat rows, on the attention backend of the tree.
- `published`: the rows of `prompt` on the attention of the package `prefix-grouper`, where it is installed.

Legend: F flat tokens, T tree tokens; B batch, H heads, Q queries, K keys, D head dim.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.packs import TreeBatch, split_into_packs
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.tree.row_keys import prompt_numbers, row_keys

PUBLISHED = "published_prefix_grouper"
"""Name of the published attention among transformers' implementations."""


def is_published_installed() -> bool:
    """Return whether the package `prefix-grouper` is there."""
    return importlib.util.find_spec("prefix_grouper") is not None


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """Rows of one group, the lengths of their prompts, and the coefficients (F,) of their loss, 0 in prompts."""

    sequences: Sequence[np.ndarray]
    prompt_lens: np.ndarray
    coefficient_F: Tensor

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], *, prompt_lens: np.ndarray) -> "GroupRows":
        """Draw the coefficients."""
        position_F = np.concatenate([np.arange(len(each)) for each in sequences])
        is_response_F = position_F >= np.repeat(prompt_lens, list(map(len, sequences)))
        drawn_F = torch.randn(len(position_F), generator=torch.Generator().manual_seed(0))
        return cls(sequences, prompt_lens, drawn_F * torch.from_numpy(is_response_F) / len(position_F))

    def cut(self, sharing: str) -> TreeBatch:
        """Cut the rows into one micro-batch, shared as `sharing` says."""
        tokens, lens = np.concatenate(self.sequences), np.array(list(map(len, self.sequences)))
        offsets = np.cumsum([0, *lens])
        numbers = [prompt_numbers(offsets, response_lens=lens - self.prompt_lens)] if sharing == "prompt" else []
        return split_into_packs(
            tokens,
            keys=row_keys(tokens, *numbers),
            offsets=offsets,
            trained=(self.coefficient_F != 0).numpy(),
            capacity=len(tokens),
            config=TreeConfig(gate="always" if sharing == "none" else "never"),
            cost_model=CostModel.prior(),
        )


def sharing_of(path: str) -> str:
    """Return what the rows of a path share: `full`, `prompt` or `none`."""
    return "prompt" if path == "published" else path


def update(model: PreTrainedModel, rows: GroupRows, *, path: str) -> None:
    """Add the gradients of one path to the parameters: cut, plan, forward and backward."""
    register()
    model.set_attn_implementation(PUBLISHED if path == "published" else ATTENTION_NAME)
    for micro in rows.cut(sharing_of(path)).micro_batches:
        plan = AttentionPlan.from_layout(micro.layout, backend="varlen")
        scores = tree_forward_log_probs(model, micro.layout, plan=plan, wanted_T=micro.wanted_T)
        (rows.coefficient_F[micro.flat_index_F] * expand(scores.log_probs_T, micro.layout)).sum().backward()


def gradients(model: PreTrainedModel, rows: GroupRows, *, path: str) -> list[Tensor]:
    """Return the gradients of one path and leave none behind."""
    model.zero_grad(set_to_none=True)
    update(model, rows, path=path)
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def register_published() -> None:
    """Make the published attention known to transformers."""
    AttentionInterface.register(PUBLISHED, _attend_published)
    AttentionMaskInterface.register(PUBLISHED, lambda *_args, **_kwargs: None)


def _attend_published(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: None,
    *,
    tree_plan: AttentionPlan,
    scaling: float,
    **_unread: object,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' layers ask for it; (1, H, T, D) each, the output is (1, T, H, D)."""
    num_groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(num_groups, dim=1) for each in (key, value))
    grouper = tree_plan.once(PUBLISHED, _grouper)

    def attend(query_BHQD: Tensor, key_BHKD: Tensor, value_BHKD: Tensor, _padding: Tensor) -> Tensor:
        # No row is padded, as all responses are of one length. Queries are the last tokens of the keys.
        num_queries, num_keys = query_BHQD.shape[2], key_BHKD.shape[2]
        if num_queries == num_keys:
            visibility: dict[str, Any] = {"is_causal": True}
        else:
            mask_QK = tree_plan.once((PUBLISHED, "mask"), lambda _: _last_queries(num_queries, num_keys))
            visibility = {"attn_mask": mask_QK}
        out_BHQD = scaled_dot_product_attention(query_BHQD, key_BHKD, value_BHKD, scale=scaling, **visibility)
        return out_BHQD.transpose(1, 2)

    return grouper.forward(attend, query, key, value), None


def _last_queries(num_queries: int, num_keys: int) -> Tensor:
    return torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)


def _grouper(plan: AttentionPlan) -> Any:
    """Return the published package's description of a pack: a prompt, then its responses."""
    lens = (plan.runs.end_R - plan.runs.start_R).tolist()
    assert len(set(lens[1:])) == 1, "the responses of a group are of one length here"
    return importlib.import_module("prefix_grouper").PrefixGrouper([lens])
