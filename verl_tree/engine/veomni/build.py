"""How verl's VeOmni engine is built for trees, and on a CPU.

VeOmni makes the model from classes of its own, shards it by FSDP2, and experts over ranks (`expert_parallel_size`).
Source: verl 0.9.1, workers/engine/veomni; VeOmni 0.1.12.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from typing_extensions import override
from veomni.arguments.arguments_types import MixedPrecisionConfig
from veomni.models import module_utils
from verl.utils.device import get_device_name
from verl.workers.engine.veomni import transformer_impl
from verl.workers.engine.veomni.transformer_impl import VeOmniEngine, VeOmniEngineWithValueHead

from verl_tree import clashes
from verl_tree.attention.hf import ATTENTION_NAME, check_model, for_text, register
from verl_tree.engine.verl_configs import as_verl_expects, features
from verl_tree.families import VEOMNI_CRITICS, VEOMNI_TYPES
from verl_tree.functional.images import reads_images, vision_tower
from verl_tree.functional.tiles import tile_modules
from verl_tree.recurrence.bind import RecurrentLayers


class BuildOnAnyDevice(VeOmniEngine):
    """An engine that verl can build without a GPU, in float32, for which its config has no key."""

    # verl's engine has no such attribute: it computes in this dtype, always.
    _autocast_dtype = torch.bfloat16

    @override
    def _build_model_optimizer(self) -> None:
        if get_device_name() != "cpu":
            super()._build_model_optimizer()
            return
        self._autocast_dtype = torch.float32
        in_float32 = partial(MixedPrecisionConfig, param_dtype="float32")
        with as_verl_expects(transformer_impl, MixedPrecisionConfig=in_float32):
            super()._build_model_optimizer()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                # Gradients of experts are divided by a number of ranks, and gloo cannot do that while it adds them.
                module.set_force_sum_reduction_for_comms(True)


class BuildForTrees(BuildOnAnyDevice):
    """A VeOmni engine whose model computes trees, for every head."""

    scaler = None  # verl's engine has none

    def __init__(self, *, model_config: Any, engine_config: Any, **configs: Any) -> None:
        refuse(model_config, engine_config)
        super().__init__(model_config=model_config, engine_config=engine_config, **configs)

    @override
    def _get_model_config_path(self) -> Any:
        if self.model_config.model_type == "value_model":
            return cast("Any", VeOmniEngineWithValueHead)._get_model_config_path(self)
        return super()._get_model_config_path()

    @override
    def _build_model_optimizer(self) -> None:
        register()
        draw = partial(self._draw, module_utils._init_parameter)
        with (
            # Of all models. Each gets its own below, the parts of one different ones.
            as_verl_expects(self.engine_config, attn_implementation="eager"),
            as_verl_expects(module_utils, _init_parameter=draw),
        ):
            super()._build_model_optimizer()

    def _draw(self, draw: Callable[..., None], model: Any, name: str, **options: Any) -> None:
        """Draw a weight that VeOmni does not find in a checkpoint: a new critic's head only, or one that is tied."""
        parts = (self.model_config.hf_config, self.model_config.hf_config.get_text_config(decoder=True))
        is_tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
        is_new = self.model_config.model_type == "value_model"
        if name.startswith(f"{model.base_model_prefix}.") or not (is_tied or is_new):
            raise ValueError(
                f"model.path={self.model_config.path}: VeOmni does not find {name} in it, and would train it from "
                "random weights; save the checkpoint in the model's own names (transformers' save_pretrained(..., "
                "save_original_format=False)), or remove model_engine=veomni"
            )
        draw(model, name, **options)

    @override
    def _maybe_apply_async_activation_offload(self, module: PreTrainedModel) -> None:
        # verl calls it with the model as it is loaded, before anything is sharded.
        self._model = module
        module.set_attn_implementation(for_text(module.config, ATTENTION_NAME))
        tiled = self.model_config.tiled_mlp
        if tiled["enabled"]:
            tile_modules(module, num_tiles=tiled["num_shards"])
        self.recurrent = RecurrentLayers(module)
        self.recurrent.bind()
        for stack in self.recurrent.stacks:
            stack.register_forward_pre_hook(_as_one_sequence, with_kwargs=True)
        check_model(module, max_path_len=1)
        if reads_images(module.config):
            module.register_forward_pre_hook(_with_masks, with_kwargs=True)
        # VeOmni runs the tower of Qwen3.5, too, on a blank image, and its gradients are zeros, not None.
        if self.engine_config.freeze_vision_tower and "vision_config" in module.config.sub_configs:
            vision_tower(module).requires_grad_(False)
        super()._maybe_apply_async_activation_offload(module)

    @override
    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        # As in verl's engine, each backward pass ends with the exchange of its gradients.
        del is_last_micro_batch
        yield


def _as_one_sequence(_stack: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Say that all tokens of a call are one sequence: VeOmni's Qwen3.5 insists on being told where sequences end."""
    tokens = kwargs.get("inputs_embeds")
    tokens = kwargs["input_ids"] if tokens is None else tokens
    # Made on the device, so that the host does not wait.
    ends = tokens.shape[1] * torch.arange(2, dtype=torch.int32, device=tokens.device)
    return args, kwargs | {"cu_seq_lens_q": ends}


def _with_masks(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Say where images stand, as verl does: else VeOmni's Qwen2.5-VL gathers tokens over a team that may not exist."""
    settings, tokens = cast("Any", model.config), kwargs["input_ids"]
    masks = {f"{kind}_mask": tokens == getattr(settings, f"{kind}_token_id") for kind in ("image", "video")}
    return args, kwargs | masks


def refuse(model: Any, engine: Any) -> None:
    """Refuse configs of verl with which trees do not run on VeOmni.

    Raises:
        ValueError: With the reason and the remedy.
    """
    model_type, num_parts = model.hf_config.model_type, engine.expert_parallel_size
    used = {
        clashes.VEOMNI: clashes.VEOMNI,
        "model.lora_rank": model.lora_rank > 0 and f"model.lora_rank={model.lora_rank}",
        clashes.UNTRIED: model_type not in VEOMNI_TYPES and f"model.path={model.path} ({model_type})",
        clashes.NO_VEOMNI_CRITIC: model.model_type == "value_model"
        and model_type not in VEOMNI_CRITICS
        and f"critic.model.path={model.path} ({model_type})",
        clashes.ONE_RANK: dist.get_world_size() == 1 and "trainer.n_gpus_per_node=1",
        clashes.EXPERTS: num_parts > 1 and f"veomni.expert_parallel_size={num_parts}",
    }
    clashes.refuse(features(model, engine, ulysses=engine.ulysses_parallel_size) | used)
