"""Attention under the tree mask: options of layers, the choice of a backend, and what is refused.

That every backend computes the softmax of the tree is in test_backends.py.
"""

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from attention_cases import (
    CPU_BACKENDS,
    leaves_for,
    naive_attention,
    outputs_and_gradients,
    random_qkv,
    within,
    worst_error,
)
from tree_cases import DEEP, layout_of, random_sequences, relative_error

from verl_tree.attention import (
    BACKENDS,
    AttentionPlan,
    ScoreOptions,
    choose_backend,
    tree_attention,
    triton_backend,
)
from verl_tree.attention.pieces import cut_mask
from verl_tree.attention.triton_configs import padded_dim
from verl_tree.attention.varlen import varlen_attention

PLAIN = ScoreOptions(scale=0.25)


def naive_options(layout, *, window=None, softcap=None, **_sinks):
    return partial(naive_attention, visible_QT=within(layout, window), softcap=softcap)


def attend_with(layout, backend, *, window=None, softcap=None, sinks=False):
    def attend(q, k, v, *sinks_H):
        options = {"window": window, "softcap": softcap, "sinks": sinks_H[0] if sinks else None}
        return tree_attention(q, k, v, layout.subtree_end_T, backend=backend, **options)

    return attend


def test_gradients_of_sinks_keep_their_dtype_in_bfloat16():
    layout = layout_of(DEEP)
    *qkv, grad_out = random_qkv(layout.num_tokens, num_groups=2)
    exact = leaves_for({"sinks": True}, qkv)
    leaves = [x.detach().bfloat16().requires_grad_() for x in exact]
    for backend in CPU_BACKENDS:
        for window in (None, 8):  # DEEP's paths are up to 9 tokens long, so that the last token's window matters
            want = outputs_and_gradients(naive_options(layout, sinks=True, window=window), exact, grad_out)
            got = outputs_and_gradients(
                attend_with(layout, backend, sinks=True, window=window), leaves, grad_out.bfloat16()
            )
            for got_one, want_one in zip(got, want, strict=True):
                assert got_one.dtype == torch.bfloat16
                assert relative_error(got_one.double(), want_one) < 0.02


@pytest.mark.parametrize("wrong", [3, 5])
def test_a_window_that_is_off_by_one_is_far_off(wrong):
    """Guards the comparisons above: the tolerance could not hide it."""
    layout = layout_of(DEEP)
    *qkv, grad_out = random_qkv(layout.num_tokens, num_groups=2)
    want = outputs_and_gradients(naive_options(layout, window=4), qkv, grad_out)
    got = outputs_and_gradients(attend_with(layout, "dense", window=wrong), qkv, grad_out)
    assert all(relative_error(got_one, want_one) > 0.01 for got_one, want_one in zip(got, want, strict=True))


def test_a_window_counts_positions_of_the_path_and_not_of_the_pack():
    """0 - 1 - 2 and 0 - 3 - 4: token 4 is two positions after the root, four places behind it in the pack."""
    subtree_end = torch.tensor([5, 3, 3, 5, 5])
    assert AttentionPlan.from_subtree_end(subtree_end).position_T.tolist() == [0, 1, 2, 1, 2]
    q = k = torch.zeros(5, 1, 8)
    v = torch.eye(5, 8)[:, None]
    out = tree_attention(q, k, v, subtree_end, window=2)
    assert out[:, 0, :5].tolist() == [
        [1.0, 0, 0, 0, 0],
        [0.5, 0.5, 0, 0, 0],
        [0, 0.5, 0.5, 0, 0],
        [0.5, 0, 0, 0.5, 0],
        [0, 0, 0, 0.5, 0.5],
    ]
    assert torch.equal(tree_attention(q, k, v, subtree_end, window=1), v)  # the softmax over oneself


@pytest.mark.parametrize("seed", range(5))
def test_positions_of_a_plan_are_those_of_the_layout(seed):
    layout = layout_of(random_sequences(np.random.default_rng(seed), num_sequences=30, mean_len=6))
    position_T = AttentionPlan.from_layout(layout).position_T
    assert position_T.dtype == torch.int32
    assert position_T.tolist() == layout.position_T.tolist()


