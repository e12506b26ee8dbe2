"""A program that compiles what the fa4 backend calls, for sm_90a without a GPU; one JSON line per variant.

    FLASH_ATTENTION_ARCH=sm_90 CUTE_DSL_ARCH=sm_90a FLASH_ATTENTION_NUM_SMS=132 CUTE_DSL_KEEP=ptx \
    CUTE_DSL_DUMP_DIR=folder python tests/support/compile_fa4.py 128-bfloat16-4 64-bfloat16-1

A variant is a head dim, a dtype and the query heads of a key-value head. No two may have one head dim: they would share
kernels. The kernels are compiled but not run, so fake tensors with a shape and a device are enough. Autograd cannot run
on fake CUDA tensors where torch has no CUDA, so the two passes are called with a context of our own.
"""

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_tree.attention import fa4, self_test
from verl_tree.tree.plan import AttentionPlan


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a real plan: tokens, queries, and the tables of key blocks and of query blocks."""

    num_tokens: int
    num_queries: int
    tables: tuple[list[torch.Size], list[torch.Size]]


def shapes_of(trees: tuple, *, head_dim: int, num_context: int = 0) -> Shapes:
    ends_T = torch.tensor(self_test.subtree_ends(trees), dtype=torch.int32)
    plan = AttentionPlan.from_subtree_end(ends_T, num_context=num_context)
    key_shapes, query_shapes = (
        [table.shape for table in each] for each in fa4.BlockTables.of_plan(plan, head_dim=head_dim)
    )
    return Shapes(plan.num_tokens, plan.num_queries, (key_shapes, query_shapes))


def main() -> None:
    assert not fa4.installation_reasons(), fa4.installation_reasons()
    for variant in sys.argv[1:]:
        head_dim, dtype, ratio = variant.split("-")
        shapes = partial(shapes_of, head_dim=int(head_dim))
        small = shapes(self_test.TREES)
        others = [
            shapes(self_test.TREES, num_context=self_test.CONTEXT_LEN),
            shapes((*self_test.TREES, (5000, ((1, ()), (64, ()))))),
            shapes(((5000, ((1, ()), (64, ()))), *self_test.TREES), num_context=4711),
        ]
        with FakeTensorMode():
            record = compile_both(small, others, head_dim=int(head_dim), dtype=getattr(torch, dtype), ratio=int(ratio))
        print(json.dumps({"variant": variant, **record}), flush=True)


def compile_both(small: Shapes, others: list[Shapes], *, head_dim: int, dtype: torch.dtype, ratio: int) -> dict:
    """Compile as the self-test does, then call again as training may: that must compile nothing new."""
    inputs = [fake(small.num_tokens, count, head_dim, dtype=dtype) for count in (2 * ratio, 2, 2, 2 * ratio)]
    record = run(small, inputs)
    record["heads_first"] = run(small, inputs, heads_first=True)["backward"]
    num_compiled = count_compiled()
    # Training may have more heads, slices of one projection (fused layers), a gradient that is stored heads first, and
    # a context.
    num_heads = 8 * ratio
    fused = ((num_heads + 16) * head_dim, head_dim, 1)
    for shapes in others:
        qkv = [
            torch.empty_strided((num_rows, count, head_dim), fused, dtype=dtype, device="cuda")
            for num_rows, count in ((shapes.num_queries, num_heads), (shapes.num_tokens, 8), (shapes.num_tokens, 8))
        ]
        heads_first = (head_dim, shapes.num_queries * head_dim, 1)
        grad_out = torch.empty_strided(qkv[0].shape, heads_first, dtype=dtype, device="cuda")
        for order in (False, True):
            run(shapes, [*qkv, grad_out], heads_first=order)
    return {**record, "num_compiled": num_compiled, "num_compiled_later": count_compiled() - num_compiled}


def run(shapes: Shapes, inputs: list[torch.Tensor], *, heads_first: bool = False) -> dict:
    plan = fake_plan(shapes)
    *qkv, grad_out = inputs
    _, key_block = fa4.BLOCK_LENS[inputs[0].shape[-1]]
    ctx = SimpleNamespace()
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    started = time.perf_counter()
    out = fa4._Fa4Attention.forward(ctx, *qkv, plan, 0.1, heads_first)
    forward_s, forward_ptx = time.perf_counter() - started, take_ptx(key_block)
    started = time.perf_counter()
    gradients = fa4._Fa4Attention.backward(ctx, grad_out)[:3]
    backward_s, backward_ptx = time.perf_counter() - started, take_ptx(key_block)
    assert out.shape == qkv[0].shape
    assert out.dtype == qkv[0].dtype
    assert all(got.shape == of.shape and got.dtype == of.dtype for got, of in zip(gradients, qkv, strict=True))
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "forward": forward_ptx,
        "backward": backward_ptx,
    }


def take_ptx(key_block: int) -> dict:
    """Count kernels and instructions in the PTX that was written since the last call, and delete it.

    The axes of the grid that count key blocks are those whose index is multiplied by their length, a power of two.
    """
    texts = []
    for path in Path(os.environ["CUTE_DSL_DUMP_DIR"]).glob("*.ptx"):
        texts.append(path.read_text())
        path.unlink()
    axes = set()
    for text in texts:
        axis_of = dict(re.findall(r"mov\.u32\s+(%r\d+), %ctaid\.(\w);", text))
        shifted = re.findall(rf"shl\.b32\s+%r\d+, (%r\d+), {key_block.bit_length() - 1};", text)
        axes |= {axis_of[register] for register in shifted if register in axis_of}
    return {
        "num_kernels": len(texts),
        "num_sm_90a": sum(".target sm_90a" in text for text in texts),
        "num_wgmma": sum(text.count("wgmma.mma_async") for text in texts),
        "axes_of_key_blocks": sorted(axes),
    }


def count_compiled() -> int:
    functions = (
        interface._flash_attn_fwd,
        interface._flash_attn_bwd,
        interface._bwd_preprocess,
        interface._bwd_postprocess_convert,
    )
    return sum(len(function.compile_cache.cache) for function in functions)


def fake(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def fake_plan(shapes: Shapes) -> SimpleNamespace:
    """Make the part of a plan that the backend reads."""
    key_tables, query_tables = ([fake(*shape, dtype=torch.int32) for shape in each] for each in shapes.tables)
    tables = fa4.BlockTables(key_tables, query_tables)
    return SimpleNamespace(subtree_end_T=fake(shapes.num_tokens, dtype=torch.int32), once=lambda _key, _make: tables)


if __name__ == "__main__":
    main()
