"""Which backend serves a layer: found once per pack, never a slow one in silence, and in the dtype of autocast."""

import pytest
import torch
from attention_cases import random_qkv
from model_cases import tree_logits
from tiny_models import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from tree_cases import DEEP

from verl_tree.attention import (
    BACKENDS,
    MAX_ORACLE_TOKENS,
    AttentionBackend,
    AttentionPlan,
    ScoreOptions,
    choose_backend,
    tree_attention,
)
from verl_tree.attention.hf import tree_attention_forward

PLAIN = ScoreOptions(scale=1.0)
TOO_OLD = (7, 5)


def choose_on_gpu(num_tokens, *, backend, num_context=0):
    """Choose for inputs that say they are on a GPU which only the oracle serves."""
    plan = AttentionPlan.from_subtree_end(torch.full((num_tokens,), num_tokens), num_context=num_context)
    with FakeTensorMode():
        q, k, v = (
            torch.empty(rows, heads, 64, dtype=torch.bfloat16, device="cuda")
            for rows, heads in ((plan.num_queries, 8), (num_tokens, 2), (num_tokens, 2))
        )
    return choose_backend(q, k, v, plan, backend=backend, options=PLAIN)


def test_auto_takes_the_oracle_on_a_gpu_for_small_forests_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: TOO_OLD)
    assert choose_on_gpu(MAX_ORACLE_TOKENS, backend="auto") == "dense"
    for num_context in (0, MAX_ORACLE_TOKENS):  # context is computed with, too
        with pytest.raises(ValueError, match="'auto' cannot serve this input") as raised:
            choose_on_gpu(MAX_ORACLE_TOKENS + 1, backend="auto", num_context=num_context)
        for part in (
            "fa4: compute capability (7, 5) is not (9, 0)",
            "triton: ",
            "varlen: compute capability (7, 5) is below (8, 0)",
            "dense: slow, so 'auto' takes it up to 4096 tokens, not 4097",
            "tree.backend=dense",
        ):
            assert part in str(raised.value)


def test_the_oracle_serves_any_forest_on_a_gpu_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: TOO_OLD)
    assert choose_on_gpu(MAX_ORACLE_TOKENS + 1, backend="dense") == "dense"


def test_auto_takes_the_oracle_on_a_cpu_for_any_forest():
    plan = AttentionPlan.from_subtree_end(torch.full((MAX_ORACLE_TOKENS + 1,), MAX_ORACLE_TOKENS + 1))
    qkv = [torch.zeros(plan.num_tokens, 1, 1) for _ in range(3)]
    assert choose_backend(*qkv, plan, backend="auto", options=ScoreOptions(1.0, softcap=5.0)) == "dense"


def test_the_choice_is_found_once_per_plan_and_kind_of_layer(monkeypatch):
    asked = []

    def reasons(q_QHD, *_, options):
        asked.append((q_QHD.dtype, options.window))
        return []

    monkeypatch.setitem(BACKENDS, "fa4", AttentionBackend(BACKENDS["dense"].attend, reasons))
    *qkv, _ = random_qkv(6, num_groups=2, dtype=torch.float32)
    plan = AttentionPlan.from_subtree_end(torch.tensor([6, 6, 4, 4, 6, 6]))
    for _layer in range(3):
        for window in (None, 2):
            tree_attention(*qkv, plan, window=window)
        tree_attention(*(each.bfloat16() for each in qkv), plan)
    assert asked == [(torch.float32, None), (torch.float32, 2), (torch.bfloat16, None)]
    tree_attention(*qkv, AttentionPlan.from_subtree_end(torch.tensor([6, 6, 4, 4, 6, 6])))
    assert len(asked) == 4


def test_inputs_have_the_dtype_of_autocast_but_never_lose_float64():
    plan = AttentionPlan.from_subtree_end(torch.tensor([6, 6, 4, 4, 6, 6]), backend="varlen")
    *qkv, _ = random_qkv(6, num_groups=2, dtype=torch.float32)
    q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in qkv)
    want = tree_attention(*(each.bfloat16() for each in qkv), plan)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = tree_attention_forward(torch.nn.Module(), q, k, v.bfloat16(), None, tree_plan=plan)
        assert torch.equal(got[0], want)
        exact, _ = tree_attention_forward(torch.nn.Module(), q.double(), k.double(), v.double(), None, tree_plan=plan)
    assert got.dtype == torch.bfloat16
    assert exact.dtype == torch.float64
    plain, _ = tree_attention_forward(torch.nn.Module(), q, k, v, None, tree_plan=plan)
    assert plain.dtype == torch.float32


def test_a_model_with_float32_parameters_under_autocast_reaches_the_fast_kernel(monkeypatch):
    """Its norms and rotary embeddings make queries and keys float32, its projections values bfloat16."""
    model = tiny_model(size="engine")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = tree_logits(model, DEEP, backend="varlen")
        monkeypatch.setattr("verl_tree.attention.hf._autocast", lambda x: x)
        with pytest.raises(ValueError, match=r"dtype torch\.bfloat16 and torch\.float32 is none of"):
            tree_logits(model, DEEP, backend="varlen")
    for found, exact in zip(got, tree_logits(model, DEEP, backend="varlen"), strict=True):
        assert (found - exact).norm() < 0.05 * exact.norm()
