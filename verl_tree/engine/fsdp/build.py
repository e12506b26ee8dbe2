"""How verl's FSDP2 engine is built for trees, and on a CPU.

verl 0.9.1 decides by its configs what it does to a model. Where a tree needs something else, the config says another
thing while verl's method runs (`as_verl_expects`). Every such place of FSDP2 is in this file.
"""

from typing import Any, cast

import torch
from transformers import PreTrainedModel
from typing_extensions import override
from verl.utils.device import get_device_name
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from verl_tree import clashes
from verl_tree.attention.hf import ATTENTION_NAME, check_model, for_text, register
from verl_tree.engine.verl_configs import as_verl_expects, features
from verl_tree.functional.images import reads_images, vision_tower
from verl_tree.functional.offload import offload_checkpoints
from verl_tree.functional.tiles import tile_modules
from verl_tree.recurrence.bind import RecurrentLayers


class BuildOnAnyDevice(FSDPEngine):
    """An engine whose model verl can build without a GPU, with the attention that its config names."""

    @override
    def _build_module(self) -> torch.nn.Module:
        if self.model_config.model_type != "value_model":
            return super()._build_module()
        # verl loads a critic with flash_attention_2 by name, which neither a CPU nor a tree can use. So its builder for
        # ordinary models builds a token classifier with one label; it picks the class by this name. If the checkpoint
        # has no value head, a new one is initialised.
        hf_config = self.model_config.hf_config
        hf_config.num_labels = 1
        hf_config.classifier_dropout = 0.0
        name = type(hf_config).__name__.removesuffix("Config")
        hf_config.architectures = [f"{name}ForTokenClassification"]
        with as_verl_expects(self.model_config, model_type="language_model"):
            return super()._build_module()

    @override
    def _build_lora_module(self, module: Any) -> Any:
        if self.model_config.model_type != "value_model":
            return super()._build_lora_module(module)
        # The value head may be new and random, so it is trained whole, and not by an adapter alone.
        prefix = f"{module.base_model_prefix}."
        head = [each for name, each in module.named_parameters() if not name.startswith(prefix)]
        # verl names a causal LM to PEFT, which takes this method from the model; only `generate` would call it.
        module.prepare_inputs_for_generation = None
        adapted = super()._build_lora_module(module)
        for parameter in head:
            parameter.requires_grad_(True)
        return adapted

    @override
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl offloads every forward-only model through pinned memory. A CPU has none, and the model is on the host.
        on_cpu = {"forward_only": False} if get_device_name() == "cpu" else {}
        with as_verl_expects(self.engine_config, **on_cpu):
            return super()._build_fsdp_module(module)


class BuildForTrees(BuildOnAnyDevice):
    """An engine whose model computes trees: attention, recurrent layers, tiles and offload know them.

    Attributes:
        recurrent: The recurrent layers of its model.
    """

    recurrent: RecurrentLayers

    def __init__(self, *, model_config: Any, **configs: Any) -> None:
        # verl asks for rows that are packed without padding, as a tree is.
        with as_verl_expects(model_config, use_remove_padding=True):
            super().__init__(model_config=model_config, **configs)
        # The model never sees rows, so verl's patches for padded and packed rows are not needed.
        self.use_remove_padding = False

    @override
    def _build_module(self) -> torch.nn.Module:
        clashes.refuse(features(self.model_config, self.engine_config, ulysses=self.ulysses_sequence_parallel_size))
        register()
        hf_config = self.model_config.hf_config
        hf_config._attn_implementation = for_text(hf_config, ATTENTION_NAME)
        # verl's patches for Ulysses exchange heads inside flash attention, or cut the inputs of vision models. A plan
        # knows how its tokens lie on the ranks (`verl_tree.tree.sharding`).
        with as_verl_expects(self, ulysses_sequence_parallel_size=1):
            model = cast("PreTrainedModel", super()._build_module())
        # verl reads `tiled_mlp` nowhere in its FSDP engine.
        tiled = self.model_config.tiled_mlp
        if tiled["enabled"]:
            tile_modules(model, num_tiles=tiled["num_shards"])
        if self.model_config.enable_activation_offload:
            offload_checkpoints(model)
        self.recurrent = RecurrentLayers(model)
        self.recurrent.bind()  # they follow the trees of the model's calls for its life
        check_model(model, max_path_len=1)
        if self.engine_config.freeze_vision_tower and reads_images(hf_config):
            vision_tower(model).requires_grad_(False)
        return model

    @override
    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        # verl would add its own offload of activations, which does not serve trees.
        with as_verl_expects(self.model_config, enable_activation_offload=False):
            return super()._build_fsdp_module(module)
