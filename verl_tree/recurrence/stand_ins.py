"""What stands in for functions of a mixer instance of transformers while the mixer is bound (`bind.py`).

A mixer like `Qwen3NextGatedDeltaNet` calls its convolution and its recurrence through two attributes of the instance,
as verl's own forward of it does. That of OLMo-Hybrid has three modules for its convolutions, whose forwards are
replaced. Short convolutions and Mamba-2 are computed inline, so the forward of the mixer is replaced
(`inline_mixers.py`). Everything else works token by token and stays the model's: projections, gates, norms, LoRA,
FSDP2.

The plan of a call comes with the keyword `tree_plan` of the decoder layer, which a hook of that layer reads. So it also
comes where a forward does not hand it on to the mixer, and in the layer's recomputation under gradient checkpointing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from verl_tree.families import MIXERS, Mixing
from verl_tree.recurrence import fla
from verl_tree.recurrence.causal_conv import ConvSeams, tree_causal_conv
from verl_tree.recurrence.chunks import TreeChunks
from verl_tree.recurrence.delta_rule import tree_gated_delta_rule
from verl_tree.recurrence.inline_mixers import mamba2, short_conv
from verl_tree.recurrence.levels import TreeLevels
from verl_tree.tree.plan import AttentionPlan, States

RULE, CONV, FORWARD = "chunk_gated_delta_rule", "causal_conv1d_fn", "forward"
"""Attributes of instances that are replaced."""

CHUNK_SIZE = 64
"""Tokens of a chunk, as in transformers' and flash-linear-attention's kernels."""


def mixing_of(module: torch.nn.Module) -> Mixing | None:
    """Return how a recurrent layer that is served computes; None of any other module."""
    # FSDP2 makes subclasses of what it shards.
    return next((MIXERS[each.__name__] for each in type(module).__mro__ if each.__name__ in MIXERS), None)


def stand_in_class(module: torch.nn.Module) -> "type[StandIn]":
    """Return the class of what stands in for functions of a mixer."""
    of_mixing: dict[Mixing | None, type[StandIn]] = {
        "delta_rule": VeOmniStandIn if type(module).__module__.startswith("veomni.") else StandIn,
        "delta_rule_three_convs": OlmoHybridStandIn,
        "short_conv": InlineStandIn,
        "mamba2": InlineStandIn,
    }
    return of_mixing.get(mixing_of(module), StandIn)


class StandIn:
    """What stands in for the functions of one mixer: `rule` and `conv`.

    Attributes:
        ran_on: The runs of the plans that it ran with in the current forward pass of the decoder.
    """

    def __init__(self, name: str, module: torch.nn.Module, layer: torch.nn.Module) -> None:
        if layer._compiled_call_impl is not None:
            raise ValueError(
                f"{name} is in a compiled layer, and every tree would be another program: do not compile layers with "
                "recurrent mixers"
            )
        self.name = name
        self.module = module
        self.layer = layer
        self.ran_on: list[object] = []
        self._plan: AttentionPlan | None = None

    def replacements(self) -> list[tuple[torch.nn.Module, str, Callable[..., Any]]]:
        """Return the attributes of instances that are replaced: module, name, and what stands in."""
        return [(self.module, RULE, self.rule), (self.module, CONV, self.conv)]

    def bind(self) -> RemovableHandle:
        """Replace the attributes, and read the plan of every call of the layer."""
        for module, name, function in self.replacements():
            vars(module)[name] = function
        return self.layer.register_forward_pre_hook(self._read_plan, with_kwargs=True)

    def _read_plan(self, _layer: torch.nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self._plan = kwargs.get("tree_plan")

    def _current(self) -> AttentionPlan:
        if self._plan is None:
            raise ValueError(
                f"{self.name} got no tree_plan, so it would run across branches: call model(..., tree_plan=plan)"
            )
        if self._plan.num_context and self._plan.context is None:
            raise ValueError(
                f"{self.name} got a plan of {self._plan.num_context} context tokens without their states: give what "
                "keeps them (context=...)"
            )
        # A rank of several has only some tokens of a path, so an engine refuses these layers (`verl_tree.clashes`).
        assert self._plan.shard.num_ranks == 1, self._plan.shard.num_ranks
        return self._plan

    def _states(self, function: str) -> States | None:
        """Return the states of one function of the mixer that cross calls."""
        context = self._current().context
        return None if context is None else context.states((self.module, function))

    def conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        seq_idx: Tensor | None = None,
        kept_as: str = CONV,
    ) -> Tensor:
        """Stand in for `causal_conv1d_fn`: (1, D, T) to (1, D, T) along the paths of the tree.

        `kept_as` tells the inputs that cross calls from those of other convolutions of the mixer.
        """
        if seq_idx is not None:
            raise ValueError(f"{self.name} got seq_idx: the sequences of a pack are its plan")
        if activation not in (None, "silu", "swish"):
            raise ValueError(f"{self.name} has a convolution with activation {activation}: trees serve silu")
        seams = ConvSeams.of_plan(self._current(), width=weight.shape[-1])
        y_DT = tree_causal_conv(x[0], weight, bias, seams=seams, states=self._states(kept_as))
        return (y_DT if activation is None else F.silu(y_DT)).unsqueeze(0)

    def rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Stand in for `chunk_gated_delta_rule`: (1, T, H, V) along the paths of the tree, and no final state."""
        plan = self._current()
        if initial_state is not None or output_final_state or cu_seqlens is not None or query.shape[0] != 1:
            raise ValueError(
                f"{self.name} is to continue, return or pack states, or has batch size {query.shape[0]}: a pack is one "
                "row; pass use_cache=False and no past_key_values"
            )
        inputs, states = (query[0], key[0], value[0]), self._states(RULE)
        kind = (query.dtype, query.shape, value.shape)
        rule: Callable[..., Tensor]
        # Found once, because gradient checkpointing must compute the same again.
        if plan.once(("delta rule", *kind), lambda plan: fla.serves(*inputs, beta_TH=beta[0], plan=plan)):
            rule = partial(fla.fla_gated_delta_rule, levels=TreeLevels.of_plan(plan, chunk_size=fla.CHUNK_SIZE))
        else:
            rule = partial(tree_gated_delta_rule, chunks=TreeChunks.of_plan(plan, size=CHUNK_SIZE), states=states)
        out_THV = rule(*inputs, g_TH=g[0], beta_TH=beta[0], normalizes=use_qk_l2norm_in_kernel)
        self.ran_on.append(plan.runs)
        self._plan = None  # of this call only
        return out_THV.unsqueeze(0), None


