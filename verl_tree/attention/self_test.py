"""Self-tests: a kernel is used on a GPU only after it has agreed with the dense backend there.

The first inputs of a kind run a tiny forest forward and backward, once as a whole and once with a context.
Then they run a wide forest several times in a row: it starts more programs than a GPU runs at once, so programs of one
launch, and launches, overlap as they do in training. A kernel that disagrees is refused from then on, its errors are
logged, and `"auto"` takes the next backend.

Legend: T tokens, the last Q of them queries, Hq and Hkv query and key-value heads, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from verl_tree.attention.dense import dense_attention
from verl_tree.attention.options import ScoreOptions
from verl_tree.tree.kernel_test import Results, disagreements, errors_and_limits, reasons_of_first_run, results
from verl_tree.tree.plan import AttentionPlan

TREES = (
    (260, ((70, ()), (90, ((45, ()), (33, ()))), (60, ()))),
    (50, ((1, ((30, ()), (2, ()))), (20, ()))),
    (1, ((37, ((3, ()), (1, ()))),)),
)
"""Forest of the self-test, each tree as (tokens of the node, children). Its tiles are full, partial and skipped."""

CONTEXT_LEN = 300
"""Tokens of the context: a root and a part of its first child, so that it ends inside a run. No tile ends there."""

WIDE_TREES = (
    (900, ((600, ((500, ()), (300, ()))), (700, ((1, ()), (400, ()))), (35, ()))),
    (400, ((200, ()), (150, ()))),
)
"""The wide forest, 4,186 tokens: lists of up to 16 and 33 blocks of 128 keys or queries."""

WIDE_HEADS, WIDE_KV_HEADS = 16, 6
"""Least heads of the wide forest. They start 528 programs of 128 queries, and 198 of 128 keys and a key-value head."""

WIDE_REPEATS = 3

WINDOW = 150
"""Tokens of the sliding window. Some nodes are shorter and some longer, so it makes tiles of 128 x 64 full, partial and
skipped."""

SOFTCAP = 2.0
"""Bound of the scores, which are normal with a deviation of one."""

LIMITS = {"output": 4.0, "dq": 30.0, "dk": 8.0, "dv": 4.0, "dsinks": 8.0}
"""Allowed error, as a multiple of the dense backend's error in the same dtype.

