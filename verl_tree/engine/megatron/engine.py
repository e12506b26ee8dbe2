"""verl's Megatron engine on trees: the calls of a step are the micro-batches of Megatron's own schedules.

A mini-batch is one step, and a step two of them: its first calls without gradient, then its last ones. 1F1B runs the
backwards of a stage in the order of the micro-batches, and so does its interleaved form, in which a rank has several
stages. So when the backward of a section begins, those of later sections have ended on this stage, and all that they
hand up for its keys and values is there. What calls keep for each other stays on its stage.

Every rank of a replica (tensor and pipeline ranks) plans the same calls; those of a last stage have scores.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor, nn
from typing_extensions import override
from verl.utils.megatron_utils import unwrap_model

from verl_tree.engine.megatron.build import BuildForTrees
from verl_tree.engine.megatron.scores import call_hidden_states, log_probs_of, values_of
from verl_tree.engine.of_verl import EngineOfVerl
from verl_tree.engine_config import TreeMegatronEngineConfig
from verl_tree.functional.images import PackImages
from verl_tree.functional.scorer import LogitReading
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RELAYED
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan


class MegatronTreeEngine(EngineOfVerl, BuildForTrees):
    """verl's Megatron engine on trees."""

    config_class = TreeMegatronEngineConfig
    config_key = "megatron"
    has_schedule = True
    _running: nn.Module
    """The stage whose call runs; a rank has several if they are virtual."""
    _is_flat = False

    @property
    @override
    def has_outputs(self) -> bool:  # type: ignore[override]
        return parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    @property
    @override
    def makes_scores(self) -> bool:
        stage: Any = unwrap_model(self._running)
        return stage.post_process

    @property
    @override
    def call_multiple(self) -> int:  # type: ignore[override]
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
            return 1
        config: Any = self.tf_config
        return config.microbatch_group_size_per_vp_stage

    @property
    @override
    def auxiliary_loss(self) -> str | None:
        # Its routers add these to their gradients by themselves.
        config: Any = self.tf_config
        kind = config.moe_router_load_balancing_type
        if config.num_moe_experts is None:
            return None
        if config.moe_z_loss_coeff:
            return f"moe_z_loss_coeff={config.moe_z_loss_coeff}"
        if config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate:
            return f"moe_router_bias_update_rate={config.moe_router_bias_update_rate}"  # by the tokens of each pass
        balances = "aux_loss" in str(kind) and config.moe_aux_loss_coeff
        return f"moe_router_load_balancing_type={kind}" if balances else None

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return cast("dist.ProcessGroup", self.get_data_parallel_group())

    @property
    @override
    def team(self) -> None:
        """None: tensor ranks have all tokens of a call, and heads of their own."""

    @property
    @override
    def replica(self) -> dist.ProcessGroup | None:
        return cast("dist.ProcessGroup", parallel_state.get_model_parallel_group())

    @property
    @override
    def route_group(self) -> dist.ProcessGroup:
        return cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group())

    @property
    @override
    def model(self) -> nn.Module:
        return nn.ModuleList(self.module)

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        return self.param_dtype

    @override
    def check(self, *, max_path_len: int, is_relayed: bool) -> None:
        if is_relayed:
            RELAYED.check(self.model)

    @property
    @override
    def embeddings(self) -> list[nn.Module]:
        stages: list[Any] = [unwrap_model(stage) for stage in self.module]
        return [stage.embedding for stage in stages if stage.pre_process]

    @override
    @contextmanager
    def gradients_aside(self) -> Iterator[None]:
        buffers = [each for stage in self.module for each in (*stage.buffers, *stage.expert_parallel_buffers)]
        kept = [each.grad_data.clone() for each in buffers]
        try:
            yield
        finally:
            self.clear_gradients()
            for buffer, data in zip(buffers, kept, strict=True):
                buffer.grad_data.copy_(data)

    @override
    def clear_gradients(self) -> None:
        for stage in self.module:
            stage.zero_grad_buffer()

    @override
    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        # Megatron adds gradients up in buffers of its own.
        return cast("Tensor", cast("Any", parameter).main_grad)

    @override
    def layer_name(self, name: str) -> str:
        found = re.fullmatch(r"(\d+)\..*decoder\.layers\.(\d+)", name)
        if found is None:
            return name
        stage: Any = unwrap_model(self.module[int(found[1])])
        return f"model.layers.{stage.decoder.layers[int(found[2])].layer_number - 1}"

    @override
    @contextmanager
    def flat(self) -> Iterator[None]:
        self._is_flat = True
        try:
            yield
        finally:
            self._is_flat = False

    @override
    def scores(
        self,
        call: RelayCall,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        images: PackImages | None,
        temperature: float | Tensor,
        calculate_entropy: bool,
        reading: LogitReading | None = None,
    ) -> Tensor:
        hidden = call_hidden_states(self._running, call, layout, plan=plan, replay=self.replay, is_flat=self._is_flat)
        if not self.makes_scores:
            return hidden
        if self.head.scores_own_tokens:
            return values_of(self._running, hidden, call)
        return log_probs_of(
            self._running,
            hidden,
            call,
            layout,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            reading=reading,
            chunk_size=self.tree_config.logits_chunk_size,
        )

    @override
    def run(
        self,
        first: Sequence[Callable[[], Tensor]],
        last: Sequence[Callable[[], Tensor]],
        *,
        is_last: bool,
    ) -> None:
        assert is_last, "a schedule ends with the exchange of gradients"
        with torch.no_grad():
            self._schedule(first, forward_only=True)
        self._schedule(last, forward_only=False)

    def _schedule(self, calls: Sequence[Callable[[], Tensor]], *, forward_only: bool) -> None:
        """Run calls as the micro-batches of one schedule."""

        def step(left: Any, stage: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Any]]]]:
            self._running = stage
            return next(left)(), loss

        def loss(made: Tensor) -> tuple[Tensor, dict[str, Any]]:
            # A call without gradient makes no loss. Megatron divides by the number of micro-batches.
            total = made if made.dim() == 0 else made.sum() * 0.0
            return total * len(calls), {}

        if calls:
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(calls) for _ in self.module],
                model=self.module,
                num_microbatches=len(calls),
                # The lengths of sections differ, so stages tell each other the shape.
                seq_length=1,
                micro_batch_size=1,
                forward_only=forward_only,
            )
