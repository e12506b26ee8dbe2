"""The critic on trees: the policy's engine with a value per token in place of log-probs."""

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.engine.base import EngineRegistry

from verl_tree.attention.plan import AttentionPlan
from verl_tree.engine.fsdp_tree import FSDPTreeEngineWithLMHead
from verl_tree.engine.model_build import build_token_classifier
from verl_tree.tree.layout import TreeLayout


@EngineRegistry.register(model_type="value_model", backend="fsdp_tree", device=["cuda", "cpu"])
class FSDPTreeEngineWithValueHead(FSDPTreeEngineWithLMHead):
    """Critic: one value per token of the rows."""

    def _build_module(self) -> torch.nn.Module:
        # verl's own builder of critics asks for flash_attention_2 by name.
        return build_token_classifier(self, super()._build_module)

    def _forward(
        self,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        wanted_T: Tensor,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> dict[str, Tensor]:
        with self._autocast():
            output = self.module(
                input_ids=layout.token_ids_T.unsqueeze(0),
                position_ids=layout.position_T.unsqueeze(0),
                attention_mask=None,
                use_cache=False,
                tree_plan=plan,
            )
        return {"values": output.logits.reshape(layout.num_tokens).float()}

    def _align(self, values_F: Tensor) -> Tensor:
        """The value of a token stands at its own position."""
        return values_F

    def _output_names(self, data: TensorDict) -> tuple[str, ...]:
        return ("values",)