class VeOmniStandIn(StandIn):
    """What stands in for VeOmni's functions, which take sequences one behind the other: of a pack, all as one."""

    def replacements(self) -> list[tuple[torch.nn.Module, str, Callable[..., Any]]]:
        """Return the attributes of the mixer, as VeOmni calls them."""
        return [(self.module, RULE, self.rule_of_one), (self.module, CONV, self.conv_of_one)]

    def conv_of_one(self, *, x: Tensor, backend: str, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Stand in for `causal_conv1d_fn`: (1, T, D) to (1, T, D), and no final state."""
        del backend, cu_seqlens  # of its kernel, and the one sequence
        return self.conv(x.transpose(1, 2), **options).transpose(1, 2), None

    def rule_of_one(self, *inputs: Tensor, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Stand in for `chunk_gated_delta_rule`."""
        del cu_seqlens  # the one sequence
        return self.rule(*inputs, **options)


class OlmoHybridStandIn(StandIn):
    """What stands in for the rule of a mixer and for the forwards of its three convolutions."""

    def replacements(self) -> list[tuple[torch.nn.Module, str, Callable[..., Any]]]:
        """Return the rule's attribute, and the forwards of the convolutions."""
        convs = {name: self.module.get_submodule(name) for name in ("q_conv1d", "k_conv1d", "v_conv1d")}
        forwards = [(conv, FORWARD, partial(self.conv_of, conv, name)) for name, conv in convs.items()]
        return [(self.module, RULE, self.rule), *forwards]

    def conv_of(
        self,
        conv: Any,
        name: str,
        x: Tensor,
        *,
        cache: Tensor | None = None,
        use_precomputed: bool = False,
        output_final_state: bool = False,
    ) -> tuple[Tensor, None]:
        """Stand in for the forward of a convolution: (1, T, D) to (1, T, D), and no final state."""
        if cache is not None or use_precomputed or output_final_state:
            raise ValueError(f"{self.name} is to continue or return states: pass use_cache=False and no cache")
        y_1DT = self.conv(x.transpose(1, 2), conv.weight.squeeze(1), conv.bias, activation="silu", kept_as=name)
        return y_1DT.transpose(1, 2), None


class InlineStandIn(StandIn):
    """What stands in for the forward of a mixer."""

    def replacements(self) -> list[tuple[torch.nn.Module, str, Callable[..., Any]]]:
        """Return the forward of the mixer."""
        return [(self.module, FORWARD, self.forward)]

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: object = None,
        cache_params: object = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **_of_attention: object,
    ) -> Tensor:
        """Stand in for the forward of the mixer: (1, T, E) to (1, T, E) along the paths of the tree."""
        plan = self._current()
        given = (past_key_values, cache_params, seq_idx)
        # A mask without entries is that of a pack (`verl_tree.attention.hf.no_mask`).
        is_masked = attention_mask is not None and attention_mask.numel() > 0
        if any(each is not None for each in given) or is_masked or hidden_states.shape[0] != 1:
            raise ValueError(
                f"{self.name} got a cache, a mask or seq_idx, or has batch size {hidden_states.shape[0]}: a pack is "
                "one row; pass use_cache=False, no past_key_values and no attention_mask"
            )
        if mixing_of(self.module) == "short_conv":
            y_TE = short_conv(self.module, hidden_states[0], plan=plan, inputs=self._states(CONV))
        else:
            y_TE = mamba2(
                self.module,
                hidden_states[0],
                plan=plan,
                chunks=TreeChunks.of_plan(plan, size=CHUNK_SIZE),
                inputs=self._states(CONV),
                states=self._states(RULE),
            )
        self.ran_on.append(plan.runs)
        self._plan = None  # of this call only
        return y_TE.unsqueeze(0)
