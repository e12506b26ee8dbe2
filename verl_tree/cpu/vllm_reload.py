"""Weight updates for the vLLM CPU engine: the sender, and the extension class that its worker processes load.

vLLM's CPU linear layers repack their weights and drop the originals, so loading new weights fails (`'Parameter' object
has no attribute 'weight_loader'`). vLLM's layer-wise reload restores each layer, loads it and packs it again; this
class uses it for verl's updates. The profile `cpu` names it in `rollout.engine_kwargs.vllm.worker_extension_cls`.

The experts of a mixture are packed with the kernel that reads them, and vLLM 0.31 makes that kernel once. A reload
would leave them as they came, and the kernel would read them as packed: wrong log-probs, and no error. So each reload
drops the kernels, and vLLM makes them and packs the experts again.
"""

import logging
from typing import Any, cast

import torch
from typing_extensions import override
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl_tree.cpu.weight_socket import of_this_cluster


class _OnlyLostWeights(logging.Filter):
    """A filter that drops the warning about rotary embeddings: their tables are computed, never sent."""

    @override
    def filter(self, record: logging.LogRecord) -> bool:
        return not (isinstance(record.args, tuple) and record.args and "RotaryEmbedding" in str(record.args[0]))


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_OnlyLostWeights())


class CpuServerAdapter(ServerAdapter):
    """verl's sender of weights (0.9.1), on a socket of this Ray cluster."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.zmq_handle = of_this_cluster(self.zmq_handle)


class CpuWeightReloadExtension(vLLMColocateWorkerExtension):
    """verl's worker extension (0.9.1) whose full weight updates go through vLLM's layer-wise reload."""

    @override
    def _get_zmq_handle(self) -> str:
        return of_this_cluster(super()._get_zmq_handle())

    @override
    def update_weights_from_ipc(
        self, peft_config: dict | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive the weights of the policy and load them into the running model."""
        if peft_config and base_sync_done:
            # Adapters are separate tensors: the packed layers stay as they are.
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        receiver = BucketedWeightReceiver(
            zmq_handle=self._get_zmq_handle(), device=torch.device("cpu"), use_shm=use_shm
        )
        for model in self._iter_all_models():
            assert model is not None
            _drop_expert_kernels(model)
            initialize_layerwise_reload(model)

        def load_bucket(weights: list[tuple[str, torch.Tensor]], _is_last: bool) -> None:
            # The reload keeps tensors until their layer is complete; the bucket's memory is reused before that.
            kept = [(name, tensor.clone()) for name, tensor in weights]
            # verl annotates a dict and passes None itself.
            self._update_weights(kept, peft_config=cast("dict[str, Any]", peft_config), base_sync_done=base_sync_done)

        receiver.receive_weights(on_bucket_received=load_bucket)
        for model, model_config in self._iter_all_models_with_config():
            finalize_layerwise_reload(model, model_config)


def _drop_expert_kernels(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None
