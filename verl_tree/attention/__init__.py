"""Attention under the tree mask: one contract, several backends (docs/attention.md).

Key `j` is visible to query `i` iff `j <= i < subtree_end[j]` (tokens in DFS preorder). A backend serves this mask, and
the options of a layer (`ScoreOptions`), exactly. If it cannot, it says why. The first tokens may be context: keys
without a query.

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_tree.attention import dense, fa4, triton_backend, varlen
from verl_tree.attention.options import ScoreOptions
from verl_tree.tree.kernel_test import tell_once
from verl_tree.tree.plan import AttentionPlan

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionPlan",
    "ScoreOptions",
    "choose_backend",
    "tree_attention",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One implementation of the tree mask.

    Attributes:
        attend: `attend(q_QHD, k_THD, v_THD, plan, *, options) -> out_QHD`, differentiable once. Shapes are those of
            `tree_attention`. The plan is on the device of the inputs. The output has the dtype of `q_QHD`.
        not_supported_reasons: Takes the same arguments. Returns a list of reasons, empty if the backend can serve.
        is_oracle: It serves everything, slowly. `"auto"` warns when it takes it, and on a GPU takes it for small
            forests only (`MAX_ORACLE_TOKENS`). Benchmarks leave it out.
    """

    attend: Callable[..., torch.Tensor]
    not_supported_reasons: Callable[..., list[str]]
    is_oracle: bool = False


BACKENDS: dict[str, AttentionBackend] = {
    "fa4": AttentionBackend(fa4.fa4_attention, fa4.not_supported_reasons),
    "triton": AttentionBackend(triton_backend.triton_attention, triton_backend.not_supported_reasons),
    "varlen": AttentionBackend(varlen.varlen_attention, varlen.not_supported_reasons),
    "dense": AttentionBackend(dense.dense_attention, lambda *_, **__: [], is_oracle=True),
}
"""Every backend, fastest first. `"auto"` takes the first that serves the inputs."""

MAX_ORACLE_TOKENS = 4096
"""Tokens, context included, up to which `"auto"` takes the oracle on a GPU. The oracle's time grows with their square:
a training run on larger forests would look healthy and take many times as long."""


def tree_attention(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    subtree_end: torch.Tensor | AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    backend: str = "auto",
    num_context: int = 0,
) -> torch.Tensor:
    """Compute differentiable attention, (Q, Hq, D), in which every query sees exactly the tokens of its own path.

    Args:
        q_QHD: (Q, Hq, D) queries of the last Q = T - `num_context` tokens.
        k_THD: (T, Hkv, D) keys; Hkv divides Hq (grouped-query attention).
        v_THD: (T, Hkv, D) values.
        subtree_end: int32 (T,), one past the last descendant of each token in DFS preorder; or the pack's plan, which
            all layers share.
        scale: Factor on the scores, by default `D ** -0.5`.
        window: A query sees only itself and the keys of its path fewer than `window` positions before it.
        softcap: Scores `s` become `softcap * tanh(s / softcap)`.
        sinks: (Hq,) logits that join the softmax's denominator and carry no value; differentiable.
        backend: A key of `BACKENDS`, or `"auto"`: the plan's own choice, else the first backend that can serve. On a
            GPU `"auto"` takes the slow one for small forests only.
        num_context: Tokens before the queries: the root path of the first query. A plan has its own number.

    Raises:
        ValueError: Shapes or options do not fit, or the backend (with `"auto"`: every backend) refuses; the message has
            the reasons.
    """
    if not isinstance(subtree_end, AttentionPlan):
        plan = AttentionPlan.from_subtree_end(subtree_end, device=q_QHD.device, num_context=num_context)
    elif num_context in (0, subtree_end.num_context):
        plan = subtree_end
    else:
        raise ValueError(
            f"num_context={num_context}, but the plan was built with {subtree_end.num_context}, which counts: leave "
            "num_context out"
        )
    _check_shapes(q_QHD, k_THD, v_THD, plan)
    _, num_heads, head_dim = q_QHD.shape
    scale = float(head_dim**-0.5) if scale is None else scale
    options = ScoreOptions.of_layer(plan, scale=scale, num_heads=num_heads, window=window, softcap=softcap, sinks=sinks)
    asked = plan.backend if backend == "auto" else backend
    name = choose_backend(q_QHD, k_THD, v_THD, plan, backend=asked, options=options)
    return BACKENDS[name].attend(q_QHD, k_THD, v_THD, plan, options=options)


