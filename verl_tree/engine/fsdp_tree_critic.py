"""The tree engine of the critic, which differs from that of the policy in what a model call scores."""

import torch
from torch import Tensor
from typing_extensions import override

from verl_tree.attention.plan import AttentionPlan
from verl_tree.engine.fsdp_flat import BuildTokenClassifier
from verl_tree.engine.fsdp_tree import FSDPTreeEngineWithLMHead
from verl_tree.functional.images import PackImages, reads_images
from verl_tree.functional.relayed import call_values
from verl_tree.relay.calls import RelayCall
from verl_tree.tree.layout import TreeLayout


class FSDPTreeEngineWithValueHead(BuildTokenClassifier, FSDPTreeEngineWithLMHead):
    """The engine of the critic: one value per token of the rows, at the token's own position."""

    _output_shift = 0
    _scores_own_tokens = True

    @override
    def _build_module(self) -> torch.nn.Module:
        model_type = self.model_config.hf_config.model_type
        if reads_images(self.model_config.hf_config):
            raise ValueError(
                f"critic.model.path={self.model_config.path}: no critic reads images ({model_type}); set "
                "critic.enable=false, and an estimator other than gae"
            )
        return super()._build_module()

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
        images: PackImages | None,
        temperature: float | Tensor,
        calculate_entropy: bool,
    ) -> Tensor:
        assert images is None, "critics that read images are refused when they are built"
        with self._autocast():
            return call_values(self.module, call, layout, plan=plan)