def test_a_window_as_long_as_the_longest_path_is_none():
    layout = layout_of(DEEP)
    *qkv, _ = random_qkv(layout.num_tokens, num_groups=2)
    longest = AttentionPlan.from_layout(layout).max_path_len
    want = tree_attention(*qkv, layout.subtree_end_T, backend="varlen")
    assert torch.equal(tree_attention(*qkv, layout.subtree_end_T, window=longest, backend="varlen"), want)
    assert not torch.equal(tree_attention(*qkv, layout.subtree_end_T, window=longest - 1, backend="varlen"), want)
    with pytest.raises(ValueError, match=f"fa4: .*a sliding window of {longest - 1} tokens, shorter than the longest"):
        tree_attention(*qkv, layout.subtree_end_T, window=longest - 1, backend="fa4")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": 2}, "a sliding window of 2 tokens, shorter than the longest path, is not served"),
        ({"softcap": 30.0}, "scores softcapped at 30.0 are not served"),
        ({"sinks": torch.zeros(2)}, "attention sinks are not served"),
    ],
)
def test_backends_refuse_by_name_what_they_would_ignore(options, reason):
    *qkv, _ = random_qkv(3, num_groups=1, dtype=torch.float32)
    plan = AttentionPlan.from_subtree_end(torch.tensor([3, 3, 3]))
    every = ("window", "softcap", "sinks")
    served = {"fa4": (), "triton": every, "varlen": ("window", "sinks"), "dense": every}
    for name, of_name in served.items():
        asked = ScoreOptions.of_layer(plan, scale=1.0, num_heads=2, **options)
        reasons = BACKENDS[name].not_supported_reasons(*qkv, plan, options=asked)
        assert (reason in reasons) == (not set(options) <= set(of_name)), name
    assert set(served) == set(BACKENDS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window=0: a query sees at least itself"),
        ({"softcap": 0.0}, r"softcap=0\.0: give a positive bound"),
        ({"sinks": torch.zeros(3)}, r"sinks have the shape \(3,\): give one logit per query head, \(2,\)"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    *qkv, _ = random_qkv(3, num_groups=1)
    with pytest.raises(ValueError, match=message):
        tree_attention(*qkv, torch.tensor([3, 3, 3]), **options)


def test_the_choice_is_logged_once_with_the_reasons_of_the_faster_backends(caplog, monkeypatch):
    monkeypatch.setattr("verl_tree.tree.kernel_test._told", set())
    *qkv, _ = random_qkv(3, num_groups=1, dtype=torch.float32)
    with caplog.at_level("INFO"):
        for _ in range(2):
            tree_attention(*qkv, torch.tensor([3, 3, 3]))
            tree_attention(*qkv, torch.tensor([3, 3, 3]), window=2, softcap=3.0)
    plain, capped = caplog.records
    assert plain.levelname == "INFO"
    assert "backend: varlen" in plain.message
    assert "fa4: tensors are on cpu" in plain.message
    assert capped.levelname == "WARNING"  # the oracle is slow and nobody asked for it
    assert "backend for layers with window and softcap: dense" in capped.message
    assert "a sliding window of 2 tokens, shorter" in capped.message
    assert "varlen: scores softcapped" in capped.message


@pytest.mark.parametrize(
    ("num_groups", "sequences"),
    [
        (2, [[1] * 300 + [branch] * 140 for branch in range(5)]),
        (1, [[1] * 300 + [2] * 40 + [3] * branch * 20 for branch in range(9)]),
        (4, [[branch] * (1 + 25 * branch) for branch in range(1, 10)]),
        # A comb: a path of 900 tokens whose every tenth token has a short side branch.
        (2, [[1] * stem + [2 + stem % 7] * 5 for stem in range(10, 900, 10)] + [[1] * 900]),
        (7, [[1] * 600]),
        (1, [[1]]),
    ],
    ids=["branches", "extensions", "roots", "comb", "chain", "one token"],
)
def test_varlen_equals_dense_on_shapes(num_groups, sequences):
    plan = AttentionPlan.from_layout(layout_of(sequences))
    *qkv, grad_out = random_qkv(plan.num_tokens, num_groups=num_groups, seed=1)
    want, got = (
        outputs_and_gradients(partial(tree_attention, subtree_end=plan, backend=name), qkv, grad_out)
        for name in ("dense", "varlen")
    )
    assert worst_error(got, want, grad_out=grad_out) < 1e-12


def test_varlen_in_bfloat16_errs_no_more_than_flat_attention_does():
    """Against float64, at most 1.5 times the error of bfloat16 SDPA per leaf with gradients added in float64."""
    layout = layout_of([[1] * 300 + [2] * 200 + [branch] * 150 for branch in range(4)])
    *exact, grad_out = random_qkv(layout.num_tokens, num_groups=2)
    want = outputs_and_gradients(lambda q, k, v: tree_attention(q, k, v, layout.subtree_end_T), exact, grad_out)
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    got = outputs_and_gradients(
        lambda q, k, v: tree_attention(q, k, v, layout.subtree_end_T, backend="varlen"), rounded, grad_out.bfloat16()
    )

    # A shared query's gradient is spread evenly over its leaves, which changes no sum.
    spread_out = grad_out / layout.tree_index_F.bincount()[:, None, None]
    flat = [torch.zeros_like(x) for x in want]
    for path in layout.tree_index_F.split(np.diff(layout.leaf_offsets).tolist()):
        leaf = [x[path].detach().requires_grad_() for x in rounded]
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in leaf), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        flat[0][path] = out.double()
        for total, gradient in zip(flat[1:], torch.autograd.grad(out, leaf, spread_out[path].bfloat16()), strict=True):
            total.index_add_(0, path, gradient.double())
    for want_one, flat_one, got_one in zip(want, flat, got, strict=True):
        assert got_one.dtype == torch.bfloat16
        assert 0 < relative_error(got_one.double(), want_one) <= 1.5 * relative_error(flat_one, want_one)


def test_plan_of_the_drawn_forest():
    """The forest of the docstring, with runs of 200, 150, 130, 50, 60 tokens: prompt | a | b | c | d."""
    subtree_end = [590] * 200 + [530] * 150 + [480] * 130 + [530] * 50 + [590] * 60
    attention_plan = AttentionPlan.from_subtree_end(torch.tensor(subtree_end))
    assert attention_plan.max_path_len == 200 + 150 + 130
    triangles, *rectangles = cut_mask(attention_plan.runs)
    assert [piece.queries for piece in triangles] == [(0, 200), (200, 350), (350, 480), (480, 530), (530, 590)]
    assert all(piece.keys == (piece.queries,) for piece in triangles)
    assert rectangles == [[((200, 590), ((0, 200),))], [((350, 530), ((200, 350),))]]


def test_auto_takes_the_first_backend_without_an_objection():
    *qkv, _ = random_qkv(3, num_groups=1)
    wide_v = torch.randn(3, 2, 24, dtype=torch.float64)
    subtree_end = torch.tensor([3, 2, 3])
    out = tree_attention(qkv[0], qkv[1], wide_v, subtree_end)  # varlen refuses a value head dim of its own
    assert out.shape == (3, 2, 24)
    with pytest.raises(ValueError, match="varlen: value head dim 24 differs from the query head dim 16"):
        tree_attention(qkv[0], qkv[1], wide_v, subtree_end, backend="varlen")


def test_auto_on_a_cpu_is_varlen():
    *qkv, _ = random_qkv(3, num_groups=1, dtype=torch.float32)
    attention_plan = AttentionPlan.from_subtree_end(torch.tensor([3, 2, 3]))
    assert choose_backend(*qkv, attention_plan, backend="auto", options=PLAIN) == "varlen"
    with pytest.raises(ValueError, match="triton: tensors are on cpu, the kernels run on CUDA only"):
        tree_attention(*qkv, attention_plan, backend="triton")


def test_backends_of_gpus_are_imported_when_needed_only():
    """The package works where triton is not installed, and costs nobody its import."""
    program = (
        "import sys, torch, verl_tree.attention as a; "
        "a.tree_attention(*torch.randn(3, 4, 1, 8), torch.tensor([4, 2, 4, 4])); "
        "assert not {'triton', 'flash_attn', 'flash_attn_interface'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("dtype", "head_dims", "message"),
    [
        (torch.float64, (16, 16), "dtype torch.float64 is none of float16, float32"),
        # The interpreter multiplies its bits as integers; on CUDA it is served.
        (torch.bfloat16, (16, 16), "dtype torch.bfloat16 is none of float16, float32"),
        (torch.float32, (512, 512), "head dim 512 is above 256"),
        (torch.float32, (16, 24), "value head dim 24 differs from the query head dim 16"),
    ],
)
def test_triton_says_what_it_cannot_serve(dtype, head_dims, message, monkeypatch):
    monkeypatch.setattr(triton_backend, "_is_installed", lambda: False)
    q, k, v = (torch.randn(3, 1, head_dim, dtype=dtype) for head_dim in (head_dims[0], *head_dims))
    attention_plan = AttentionPlan.from_subtree_end(torch.tensor([3, 2, 3]))
    reasons = triton_backend.not_supported_reasons(q, k, v, attention_plan, options=PLAIN)
    assert len(reasons) == 3
    assert reasons[0] == "tensors are on cpu, the kernels run on CUDA only"
    assert reasons[1].startswith("triton is not installed; install triton")
    assert reasons[2].startswith(message)


def test_triton_refuses_dtypes_that_differ():
    q, k, v = torch.randn(3, 3, 1, 16)
    attention_plan = AttentionPlan.from_subtree_end(torch.tensor([3, 2, 3]))
    reasons = triton_backend.not_supported_reasons(q.bfloat16(), k, v, attention_plan, options=PLAIN)
    assert any(reason.startswith("dtype torch.bfloat16 and torch.float32") for reason in reasons)


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (64, 64), (96, 128), (128, 128), (129, 256), (256, 256)]
)
def test_triton_pads_head_dims_to_powers_of_two(head_dim, padded):
    assert padded_dim(head_dim) == padded
    for dtype in (torch.bfloat16, torch.float32):
        configs = triton_backend.choose_configs(torch.empty(1, 1, head_dim, dtype=dtype), options=PLAIN)
        assert min(*configs.forward[:2], *configs.dkv[:2], *configs.dq[:2]) >= 16


