"""Tree attention as an attention implementation of transformers: `attn_implementation="tree_attention"`.

transformers hands every unknown keyword of `model(...)` to the attention function of every layer, also through gradient
checkpointing. So the plan of a pack travels as `model(..., tree_plan=plan)` and nothing is patched. Each layer hands
its own sliding window, softcap and sinks. If the plan has a context, the model computes the queries only, and each
layer takes the keys and values before them from the context. If several ranks compute the queries together, attention
runs on all queries of some heads (`verl_tree.tree.sharding`), and the context is that of these heads.

A silently lost mask would be the worst bug. So a layer raises if it has no plan, a mask of its own, or a feature that
no backend serves.

Layers may be compiled (`layer.compile()`). The attention function itself runs uncompiled, because every plan would be
another program; torch refuses `fullgraph=True` with this reason. A model that is compiled as a whole is refused.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from verl_tree.attention.layer import layer_attention
from verl_tree.families import ATTENTION_LAYERS, MIXERS, RECURRENT_LAYERS, RECURRENT_TYPES, REFUSED
from verl_tree.recurrence.bind import RecurrentLayers, num_bound_mixers, unbound_mixers
from verl_tree.tree.plan import AttentionPlan

ATTENTION_NAME = "tree_attention"

NO_MASK_SHAPE = (1, 1, 0, 0)

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def register() -> None:
    """Make `attn_implementation="tree_attention"` known to transformers in this process; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, tree_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask_factory)


def for_text(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Return the attention implementations of a model whose text part gets `name`.

    Patches of an image see each other in both directions, so a vision tower gets "sdpa".
    """
    parts = config.sub_configs.keys()
    return {"text_config": name, "vision_config": "sdpa"} if {"text_config", "vision_config"} <= parts else name


@torch.compiler.disable(reason="attention under the tree mask is chosen by the plan of each call")
def tree_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    output_attentions: bool = False,
    **_unread: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' layers ask for it.

    `query` is (1, Hq, L, D), `key` and `value` are (1, Hkv, L, D), and `s_aux` are (Hq,) logits of attention sinks. The
    output is (1, L, Hq, D), with None in place of the probabilities. L are the queries of the plan's shard, all Q of
    them where one rank computes alone.

    Raises:
        ValueError: There is no plan, or the layer asks for something that no backend serves, or has a number of heads
            that the ranks of a shard cannot share.
    """
    layer = type(module).__name__
    if tree_plan is None:
        raise ValueError(
            f"{layer} got no tree_plan, so the tree's mask would be lost: call model(..., tree_plan=plan), or set "
            "another attn_implementation for flat sequences"
        )
    reasons = []
    if query.shape[0] != 1:
        reasons.append(f"batch size {query.shape[0]}: a pack is one row")
    if attention_mask is not None and attention_mask.shape != NO_MASK_SHAPE:
        reasons.append("an attention_mask: the mask of a pack is its plan")
    if key.shape[2] != query.shape[2]:
        reasons.append(f"{key.shape[2]} keys for {query.shape[2]} queries: pass use_cache=False and no past_key_values")
    if dropout > 0.0:
        reasons.append(
            f"attention dropout {dropout}: load the model with an attention dropout of 0 (attention_dropout or "
            "attn_pdrop in its config), or call model.eval()"
        )
    if is_causal is False:
        reasons.append("is_causal=False: only causal models have shareable prefixes")
    if indices is not None:
        reasons.append("sparse attention (indices)")
    if output_attentions:
        reasons.append("output_attentions=True")
    if reasons:
        raise ValueError(f"tree attention cannot serve {layer}, which asks for " + "; ".join(reasons))
    shard = tree_plan.shard
    rows = (_autocast(each[0]).transpose(0, 1) for each in (query, key, value))
    out_QHD = layer_attention(
        module,
        *shard.scatter_heads(*rows),
        tree_plan,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=None if s_aux is None else shard.own_heads(s_aux),
    )
    return shard.gather_heads(out_QHD).unsqueeze(0), None


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """Cast as autocast does for the attention functions of torch: to its dtype, but never float64.

    With float32 parameters, norms and rotary embeddings leave queries and keys in float32, and projections values in
    the autocast dtype. No fast kernel serves such a mixture.
    """
    device = x.device.type
    casts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(device)) if casts else x


def check_model(model: PreTrainedModel, *, max_path_len: int) -> None:
    """Refuse an unwrapped transformers model that cannot honour the tree for paths of up to `max_path_len` tokens.

    Raises:
        ValueError: With the reason.
    """
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True).to_dict()
    rope = config.get("rope_parameters") or {}
    ropes = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder: tree training needs a decoder whose only input is the token path"
        )
    _check_recurrent_layers(model, config)
    # The hybrids that are served call it, but transformers 5.10.4 does not say so of them.
    if not model.is_backend_compatible() and not num_bound_mixers(model):
        raise ValueError(
            f"{name} does not call transformers' AttentionInterface, so it would ignore the tree: train it flat"
        )
    if config.get("use_bidirectional_attention") in (True, "all"):
        raise ValueError(
            f"{name} has use_bidirectional_attention={config['use_bidirectional_attention']}: a token that sees what "
            "follows it has no prefix to share, so train it flat"
        )
    for rope in ropes:
        scaled_from = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        if rope["rope_type"] in _LENGTH_DEPENDENT_ROPE and max_path_len > scaled_from:
            raise ValueError(
                f"{name} has RoPE of type {rope['rope_type']}, which depends on the length of the sequence beyond "
                f"{scaled_from} tokens, and the longest trajectory has {max_path_len}: a shared prefix has no one "
                "length, so shorten the trajectories or train it flat"
            )


