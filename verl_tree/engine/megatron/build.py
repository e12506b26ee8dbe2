"""How verl's Megatron engine is built for trees, and on a CPU.

Bridge, parallel layout, optimiser, offload, checkpoints and weight export are verl's and Megatron's. What trees need is
put into the layers as they are built: attention under the plan that travels with a call, and the positions of its
tokens. Source: verl 0.9.1, workers/engine/megatron; megatron-core 0.16.1.

Legend: S tokens of a call with padding, Q without, Hq and Hkv query and key-value heads of this rank, D head dim.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from typing_extensions import override
from verl.utils.device import get_device_name
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron.transformer_impl import MegatronEngine

from verl_tree import clashes
from verl_tree.attention.layer import layer_attention
from verl_tree.engine.megatron.routes import StageRouters
from verl_tree.engine.routes.router_replay import RouterReplay
from verl_tree.engine.verl_configs import features
from verl_tree.families import EXPERTS
from verl_tree.tree.plan import AttentionPlan

ANOTHER = "give another model, or take another engine"


@dataclass
class CallParams(PackedSeqParams):
    """What a call's layers need, where Megatron has what packed rows need: it reaches them through checkpoints, too."""

    replay: RouterReplay | None = None
    routes_LNk: Tensor | None = None


@dataclass
class TreeParams(CallParams):
    """The same of a tree. Its format is not `thd`, so layers see one row."""

    plan: AttentionPlan | None = None
    position_S: Tensor | None = None
    num_positions: int = 0


class TreeAttention(nn.Module):
    """The core attention of a layer, under the plan of the call; without one it is the layer's own."""

    def __init__(self, own: nn.Module, scale: float | None) -> None:
        super().__init__()
        self.own = (own,)  # not a submodule: it has no weights, and checkpoints do not know it
        self._scale = scale

    @override
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **read_by_own: Any,
    ) -> Tensor:
        """Attend, (S, 1, Hq, D) and twice (S, 1, Hkv, D) to (S, 1, Hq * D); padding behind the Q tokens gives 0."""
        if isinstance(packed_seq_params, CallParams) and packed_seq_params.replay is not None:
            # When a layer is computed anew, other calls have run since. Its router comes after its attention.
            packed_seq_params.replay.imposed_LNk = packed_seq_params.routes_LNk
        if not isinstance(packed_seq_params, TreeParams):
            options = read_by_own | {"packed_seq_params": packed_seq_params}
            return cast("Tensor", self.own[0](query, key, value, attention_mask, **options))
        plan = packed_seq_params.plan
        assert plan is not None, "a call of the tree engine has a plan"
        q_QHD, k_QHD, v_QHD = (each[: plan.num_queries, 0] for each in (query, key, value))
        out_QHD = layer_attention(self, q_QHD, k_QHD, v_QHD, plan, scale=self._scale)
        out = query.new_zeros(len(query), 1, out_QHD[0].numel())
        out[: plan.num_queries, 0] = out_QHD.flatten(1)
        return out


class TreePositions(nn.Module):
    """Rotary embeddings of a call's positions in place of 0, 1, 2, ...; Megatron asks for a length and hands it on."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary: Any = rotary

    def get_rotary_seq_len(self, *args: Any) -> TreeParams | int:
        """Return what the call's layers need, or the length of a call without a plan."""
        return args[-1] if isinstance(args[-1], TreeParams) else self._rotary.get_rotary_seq_len(*args)

    @override
    def forward(self, params: TreeParams | int, **options: Any) -> Tensor:
        """Return the angles of the positions, (S, 1, 1, D)."""
        if not isinstance(params, TreeParams):
            return cast("Tensor", self._rotary(params, **options))
        return cast("Tensor", self._rotary(params.num_positions)[params.position_S])


class BuildOnAnyDevice(MegatronEngine):
    """An engine that verl can build without a GPU, in float32, which its config does not take."""

    def __init__(self, *, engine_config: Any, **configs: Any) -> None:
        if get_device_name() != "cpu":
            super().__init__(engine_config=engine_config, **configs)
            return
        from verl_tree.cpu import megatron

        megatron.prepare()
        on_cpu = {
            "dtype": "float32",
            "override_transformer_config": megatron.UNFUSED | dict(engine_config.override_transformer_config),
            # Megatron-Bridge builds on Transformer Engine.
            "vanilla_mbridge": True,
        }
        for name, value in on_cpu.items():
            object.__setattr__(engine_config, name, value)
        super().__init__(engine_config=engine_config, **configs)

    @override
    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        if get_device_name() != "cpu":
            super().load_checkpoint(*args, **options)
            return
        from verl_tree.cpu.megatron import torch_optimizer_loads

        with torch_optimizer_loads(self.optimizer):
            super().load_checkpoint(*args, **options)

    @override
    def get_per_tensor_param(self, *args: Any, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], Any]:
        weights, adapters = super().get_per_tensor_param(*args, **options)
        if get_device_name() == "cpu" and self.share_embeddings_and_output_weights:
            from verl_tree.cpu.megatron import with_tied_head

            weights = with_tied_head(weights)
        return weights, adapters


