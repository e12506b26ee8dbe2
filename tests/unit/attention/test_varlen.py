"""varlen's providers for CUDA without a GPU: their calls, merged with a loop on the CPU, and how they ask for kernels.

A stand-in for each package has the parameters of the real function (versions in `varlen_providers`) and computes by the
loop, so an argument in the wrong place gives wrong numbers. What the real kernels compute, only a GPU can tell.
"""

import dataclasses
import importlib.metadata
import itertools
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import draw_section, leaves_for, outputs_and_gradients, random_qkv, worst_error
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cases import layout_of, random_sequences

from verl_tree.attention import AttentionPlan, ScoreOptions, varlen
from verl_tree.attention.dense import dense_attention
from verl_tree.attention.pieces import MAX_WINDOW_KEYS, mask_calls, window_calls
from verl_tree.attention.self_test import KernelVariant, self_test
from verl_tree.attention.varlen import merged_attention
from verl_tree.attention.varlen_providers import PROVIDERS, VarlenProvider, few_calls

CPU, FA3, FA2, ATEN = PROVIDERS
PLAIN = ScoreOptions(scale=0.3)
# Tokens 0 1 | 2 | 3 4 | 5 | 6 | 7 8 | 9: a root with the children 2 and 6; below 2: 3-4 and 5, below 6: 7-8 and 9.
TWO_LEVELS = np.array([10, 10, 6, 5, 5, 6, 10, 9, 9, 10])


def segments(call):
    query_offsets, key_offsets = call.query_offsets_S1.tolist(), call.key_offsets_S1.tolist()
    assert call.window is None or call.causal
    pairs = list(zip(query_offsets[:-1], query_offsets[1:], key_offsets[:-1], key_offsets[1:], strict=True))
    assert max(end - start for start, end, *_ in pairs) <= call.max_query_len
    assert max(end - start for *_, start, end in pairs) <= call.max_key_len
    return [(slice(q, q_end), slice(k, k_end)) for q, q_end, k, k_end in pairs]


def mask_of(call, rows, keys, dtype):
    """For the CPU kernel, which knows no window: None without one."""
    if call.window is None:
        return None
    num_queries, num_keys = rows.stop - rows.start, keys.stop - keys.start
    query_L = torch.arange(num_keys - num_queries, num_keys)[:, None]
    distance_LK = query_L - torch.arange(num_keys)
    visible_LK = (distance_LK >= 0) & (distance_LK < call.window)
    return torch.zeros(visible_LK.shape, dtype=dtype).masked_fill(~visible_LK, -torch.inf)


def heads_first(x_THD, num_groups=1):
    return x_THD.transpose(0, 1).repeat_interleave(num_groups, 0).unsqueeze(0)


def loop_forward(q, k, v, call, *, scale):
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan)
    lse = lse.float() if q.dtype == torch.bfloat16 else lse
    for rows, keys in segments(call):
        one, lse_one = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            heads_first(q[rows]),
            heads_first(k[keys], groups),
            heads_first(v[keys], groups),
            0.0,
            call.causal and call.window is None,
            attn_mask=mask_of(call, rows, keys, q.dtype),
            scale=scale,
        )
        out[rows], lse[:, rows] = one[0].transpose(0, 1), lse_one[0]
    return out, lse


def loop_backward(grad_out, q, k, v, out, lse, call, *, scale):
    groups = q.shape[1] // k.shape[1]
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for rows, keys in segments(call):
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(heads_first(grad_out[rows]), heads_first(q[rows])),
            *(heads_first(k[keys], groups), heads_first(v[keys], groups)),
            *(heads_first(out[rows]), lse[:, rows].unsqueeze(0), 0.0, call.causal and call.window is None),
            attn_mask=mask_of(call, rows, keys, q.dtype),
            scale=scale,
        )
        gradients[0][rows] = found[0][0].transpose(0, 1)
        for gradient, one in zip(gradients[1:], found[1:], strict=True):
            gradient[keys] = one[0].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
    return tuple(gradients)


LOOP = VarlenProvider("loop", lambda *_: [], few_calls, loop_forward, loop_backward)


