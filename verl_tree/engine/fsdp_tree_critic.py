"""The tree engine of the critic, which differs from that of the policy in what a model call scores.

Legend: Q tokens and K scores of a model call.
"""

import torch
from torch import Tensor
from typing_extensions import override

from verl_tree.attention.plan import AttentionPlan
from verl_tree.engine.fsdp_flat import BuildTokenClassifier
from verl_tree.engine.fsdp_tree import FSDPTreeEngineWithLMHead
from verl_tree.engine.micro_batch import device_of_rank
from verl_tree.relay.calls import RelayCall
from verl_tree.tree.layout import TreeLayout


class FSDPTreeEngineWithValueHead(BuildTokenClassifier, FSDPTreeEngineWithLMHead):
    """The engine of the critic: one value per token of the rows, at the token's own position."""

    _output_shift = 0
    _scores_own_tokens = True

    @override
    def _output_names(self, *, calculate_entropy: bool) -> tuple[str, ...]:
        return ("values",)

    @override
    def _scores(
        self,
        call: RelayCall,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> Tensor:
        token_Q, scorer_K = (torch.from_numpy(each).to(device_of_rank()) for each in (call.token_Q, call.scorer_K))
        with self._autocast():
            output = self.module(
                input_ids=layout.token_ids_T[token_Q].unsqueeze(0),
                position_ids=layout.position_T[token_Q].unsqueeze(0),
                attention_mask=None,
                use_cache=False,
                tree_plan=plan,
            )
        return output.logits.reshape(1, len(token_Q)).float()[:, scorer_K]
