"""verl's FSDP2 engine on trees: what it brings to a mini-batch (`verl_tree.engine.step`).

Building and sharding the model, LoRA, offload, optimiser, checkpoints and weight export are verl's. Source: verl 0.9.1,
workers/engine/fsdp. Every engine whose module FSDP2 shards runs its calls as this one (`FSDP2Calls`).

With `ulysses_sequence_parallel_size` > 1 the ranks of a team get the same rows from verl's dispatch and compute every
model call together (docs/ulysses.md). All of them have all scores, so each computes the same loss.

Legend: C kinds of scores, K scores of a model call.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from typing_extensions import override
from verl.utils.device import get_device_name

from verl_tree.attention.hf import check_model, own_attention
from verl_tree.engine.fsdp.build import BuildForTrees
from verl_tree.engine.of_verl import EngineOfVerl
from verl_tree.engine.routes.router_replay import RouterReplay
from verl_tree.engine_config import TreeFSDPEngineConfig
from verl_tree.functional.images import PackImages
from verl_tree.functional.scorer import LogitReading
from verl_tree.recurrence.bind import RecurrentLayers
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RELAYED
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan


class FSDP2Calls(EngineOfVerl):
    """An engine whose module is a transformers model that FSDP2 shards: one call after another, as all ranks do.

    The class that builds it is a subclass of verl's `FSDPEngine`. It sets `_model`, the model before it is sharded, and
    `recurrent`, its recurrent layers, which it binds.
    """

    has_outputs = True
    get_data_parallel_group: Callable[[], dist.ProcessGroup | None]
    ulysses_parallel_group: dist.ProcessGroup | None
    scaler: Any
    _gradient_sync_context: Callable[..., AbstractContextManager[Any]]
    _autocast_dtype: torch.dtype
    _model: PreTrainedModel
    recurrent: RecurrentLayers

    def watch_routers(self, model: PreTrainedModel) -> None:
        """Find the routers of the model, if the config wants them recorded or imposed."""
        if self.engine_config.router_replay.mode != "disabled":
            self.replay = RouterReplay.of_model(model)

    @property
    @override
    def group(self) -> dist.ProcessGroup | None:
        return self.get_data_parallel_group()

    @property
    @override
    def team(self) -> dist.ProcessGroup | None:
        return self.ulysses_parallel_group

    @property
    @override
    def compute_dtype(self) -> torch.dtype:
        return self._autocast_dtype

    @override
    def check(self, *, max_path_len: int, is_relayed: bool) -> None:
        # Length-dependent RoPE is refused only for rows that are long enough to be affected.
        check_model(self._model, max_path_len=max_path_len)
        if is_relayed:
            RELAYED.check(self.module)

    @property
    @override
    def embeddings(self) -> list[torch.nn.Module]:
        return [self._model.get_input_embeddings()]

    @override
    @contextmanager
    def flat(self) -> Iterator[None]:
        with own_attention(self._model), self.recurrent.unbound():
            yield
        # What a pass without a backward leaves whole would be stale after the optimiser's step.
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

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
        with self._autocast():
            return self.head.score(
                self.module,  # FSDP2 keeps the model's own class
                call,
                layout,
                plan=plan,
                images=images,
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
        with torch.no_grad():
            for call in first:
                call()
        for number, call in enumerate(last, start=1):
            with self._gradient_sync_context(is_last_micro_batch=is_last and number == len(last)):
                loss = call()
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast as verl's `forward_step` does: only if the parameters are not float32."""
        if self._autocast_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device_type=get_device_name(), dtype=self._autocast_dtype)


class FSDPTreeEngine(FSDP2Calls, BuildForTrees):
    """verl's FSDP2 engine on trees."""

    config_class = TreeFSDPEngineConfig
    config_key = "fsdp_config"

    @override
    def _build_module(self) -> torch.nn.Module:
        self._model = cast("PreTrainedModel", super()._build_module())
        self.watch_routers(self._model)
        return self._model