def assert_equals_dense(provider, plan, *, num_groups, with_sinks, window=None, seed=0):
    *qkv, grad_out = random_qkv(plan.num_tokens, num_groups=num_groups, head_dim=8, seed=seed)
    leaves = leaves_for({"sinks": with_sinks}, [qkv[0][plan.num_context :].detach().requires_grad_(), *qkv[1:]])
    grad_out = grad_out[plan.num_context :]

    def run(attend):
        def function(q, k, v, sinks_H=None):
            return attend(q, k, v, plan, options=ScoreOptions(0.3, window=window, sinks_H=sinks_H))

        return outputs_and_gradients(function, leaves, grad_out)

    got, want = run(partial(merged_attention, provider=provider)), run(dense_attention)
    assert worst_error(got, want, grad_out=grad_out) < 1e-12


def random_plan(seed):
    """Draw a forest, or for a third of the seeds a section of one behind its context."""
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, num_sequences=int(rng.integers(1, 40)), mean_len=int(rng.integers(1, 12)))
    layout = layout_of(sequences)
    return AttentionPlan.from_layout(layout) if seed % 3 else draw_section(rng, layout).plan()


@fuzzed(40)
@given(seed=st.integers(0, 10**6), num_groups=st.sampled_from([1, 2, 7]), with_sinks=st.booleans())
def test_calls_equal_dense_on_random_forests(seed, num_groups, with_sinks):
    assert_equals_dense(LOOP, random_plan(seed), num_groups=num_groups, with_sinks=with_sinks, seed=seed)


@fuzzed(40)
@given(seed=st.integers(0, 10**6))
def test_calls_cover_every_visible_pair_once(seed):
    """And no call has a token twice among its queries or keys: gradients are added by index."""
    plan = random_plan(seed)
    token_T = torch.arange(plan.num_tokens)
    count_TT = torch.zeros(plan.num_tokens, plan.num_tokens, dtype=torch.int64)
    for call in mask_calls(plan, by_level=True):
        queries, keys = token_T[plan.num_context :][call.query_rows], token_T[call.key_rows]
        assert len(queries.unique()) == len(queries)
        assert len(keys.unique()) == len(keys)
        for rows, columns in segments(call):
            visible = queries[rows, None] >= keys[columns] if call.causal else torch.ones(1, 1, dtype=torch.bool)
            count_TT[queries[rows, None], keys[columns]] += visible.long()
    mask_TT = (token_T <= token_T[:, None]) & (token_T[:, None] < plan.subtree_end_T)
    mask_TT[: plan.num_context] = False
    assert torch.equal(count_TT, mask_TT.long())


@fuzzed(60)
@given(
    seed=st.integers(0, 10**6),
    window=st.integers(2, 30),
    max_query_len=st.sampled_from([None, 1, 3, 8]),
    num_groups=st.sampled_from([1, 3]),
    with_sinks=st.booleans(),
)
def test_a_windowed_call_equals_dense_on_random_forests(seed, window, max_query_len, num_groups, with_sinks):
    sizes = {"max_query_len": max_query_len, "max_keys": 64 if seed % 2 else MAX_WINDOW_KEYS}  # several calls, and one
    provider = dataclasses.replace(LOOP, calls=lambda plan, window: window_calls(plan, window, **sizes))
    case = {"num_groups": num_groups, "with_sinks": with_sinks, "window": window, "seed": seed}
    assert_equals_dense(provider, random_plan(seed), **case)


def test_windowed_calls_gather_no_more_than_they_may():
    calls = window_calls(AttentionPlan.from_subtree_end(TWO_LEVELS), 3, max_keys=7)
    assert [call.key_offsets_S1.tolist() for call in calls] == [[0, 2, 5], [0, 4, 7], [0, 3, 7], [0, 3]]
    assert [call.query_rows for call in calls] == [slice(0, 3), slice(3, 6), slice(6, 9), slice(9, 10)]


def test_the_windowed_call_of_two_levels():
    """Window 3: every run with the two tokens before it on its path."""
    plan = AttentionPlan.from_subtree_end(TWO_LEVELS)
    (call,) = window_calls(plan, 3)
    assert call.causal
    assert call.window == 3
    assert call.query_rows == slice(0, 10)
    assert call.query_offsets_S1.tolist() == [0, 2, 3, 5, 6, 7, 9, 10]
    keys = [call.key_rows[start:end].tolist() for start, end in itertools.pairwise(call.key_offsets_S1.tolist())]
    assert keys == [[0, 1], [0, 1, 2], [1, 2, 3, 4], [1, 2, 5], [0, 1, 6], [1, 6, 7, 8], [1, 6, 9]]
    assert window_calls(plan, 3)[0] is call
    (halves,) = window_calls(plan, 2, max_query_len=1)
    assert halves.query_offsets_S1.tolist() == list(range(11))
    assert halves.key_rows.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 2, 5, 1, 6, 6, 7, 7, 8, 6, 9]