def choose_backend(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    backend: str,
    options: ScoreOptions,
) -> str:
    """Return the name of the backend that will serve the inputs, found once per plan and kind of inputs.

    The choice is logged once per set of options.

    Raises:
        ValueError: `backend` does not exist or refuses, or is `"auto"` and every backend refuses.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"attention backend {backend!r} does not exist; choose one of {['auto', *BACKENDS]}")
    kinds = [(each.dtype, each.shape[1:]) for each in (q_QHD, k_THD, v_THD)]
    asked = (options.window, options.softcap, options.sinks_H is None, torch.are_deterministic_algorithms_enabled())

    def find(plan: AttentionPlan) -> str:
        return _first_without_reasons(q_QHD, k_THD, v_THD, plan, backend=backend, options=options)

    return plan.once(("backend", backend, *kinds, *asked), find)


def _first_without_reasons(
    q_QHD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    plan: AttentionPlan,
    *,
    backend: str,
    options: ScoreOptions,
) -> str:
    refusals = []
    for name in BACKENDS if backend == "auto" else [backend]:
        reasons = BACKENDS[name].not_supported_reasons(q_QHD, k_THD, v_THD, plan, options=options)
        is_slow = BACKENDS[name].is_oracle and q_QHD.device.type == "cuda" and plan.num_tokens > MAX_ORACLE_TOKENS
        if backend == "auto" and is_slow:
            reasons = [*reasons, f"slow, so 'auto' takes it up to {MAX_ORACLE_TOKENS} tokens, not {plan.num_tokens}"]
        if not reasons:
            _log_once(backend, name, refusals=refusals, options=options)
            return name
        refusals.append(f"{name}: {'; '.join(reasons)}")
    raise ValueError(
        f"attention backend {backend!r} cannot serve this input: {', '.join(refusals)}; remove what the fast backends "
        "refuse, or ask for the slow one, which serves every input, by its name: 'dense' (tree.backend=dense)"
    )


def _log_once(asked: str, chosen: str, *, refusals: list[str], options: ScoreOptions) -> None:
    wanted = f" for layers with {' and '.join(options.names())}" if options.names() else ""
    why = f"; faster ones refused: {', '.join(refusals)}" if refusals else ""
    # An oracle is slow, so a user who did not ask for it by name is warned.
    level = logging.WARNING if asked == "auto" and BACKENDS[chosen].is_oracle else logging.INFO
    key, message = (asked, chosen, *options.names()), "tree attention backend%s: %s (asked for: %s)%s"
    tell_once(logger, level, key, message, wanted, chosen, asked, why)


def _check_shapes(q_QHD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor, plan: AttentionPlan) -> None:
    shapes = f"q {tuple(q_QHD.shape)}, k {tuple(k_THD.shape)}, v {tuple(v_THD.shape)}"
    lens = (plan.num_queries, plan.num_tokens, plan.num_tokens)
    if any(x.ndim != 3 or x.shape[0] != num_rows for x, num_rows in zip((q_QHD, k_THD, v_THD), lens, strict=True)):
        raise ValueError(
            f"{shapes}: q must be (T - num_context, heads, head dim), and k and v (T, heads, head dim), with "
            f"T = {plan.num_tokens}, the length of subtree_end, and num_context = {plan.num_context}"
        )
    if k_THD.shape[1] != v_THD.shape[1] or q_QHD.shape[1] % k_THD.shape[1] or q_QHD.shape[2] != k_THD.shape[2]:
        raise ValueError(f"{shapes}: k and v need one number of heads that divides q's, and q and k one head dim")