def _check_recurrent_layers(model: PreTrainedModel, config: dict[str, Any]) -> None:
    """Refuse layers that pass something on from token to token in a way that no tree is served in."""
    name, model_type = type(model).__name__, config.get("model_type", "")
    layer_types = config.get("layer_types") or ["full_attention"]
    is_served = set(layer_types) <= {*ATTENTION_LAYERS, *RECURRENT_LAYERS}
    num_recurrent = sum(each in RECURRENT_LAYERS for each in layer_types)
    unbound = unbound_mixers(model)
    if unbound:
        raise ValueError(
            f"{name} has recurrent layers that do not follow the tree ({unbound[0]} is the first): use tree_log_probs, "
            "or tree_attention_implementation, which bind them"
        )
    # A Granite-4 without Mamba-2 has the class of one with it, of which transformers says that it is stateful.
    has_state = model._is_stateful and not num_recurrent and model_type not in RECURRENT_TYPES
    if is_served and num_recurrent == num_bound_mixers(model) and not has_state:
        return
    kinds = ", ".join(sorted(set(layer_types).difference(ATTENTION_LAYERS))) or "a recurrent state"
    reason = REFUSED.get(model_type, f"of recurrent mixers, trees serve {', '.join(MIXERS)}")
    raise ValueError(
        f"{name} (model type {model_type}) has layers ({kinds}) that pass something other than full attention from "
        f"token to token, which would cross branches: train it flat ({reason})"
    )


@contextmanager
def tree_attention_implementation(
    model: PreTrainedModel, *, max_path_len: int, use_reentrant: bool | None = None
) -> Iterator[None]:
    """Set the attention implementation to "tree_attention", bind recurrent layers, and restore both, also on error.

    `model` may be wrapped by PEFT. `max_path_len` is the length of the longest trajectory. `use_reentrant` replaces
    that option of gradient checkpointing, where it is enabled. None: it stays as it is.

    Raises:
        ValueError: The model cannot honour the tree.
    """
    _refuse_compiled(model)
    base = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    recurrent = RecurrentLayers(base)
    with recurrent.bound():
        check_model(base, max_path_len=max_path_len)
    register()

    @contextmanager
    def on_trees() -> Iterator[None]:
        with recurrent.bound(), _attention_name(base, ATTENTION_NAME):
            yield

    # Gradient checkpointing runs layers again in the backward pass, after the `with` block. These runs need the tree,
    # too.
    name = "_gradient_checkpointing_func"
    checkpoints = [(vars(module), vars(module)[name]) for module in base.modules() if name in vars(module)]
    for attributes, function in checkpoints:
        given = function if use_reentrant is None else functools.partial(function, use_reentrant=use_reentrant)
        attributes[name] = _checkpoint_with_tree(given, on_trees)
    try:
        with on_trees():
            yield
    finally:
        for attributes, function in checkpoints:
            attributes[name] = function


def _refuse_compiled(model: torch.nn.Module) -> None:
    """Refuse what `torch.compile(model)` returns and what `model.compile()` changes.

    Scoring puts itself in place of the output head for the time of a call, so a program of the whole model would be
    compiled anew in every call, or hold the head of an earlier one.
    """
    is_wrapped = "_orig_mod" in dict(model.named_children())
    if is_wrapped or model._compiled_call_impl is not None:
        raise ValueError(
            f"{type(model).__name__} is compiled as a whole, which scores of trees do not support: compile its layers "
            "instead, `for layer in model.model.layers: layer.compile()`"
        )


@contextmanager
def _attention_name(model: PreTrainedModel, name: str) -> Iterator[None]:
    config = model.config
    before = {"": config._attn_implementation} | {
        part: sub._attn_implementation for part, sub in vars(config).items() if part in config.sub_configs and sub
    }
    assert before[""] is not None, "a model that is built has an attention implementation"
    model.set_attn_implementation(for_text(config, name))
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model on trees attend by transformers' own function and masks, in calls of one sequence each.

    What transformers' sdpa leaves out, soft caps and sinks, its plain function computes.
    """
    config = model.config.get_text_config(decoder=True).to_dict()
    is_plain = not model._supports_sdpa or config.get("attn_logit_softcapping") is not None
    with _attention_name(model, "eager" if is_plain else "sdpa"):
        yield


def _checkpoint_with_tree(
    checkpoint: Callable[..., Any], on_trees: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """Return a checkpoint function that runs its layers on trees, also in the backward pass."""

    def run(function: Callable[..., Any], *args: Any) -> Any:
        def with_tree(*inner_args: Any) -> Any:
            with on_trees():
                return function(*inner_args)

        return checkpoint(with_tree, *args)

    return run


def no_mask(config: PretrainedConfig, device: torch.device) -> torch.Tensor | None:
    """Return a mask without entries for `model(..., attention_mask=..., tree_plan=plan)`, given the model's config.

    None does as well. But for None transformers looks for packed sequences in the position ids, and the host waits for
    the device once in every forward pass. A mask of four dimensions it hands to the layers as it is. Source:
    transformers 5.10.4, masking_utils.py, `_preprocess_mask_arguments`. Only mixtures that balance their experts in the
    loss unpack the mask themselves, as one of two dimensions, and get None; so does another attention than that of
    trees, which makes its own.
    """
    text = config.get_text_config(decoder=True)
    if text._attn_implementation != ATTENTION_NAME or text.to_dict().get("output_router_logits"):
        return None
    return torch.empty(NO_MASK_SHAPE, dtype=torch.bool, device=device)


def _mask_factory(*_args: object, attention_mask: torch.Tensor | None = None, **_kwargs: object) -> None:
    """Serve as transformers' mask factory. It makes none, because the mask of a pack is its plan."""
    if attention_mask is not None:
        raise ValueError("tree attention got an attention_mask: a pack has no padding, pass attention_mask=None")