def test_random_forests_reach_deep_levels_contexts_and_both_kinds_of_rows():
    plans = [random_plan(seed) for seed in range(20)]
    runs_of_context = [(plan.runs.start_R < plan.num_context).sum() for plan in plans]
    assert max(runs_of_context) > 2
    assert runs_of_context.count(0) > 5
    calls = [mask_calls(plan, by_level=True) for plan in plans]
    assert max(map(len, calls)) > 4
    kinds = [type(call.query_rows) for each in calls for call in each[1:]]
    assert kinds.count(slice) > 5
    assert kinds.count(torch.Tensor) > 5


def test_calls_of_the_drawn_forest():
    """Prompt | a | b | c | d of the docstring, with 3, 2, 1, 2 and 1 tokens."""
    plan = AttentionPlan.from_subtree_end(np.array([9, 9, 9, 8, 8, 6, 8, 8, 9]))
    triangles, first, second = mask_calls(plan, by_level=True)
    assert triangles.causal
    assert not first.causal
    assert not second.causal
    assert triangles.query_rows == triangles.key_rows == slice(0, 9)
    assert triangles.query_offsets_S1.tolist() == triangles.key_offsets_S1.tolist() == [0, 3, 5, 6, 8, 9]
    assert (first.query_rows, first.key_rows) == (slice(3, 9), slice(0, 3))
    assert (second.query_rows, second.key_rows) == (slice(5, 8), slice(3, 5))
    assert second.query_offsets_S1.tolist() == [0, 3]
    assert second.key_offsets_S1.tolist() == [0, 2]
    assert (second.max_query_len, second.max_key_len) == (3, 2)
    assert triangles.query_offsets_S1.dtype == torch.int32
    assert mask_calls(plan, by_level=True)[0] is triangles


def test_calls_behind_a_context():
    """The same forest from the second token of a on: prompt and a are split, and the queries count from there."""
    plan = AttentionPlan.from_subtree_end(np.array([9, 9, 9, 8, 8, 6, 8, 8, 9]), num_context=4)
    triangles, first, second, third = mask_calls(plan, by_level=True)
    assert (triangles.query_rows, triangles.key_rows) == (slice(0, 5), slice(4, 9))
    assert triangles.query_offsets_S1.tolist() == triangles.key_offsets_S1.tolist() == [0, 1, 2, 4, 5]
    assert (first.query_rows, first.key_rows) == (slice(0, 5), slice(0, 3))
    assert (second.query_rows, second.key_rows) == (slice(0, 4), slice(3, 4))
    assert (third.query_rows, third.key_rows) == (slice(1, 4), slice(4, 5))
    (windowed,) = window_calls(plan, 3)
    assert windowed.query_rows == slice(0, 5)
    keys = [windowed.key_rows[s:e].tolist() for s, e in itertools.pairwise(windowed.key_offsets_S1.tolist())]
    assert keys == [[2, 3, 4], [3, 4, 5], [3, 4, 6, 7], [1, 2, 8]]


def test_a_prompt_with_branches_is_two_calls():
    """Prefix Grouper's; views of one range each."""
    plan = AttentionPlan.from_layout(layout_of([[1, 2, 3, 10 + branch, 4] for branch in range(5)]))
    causal, rectangle = mask_calls(plan, by_level=True)
    assert (rectangle.query_rows, rectangle.key_rows) == (slice(3, 13), slice(0, 3))
    assert isinstance(causal.query_rows, slice)


def test_levels_with_several_rectangles_are_gathered():
    _, root, children = mask_calls(AttentionPlan.from_subtree_end(TWO_LEVELS), by_level=True)
    assert (root.query_rows, root.key_rows) == (slice(2, 10), slice(0, 2))
    assert children.query_rows.tolist() == [3, 4, 5, 7, 8, 9]
    assert children.key_rows.tolist() == [2, 6]
    assert children.query_offsets_S1.tolist() == [0, 3, 6]
    assert children.key_offsets_S1.tolist() == [0, 1, 2]
    assert (children.max_query_len, children.max_key_len) == (3, 2)  # at least 2: flash-attn 2's other kernel