It is about 2.5 times the error of exact arithmetic on probabilities and score gradients rounded to the dtype. The worst
is `dq` of a token that sees two or three keys. It subtracts nearly equal numbers, one made from the rounded output.
"""

LEAST_LIMIT = 1e-5
"""Error that is always allowed. In float32 the dense backend's own error is only a few rounding errors."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """The properties of inputs that select a kernel. Each combination is compiled and tested by itself."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int
    is_windowed: bool = False
    is_capped: bool = False
    has_sinks: bool = False

    @classmethod
    def of(cls, q_QHD: Tensor, k_THD: Tensor, **options: bool) -> Self:
        """Return the variant for these inputs. Two key-value heads are enough, as only the ratio of heads matters."""
        num_kv_heads = min(k_THD.shape[1], 2)
        num_heads = num_kv_heads * (q_QHD.shape[1] // k_THD.shape[1])
        return cls(q_QHD.device, q_QHD.dtype, q_QHD.shape[2], num_heads, num_kv_heads, **options)


def self_test_reasons(backend: str, attend: Callable[..., Tensor], kernel: KernelVariant) -> list[str]:
    """Return why the kernel must not be used; empty if its self-test, run on the first call, finds no fault."""
    return reasons_of_first_run(f"attention backend {backend}", kernel, partial(_every_test, attend, kernel))


def _every_test(attend: Callable[..., Tensor], kernel: KernelVariant) -> list[str]:
    return self_test(attend, kernel) or wide_self_test(attend, kernel)


def self_test(attend: Callable[..., Tensor], kernel: KernelVariant) -> list[str]:
    """Return how a kernel's output and gradients on `TREES` disagree with the dense backend's; empty if they agree.

    A row is a head of a token; the gradient of the sinks, (Hq,), is one row.
    """
    inputs, options = _inputs(TREES, kernel, num_heads=kernel.num_heads, num_kv_heads=kernel.num_kv_heads)
    reasons = []
    # The current device of a new thread is the first one.
    with torch.cuda.device_of(inputs[0]):
        for num_context in (0, CONTEXT_LEN):
            plan = _plan(TREES, kernel, num_context=num_context)
            q_QHD, k_THD, v_THD, grad_out_QHD, *sinks = inputs
            inputs_of_plan = [q_QHD[num_context:], k_THD, v_THD, grad_out_QHD[num_context:], *sinks]
            got = _results(attend, inputs_of_plan, plan, options=options)
            where = f"self-test behind a context of {num_context} tokens" if num_context else "self-test"
            reasons += _disagreements([got], inputs_of_plan, plan, options=options, where=where)
    return reasons


def wide_self_test(attend: Callable[..., Tensor], kernel: KernelVariant) -> list[str]:
    """Return the first disagreements on `WIDE_TREES`, run `WIDE_REPEATS` times in a row, as `self_test` does.

    A model with one key-value head is tested with one, because other kernels serve it: with few query heads that is
    less than a wave. The dense backend computes one key-value head after the other, which bounds its memory.
    """
    num_groups = kernel.num_heads // kernel.num_kv_heads
    num_kv_heads = 1 if kernel.num_kv_heads == 1 else max(WIDE_KV_HEADS, -(-WIDE_HEADS // num_groups))
    inputs, options = _inputs(WIDE_TREES, kernel, num_heads=num_kv_heads * num_groups, num_kv_heads=num_kv_heads)
    with torch.cuda.device_of(inputs[0]):
        plan = _plan(WIDE_TREES, kernel)
        repeats = [_results(attend, inputs, plan, options=options) for _ in range(WIDE_REPEATS)]
        for head in range(num_kv_heads):
            of_head = partial(_of_kv_head, head=head, num_kv_heads=num_kv_heads)
            got = [{name: of_head(result) for name, result in repeat.items()} for repeat in repeats]
            where = f"self-test of {plan.num_tokens} tokens, {WIDE_REPEATS} times, key-value head {head}"
            reasons = _disagreements(got, [of_head(each) for each in inputs], plan, options=options, where=where)
            if reasons:
                return reasons
    return []


def _of_kv_head(x: Tensor, *, head: int, num_kv_heads: int) -> Tensor:
    """Return what belongs to one key-value head, of (T, heads, D) or of (heads,)."""
    return x.chunk(num_kv_heads, dim=min(1, x.ndim - 1))[head]


def _plan(trees: tuple, kernel: KernelVariant, *, num_context: int = 0) -> AttentionPlan:
    subtree_end_T = torch.tensor(subtree_ends(trees), dtype=torch.int32)
    return AttentionPlan.from_subtree_end(subtree_end_T, device=kernel.device, num_context=num_context)


def _inputs(
    trees: tuple, kernel: KernelVariant, *, num_heads: int, num_kv_heads: int
) -> tuple[list[Tensor], ScoreOptions]:
    """Draw q, k, v, the gradient of the output and, if any, sinks; and make the options of the kernel."""
    num_tokens = len(subtree_ends(trees))
    generator = torch.Generator().manual_seed(0)
    counts = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    shapes: list[tuple[int, ...]] = [(num_tokens, count, kernel.head_dim) for count in counts]
    if kernel.has_sinks:
        shapes.append((num_heads,))
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float32).to(kernel.device, kernel.dtype) for shape in shapes
    ]
    options = ScoreOptions(
        scale=kernel.head_dim**-0.5,
        window=WINDOW if kernel.is_windowed else None,
        softcap=SOFTCAP if kernel.is_capped else None,
    )
    return inputs, options


def _disagreements(
    repeats: list[Results], inputs: list[Tensor], plan: AttentionPlan, *, options: ScoreOptions, where: str
) -> list[str]:
    """Return which results of which repeats are too far from the dense backend's, the first one of each kind."""
    want = _results(dense_attention, [each.double() for each in inputs], plan, options=options)
    plain = _results(dense_attention, inputs, plan, options=options)
    errors = errors_and_limits(repeats, want=want, plain=plain, limits=LIMITS, least=LEAST_LIMIT)
    return disagreements(errors, where=where)


def subtree_ends(trees: tuple, *, start: int = 0) -> list[int]:
    """Return `subtree_end` of trees as in `TREES`, in DFS preorder from token `start` on."""
    ends: list[int] = []
    for num_tokens, children in trees:
        first_child = start + len(ends) + num_tokens
        below = subtree_ends(children, start=first_child)
        ends += [first_child + len(below)] * num_tokens + below
    return ends


def _results(
    attend: Callable[..., Tensor], inputs: list[Tensor], plan: AttentionPlan, *, options: ScoreOptions
) -> Results:
    """Return output and gradients. The inputs are q, k, v, the gradient of the output and, if any, sinks."""

    def function(q_QHD: Tensor, k_THD: Tensor, v_THD: Tensor, sinks_H: Tensor | None = None) -> Tensor:
        return attend(q_QHD, k_THD, v_THD, plan, options=replace(options, sinks_H=sinks_H))

    leaves = [*inputs[:3], *inputs[4:]]
    return results(function, leaves, inputs[3], names=("q", "k", "v", "sinks")[: len(leaves)])