class BuildForTrees(BuildOnAnyDevice):
    """A Megatron engine whose model computes trees."""

    def __init__(self, *, model_config: Any, engine_config: Any, **configs: Any) -> None:
        refuse(model_config, engine_config)
        super().__init__(model_config=model_config, engine_config=engine_config, **configs)
        # verl's switch for its own replay, which knows flat rows.
        self.enable_routing_replay = False

    @override
    def _build_megatron_module(self) -> list[nn.Module]:
        chunks = super()._build_megatron_module()
        config: Any = self.tf_config  # Megatron-Bridge makes it with the model
        replays = self.engine_config.router_replay.mode != "disabled"
        refuse_layers(config, replays=replays)
        for chunk in chunks:
            model: Any = unwrap_model(chunk)
            if model.position_embedding_type != "rope":
                raise ValueError(
                    f"model.path={self.model_config.path}: positions of kind {model.position_embedding_type}, and on "
                    f"Megatron trees have rotary ones; {ANOTHER}"
                )
            model.rotary_pos_emb = TreePositions(model.rotary_pos_emb)
            for layer in model.decoder.layers:
                own = layer.self_attention.core_attention
                layer.self_attention.core_attention = TreeAttention(own, config.softmax_scale)
        if replays:
            self.replay = StageRouters(chunks, config)
        return cast("list[nn.Module]", chunks)


def refuse(model: Any, engine: Any) -> None:
    """Refuse configs of verl with which trees do not run on Megatron.

    Raises:
        ValueError: With the reason and the remedy.
    """
    used = {
        clashes.MEGATRON: clashes.MEGATRON,
        "model.lora_rank": model.lora_rank > 0 and f"model.lora_rank={model.lora_rank}",
        "model.lora.rank": model.lora.get("rank", 0) > 0 and f"model.lora.rank={model.lora['rank']}",
        "engine.context_parallel_size!=1": engine.context_parallel_size != 1
        and f"megatron.context_parallel_size={engine.context_parallel_size}",
        "engine.dynamic_context_parallel": engine.dynamic_context_parallel and "megatron.dynamic_context_parallel=True",
        "engine.use_megatron_fsdp": engine.use_megatron_fsdp and "megatron.use_megatron_fsdp=True",
        clashes.TILES: model.tiled_mlp["enabled"] and "model.tiled_mlp.enabled=True",
        clashes.OFFLOAD: model.enable_activation_offload and "model.enable_activation_offload=True",
    }
    clashes.refuse(features(model, engine, ulysses=1) | used)
    size = engine.expert_tensor_parallel_size
    told = clashes.doubled_experts(
        "expert_model_parallel_size",
        parallel=engine.expert_model_parallel_size,
        of_experts=size,
        tensor=engine.tensor_model_parallel_size,
    )
    if told and any(getattr(model.hf_config, name, None) for name in EXPERTS):
        raise ValueError(f"megatron.expert_tensor_parallel_size={size}: {told}")


def refuse_layers(config: Any, *, replays: bool) -> None:
    """Refuse what layers of Megatron's config do beside attention within a path, and routers that cannot replay routes.

    Raises:
        ValueError: With the reason and the remedy.
    """
    unknown = {
        "multi_latent_attention": config.multi_latent_attention,
        "window_size": config.window_size is not None,
        "softmax_type": config.softmax_type != "vanilla",
        "mtp_num_layers": config.mtp_num_layers,
        "experimental_attention_variant": config.experimental_attention_variant,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.hidden_dropout,
        # Its schedule runs layers by itself, not the calls that it is given.
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
    }
    # Routes are imposed where a router calls `torch.topk` once, in a pass behind the attention of its layer.
    not_replayed = {
        "num_moe_experts": config.num_moe_experts is None,
        "moe_router_topk": config.moe_router_topk < 2,
        "moe_router_group_topk": config.moe_router_group_topk,
        "moe_router_fusion": config.moe_router_fusion,
        "recompute_modules": config.recompute_granularity == "selective" and "moe" in config.recompute_modules,
    }
    _refuse_settings(config, unknown, why=f"trees do not know it; set it off, or {ANOTHER}")
    if replays:
        _refuse_settings(config, not_replayed, why="routes are not replayed; set router_replay.mode=disabled")


def _refuse_settings(config: Any, found: Mapping[str, Any], *, why: str) -> None:
    wrong = [f"{name}={getattr(config, name)}" for name, is_used in found.items() if is_used]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} in Megatron's config: {why}")