def test_a_wrong_log_sum_exp_is_found():
    """Guards the comparison: a backward pass with each call's own log-sum-exp is far off."""

    def backward(grad_out, q, k, v, _out, _lse, call, *, scale):
        own_out, own_lse = loop_forward(q, k, v, call, scale=scale)
        return loop_backward(grad_out, q, k, v, own_out, own_lse, call, scale=scale)

    wrong = VarlenProvider("wrong", lambda *_: [], few_calls, loop_forward, backward)
    with pytest.raises(AssertionError):
        assert_equals_dense(wrong, AttentionPlan.from_subtree_end(TWO_LEVELS), num_groups=1, with_sinks=False)


@pytest.mark.parametrize("is_windowed", [False, True])
@pytest.mark.parametrize("num_groups", [1, 4])
def test_the_self_test_accepts_bfloat16_calls(num_groups, is_windowed):
    variant = KernelVariant(torch.device("cpu"), torch.bfloat16, 64, 2 * num_groups, 2, is_windowed)
    assert self_test(partial(merged_attention, provider=LOOP), variant) == []


def test_the_self_test_finds_a_window_off_by_one():
    def attend(*args, options):
        wider = dataclasses.replace(options, window=options.window + 1)
        return merged_attention(*args, options=wider, provider=LOOP)

    variant = KernelVariant(torch.device("cpu"), torch.bfloat16, 64, 2, 2, is_windowed=True)
    assert self_test(attend, variant) != []


@pytest.mark.parametrize("num_context", [0, 3])
@pytest.mark.parametrize("window", [None, 2])
def test_aten_is_asked_as_its_schema_says(window, num_context):
    """On tensors without memory: names, types and shapes of arguments and results of torch's own kernels."""
    plan = AttentionPlan.from_subtree_end(TWO_LEVELS, device="meta", num_context=num_context)
    shapes = ((10 - num_context, 4, 64), (10, 2, 64), (10, 2, 64), (4,))
    q, k, v, sinks = (torch.empty(x, dtype=torch.bfloat16, device="meta", requires_grad=True) for x in shapes)
    out = merged_attention(q, k, v, plan, options=ScoreOptions(0.3, window=window, sinks_H=sinks), provider=ATEN)
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    for x, gradient in zip((q, k, v, sinks), torch.autograd.grad(out, (q, k, v, sinks), out), strict=True):
        assert gradient.shape == x.shape
        assert gradient.dtype == x.dtype


def call_of(given):
    """Return the call that the arguments of a stand-in, by name, describe."""
    left, right = given.get("window_size_left", -1), given.get("window_size_right", -1)
    assert right == (-1 if left == -1 else 0)
    return SimpleNamespace(
        query_offsets_S1=given["cu_seqlens_q"],
        key_offsets_S1=given["cu_seqlens_k"],
        max_query_len=given["max_seqlen_q"],
        max_key_len=given["max_seqlen_k"],
        causal=given["causal"],
        window=None if left == -1 else left + 1,
    )


def fill(outs, values):
    for out, value in zip(outs, values, strict=True):
        out.copy_(value)


def fa2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert dropout_p == 0.0
    call = call_of(locals())
    return *loop_forward(q, k, v, call, scale=softmax_scale), None, None


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    assert softmax_lse.is_contiguous()
    call = call_of(locals())
    fill((dq, dk, dv), loop_backward(dout, q, k, v, out, softmax_lse, call, scale=softmax_scale))


def fa3_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    assert seqused_q is seqused_k is page_table is v_descale is None
    call = call_of(locals())
    return *loop_forward(q, k, v, call, scale=softmax_scale), None, None


def fa3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, dk,
    dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert sequed_q is sequed_k is None
    assert deterministic is torch.are_deterministic_algorithms_enabled()
    assert softmax_lse.is_contiguous()
    call = call_of(locals())
    fill((dq, dk, dv), loop_backward(dout, q, k, v, out, softmax_lse, call, scale=softmax_scale))


