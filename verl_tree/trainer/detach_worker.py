"""The worker of `separate_async`: verl's `DetachActorWorker` with our training workers.

Between two weight syncs the trainer takes several updates, and all of them need the log-probs of the policy before the
first. So verl keeps that policy on the CPU, puts it back for one forward, and then restores the current weights.
"""

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu

from verl_tree.configs import MODEL_ENGINES
from verl_tree.trainer.portions.portion import PortionWorker
from verl_tree.trainer.teacher import TeachingWorker
from verl_tree.trainer.worker import TreeTrainingWorker

ON_FSDP2 = {each.tree: each.flat[0] for name, each in MODEL_ENGINES.items() if name != "megatron"}
"""Strategies whose models FSDP2 shards, and verl's own of each."""

SavedModel = tuple[dict[str, tuple[Tensor, Any]], Any]
"""The local shards by parameter name, each with its placement, and the placement of the first (verl's format)."""


class TreeDetachActorWorker(PortionWorker, TeachingWorker, DetachActorWorker):
    """verl's detached worker for trees, too; with FSDP2 a saved model shares no memory with the running one."""

    actor_worker_cls = TreeTrainingWorker
    ref_worker_cls = TreeTrainingWorker

    @override
    def _get_strategy_handlers(self) -> tuple[Callable, Callable]:
        strategy = self.config.actor.strategy
        if strategy == MODEL_ENGINES["megatron"].tree:
            from verl.utils import megatron_utils  # it needs Megatron

            return megatron_utils.copy_megatron_model_to_cpu, megatron_utils.restore_megatron_model_from_cpu
        if strategy in (*ON_FSDP2, *ON_FSDP2.values()):
            return copy_to_cpu, fsdp2_sharded_load_from_cpu
        return super()._get_strategy_handlers()

    @register(dispatch_mode=Dispatch["ONE_TO_ALL"])
    @override
    def restore_model_from_cpu(self, n: int) -> None:
        """Put the model that was saved as `n` back; verl's method knows FSDP2 by the strategy's name only."""
        if self.config.actor.strategy not in ON_FSDP2:
            super().restore_model_from_cpu(n)
        elif n in self.cpu_saved_models:
            self.restore_handler(cast(Any, self.actor).engine.module, *self.cpu_saved_models[n])


def copy_to_cpu(module: nn.Module) -> SavedModel:
    """Copy this rank's shards of an FSDP2 model to the CPU.

    verl's `.detach().cpu()` is the parameter itself where that is on the CPU already (`trainer.device=cpu`,
    `param_offload`), so the next optimiser step would change what was saved.
    """
    state, spec = fsdp2_sharded_save_to_cpu(module)
    for name, parameter in module.named_parameters():
        shard, shard_spec = state[name]
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if local.device.type == "cpu":
            state[name] = (shard.clone(), shard_spec)
    return state, spec