def test_the_plan_carries_the_backend_of_its_layers():
    *qkv, _ = random_qkv(3, num_groups=1)
    subtree_end = torch.tensor([3, 2, 3])
    with pytest.raises(ValueError, match=r"'flash' does not exist; choose one of \['auto', .*'varlen', 'dense'\]"):
        tree_attention(*qkv, AttentionPlan.from_subtree_end(subtree_end, backend="flash"))


@pytest.mark.parametrize(
    ("subtree_end", "message"),
    [
        ([3, 1, 3], r"subtree_end\[1\] = 1"),
        ([3, 2, 4], r"subtree_end\[2\] = 4"),
        ([2, 3, 3], r"subtree_end\[1\] = 3 reaches past its ancestor's 2"),
        ([], "at least one token"),
        ([[1]], r"shape \(1, 1\)"),
    ],
)
def test_a_plan_needs_a_forest_in_preorder(subtree_end, message):
    with pytest.raises(ValueError, match=message):
        AttentionPlan.from_subtree_end(np.array(subtree_end, dtype=np.int64))


@pytest.mark.parametrize(
    "shapes", [((3, 4, 8), (3, 3, 8), (3, 3, 8)), ((2, 4, 8),) * 3, ((3, 2, 8), (3, 2, 4), (3, 2, 8))]
)
def test_shapes_that_do_not_fit_are_refused(shapes):
    with pytest.raises(ValueError, match=r"q \("):
        tree_attention(*(torch.randn(shape) for shape in shapes), torch.tensor([3, 2, 3]))


def test_varlen_reads_strided_inputs():
    """The model hands (heads, tokens, dim) memory; here both memory orders give one result."""
    attention_plan = AttentionPlan.from_layout(layout_of(DEEP))
    *qkv, _ = random_qkv(attention_plan.num_tokens, num_groups=2)
    heads_first = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in qkv]
    want = varlen_attention(*qkv, attention_plan, options=PLAIN)
    assert torch.equal(varlen_attention(*heads_first, attention_plan, options=PLAIN), want)