@pytest.fixture
def install(monkeypatch):
    def stand_in(name, **attributes):
        module = SimpleNamespace(__spec__=ModuleSpec(name, None), __name__=name, **attributes)
        monkeypatch.setitem(sys.modules, name, module)

    def install_packages(*, fa3=False, fa2=None):
        if fa3:
            stand_in("flash_attn_interface", _flash_attn_forward=fa3_forward, _flash_attn_backward=fa3_backward)
        if fa2:
            stand_in("flash_attn_2_cuda")
            stand_in(
                "flash_attn.flash_attn_interface",
                _flash_attn_varlen_forward=fa2_forward,
                _flash_attn_varlen_backward=fa2_backward,
            )
            monkeypatch.setattr(importlib.metadata, "version", lambda _: fa2)

    return install_packages


@pytest.mark.parametrize(("provider", "window"), [(FA3, None), (FA2, None), (FA2, 2)], ids=["fa3", "fa2", "fa2 window"])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("num_context", [0, 3])
def test_packages_get_every_argument_in_its_place(provider, window, is_deterministic, num_context, install):
    install(fa3=True, fa2="2.8.3")
    plan = AttentionPlan.from_subtree_end(TWO_LEVELS, num_context=num_context)
    torch.use_deterministic_algorithms(is_deterministic)
    try:
        assert_equals_dense(provider, plan, num_groups=2, with_sinks=True, window=window)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def on_gpu(monkeypatch):
    """Refusals of tensors that say they are on a GPU, and the name under which the kernel would be self-tested."""

    def refusals(*, capability=(9, 0), dtype=torch.bfloat16, head_dim=128, value_head_dim=None, options=PLAIN):
        names = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(varlen, "self_test_reasons", lambda name, *_: names.append(name) or [])
        plan = AttentionPlan.from_subtree_end(TWO_LEVELS)
        with FakeTensorMode():
            q, k, v = (
                torch.empty(10, heads, dim, dtype=dtype, device="cuda")
                for heads, dim in ((8, head_dim), (2, head_dim), (2, value_head_dim or head_dim))
            )
        return varlen.not_supported_reasons(q, k, v, plan, options=options), names

    return refusals


@pytest.mark.parametrize(
    ("packages", "case", "want"),
    [
        ({}, {}, "aten"),
        ({"fa2": "2.8.3"}, {}, "flash-attn 2"),
        ({"fa2": "2.6.3"}, {}, "aten"),
        ({"fa3": True, "fa2": "2.8.3"}, {}, "flash-attention 3"),
        ({"fa3": True, "fa2": "2.8.3"}, {"capability": (8, 0)}, "flash-attn 2"),
        ({"fa3": True, "fa2": "2.8.3"}, {"options": ScoreOptions(0.3, window=3)}, "flash-attn 2"),
        ({}, {"head_dim": 256, "options": ScoreOptions(scale=0.3, sinks_H=torch.zeros(8))}, "aten"),
    ],
)
def test_the_first_provider_that_is_installed_and_serves_is_self_tested(packages, case, want, install, on_gpu):
    install(**packages)
    assert on_gpu(**case) == ([], [f"varlen on {want}"])


def test_what_cannot_be_deterministic_is_passed_over(install, on_gpu):
    install(fa3=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert on_gpu(head_dim=192) == ([], ["varlen on flash-attention 3, deterministic"])
        assert on_gpu(head_dim=256) == ([], ["varlen on aten, deterministic"])
    finally:
        torch.use_deterministic_algorithms(False)
    assert on_gpu(head_dim=256) == ([], ["varlen on flash-attention 3"])


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"capability": (7, 5)}, "compute capability (7, 5) is below (8, 0)"),
        ({"dtype": torch.float32}, "dtype torch.float32 is none of bfloat16, float16 throughout"),
        ({"head_dim": 264}, "head dim 264 is above 256 or no multiple of 8"),
        ({"head_dim": 100}, "head dim 100 is above 256 or no multiple of 8"),
        ({"value_head_dim": 64}, "value head dim 64 differs from the query head dim 128"),
        ({"options": ScoreOptions(0.3, softcap=50.0)}, "scores softcapped at 50.0 are not served"),
    ],
)
def test_each_refusal_has_its_reason(case, reason, on_gpu):
    (got,), names = on_gpu(**case)
    assert got.startswith(reason)
    assert names == []
