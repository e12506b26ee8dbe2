"""The sizes of a decoder that the memory and the seconds of its updates depend on, and how ranks share it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from verl_tree.families import ATTENTION_LAYERS, EXPERTS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SIZES = {
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "vocabulary": "vocab_size",
}
ALIKE = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "shared_intermediate_size": 0,
    "is_moe": True,
}
"""Settings of mixtures in which all layers are alike, and a token has its experts and nothing else; null is plain."""

HALF, FLOAT = 2, 4
"""Bytes of a bfloat16 and of a float32."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder that its memory depends on."""

    hidden: int
    intermediate: int  # of one expert, if there are some
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    is_tied: bool
    num_experts: int = 0  # of every layer; 0: its MLP is dense
    experts_per_token: int = 1

    @classmethod
    def of_settings(cls, settings: Mapping[str, Any]) -> Self | None:
        """Read the sizes from a config.json; None if not all layers are alike, or something is not known."""
        sizes: dict[str, Any] = {name: settings.get(key) for name, key in SIZES.items()}
        num_experts = next((settings[name] for name in EXPERTS if settings.get(name)), 0)
        if num_experts:
            sizes["intermediate"] = settings.get("moe_intermediate_size") or sizes["intermediate"]
            sizes["experts_per_token"] = settings.get("num_experts_per_tok")
        is_mixed = num_experts and any(settings.get(name) not in (None, plain) for name, plain in ALIKE.items())
        if (
            is_mixed
            or settings.get("kv_lora_rank")
            or not {*(settings.get("layer_types") or ())} <= {*ATTENTION_LAYERS}
        ):
            return None
        if not all(isinstance(each, int) and each > 0 for each in sizes.values()):
            return None
        return cls(
            **sizes,
            num_kv_heads=settings.get("num_key_value_heads") or sizes["num_heads"],
            head_dim=settings.get("head_dim") or sizes["hidden"] // sizes["num_heads"],
            # Where that is not said, the smaller number of parameters.
            is_tied=settings.get("tie_word_embeddings", True),
            num_experts=num_experts,
        )

    @classmethod
    def of_model(cls, config: "PretrainedConfig") -> Self:
        """Read the sizes from the config of a model like Qwen3."""
        size = cls.of_settings(config.get_text_config(decoder=True).to_dict())
        if size is None:
            raise ValueError(f"model_type={config.model_type}: give a decoder whose layers are alike")
        return size

    @property
    def query_dims(self) -> int:
        """Numbers of a token's queries, in all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_dims(self) -> int:
        """Numbers of a token's keys, and of its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the MLP of one layer, or of one of its experts."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of one layer."""
        return self.num_experts * self.mlp_parameters

    @property
    def shared_parameters(self) -> int:
        """Parameters of one layer that every token meets: all but experts."""
        attention = 2 * self.hidden * (self.query_dims + self.key_dims)
        norms = 2 * self.hidden + 2 * self.head_dim
        mlp = self.num_experts * self.hidden if self.num_experts else self.mlp_parameters  # of experts the router
        return attention + norms + mlp

    @property
    def met_parameters(self) -> int:
        """Parameters of all layers that a token meets."""
        met = self.experts_per_token * self.mlp_parameters if self.num_experts else 0
        return self.num_layers * (self.shared_parameters + met)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of embeddings and output head."""
        return (1 if self.is_tied else 2) * self.vocabulary * self.hidden

    @property
    def num_parameters(self) -> int:
        """Parameters of the model."""
        layers = self.num_layers * (self.shared_parameters + self.expert_parameters)
        return layers + self.embedding_parameters + self.hidden


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share a model and its calls.

    Under FSDP a rank has a part of every parameter, and gathers layers for a pass, of their experts its share. Else
    (Megatron) it computes with the parameters that it has, for which sequence parallelism comes with tensor
    parallelism.

    Attributes:
        num_ranks: All of them.
        team: Ranks that compute a call together, by tokens (Ulysses) or by heads and columns (tensor parallelism).
        stages: Stages of a pipeline, among which the layers are shared out.
        experts: Ranks among which the experts of a layer are shared out.
        is_gathered: FSDP.
        waits: Gradients are added up over the ranks in the last pass of an update only; VeOmni does it in each.
    """

    num_ranks: int = 1
    team: int = 1
    stages: int = 1
    experts: int = 1
    is_gathered: bool = True
    waits: bool = True

    @property
    def num_parts(self) -> int:
        """Ranks with which one shares calls or layers."""
        return self.team * self.stages

    @property
    def num_replicas(self) -> int:
        """Ranks, teams or pipelines to which rows are dealt."""
        return self.num_ranks // self.num_parts

    def part_of(self, size: ModelSize) -> ModelSize:
        """Return the sizes of what a rank computes itself of a model whose layers it does not gather."""
        if self.is_gathered:
            return size
        return replace(size, num_layers=-(-size.num_layers // self.stages), vocabulary=-(-size.vocabulary // self.team))

    def gathered_bytes(self, size: ModelSize) -> int:
        """Return what FSDP gathers at once on a rank, in bfloat16.

        Two layers, one of which comes while the other computes, the gradients of one, and embeddings and head with
        their gradients, which stay.
        """
        layer = size.shared_parameters + size.expert_parameters // self.experts
        return HALF * (3 * layer + 2 * size.embedding_parameters) if self.is_gathered else 0

    def pass_bytes(self, size: ModelSize) -> int:
        """Return what FSDP gathers on a rank for a pass, forward and backward, in bfloat16.

        A share of experts comes from the ranks that have the same one. With the gradients, in float32, where they do
        not wait.
        """
        if not self.is_gathered:
            return 0
        of_all = size.num_layers * size.expert_parameters
        same = self.num_ranks // self.experts
        shared = (size.num_parameters - of_all) * (self.num_ranks - 1) // self.num_ranks
        experts = of_all // self.experts * (same - 1) // same
        return (2 * HALF + (0 if self.waits else FLOAT)) * (shared + experts)

    def kept_bytes(
        self, size: ModelSize, *, num_gradients: int = 1, has_optimizer: bool = True, shares_optimizer: bool = True
    ) -> int:
        """Return the bytes of weights, gradients, so often, and optimiser of a rank that gathers nothing.

        Weights are bfloat16 and gradients float32. The optimiser has weights in float32 and two numbers of Adam; it is
        on the host, or shared out among the ranks that have the same part (Megatron's distributed optimiser), or whole.
        Of the pipeline's ends the larger is counted.
        """
        part = self.part_of(size)
        ends = part.embedding_parameters if self.stages == 1 else part.vocabulary * part.hidden
        shared = part.num_layers * size.shared_parameters // self.team + ends
        # The ranks of a team have parts of experts, too.
        experts = part.num_layers * size.expert_parameters // (self.team * self.experts)
        own = (HALF + num_gradients * FLOAT) * (shared + experts)
        if not has_optimizer:
            return own
        replicas, of_expert = self.num_replicas, max(1, self.num_replicas // self.experts)
        if not shares_optimizer:
            replicas = of_expert = 1
        return int(own + 3 * FLOAT * (shared / replicas + experts / of_expert))
