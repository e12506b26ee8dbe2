"""A program that scores with the fused kernel on models that FSDP2 shards over two ranks, and on whole models.

`tests/interp/test_sharded_head.py` starts it, one process a rank, with TRITON_INTERPRET=1. Rank 0 writes the worst
relative error of scores and gradients, and the kernel's calls.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GraniteConfig, GraniteForCausalLM
from tree_cases import DEEP, VOCAB_SIZE, layout_of, relative_error, tiny_model

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional import linear_choice
from verl_tree.functional.logprobs import tree_forward_log_probs

rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
kernels, calls = linear_choice.linear_log_probs, []


def counted(hidden_PX, weight_VX, *args):
    calls.append(type(weight_VX).__name__)
    return kernels(hidden_PX, weight_VX, *args)


linear_choice.linear_log_probs = counted
layout = layout_of(DEEP)


def scores_and_gradients(model):
    """Return scores and gradients of a sum with coefficients of either sign; FSDP2's are the mean of equal ranks."""
    model.set_attn_implementation(ATTENTION_NAME)
    plan = AttentionPlan.from_layout(layout, backend="dense")
    scores = tree_forward_log_probs(model, layout, plan=plan, calculate_entropy=True)
    both_CT = torch.stack((scores.log_probs_T, scores.entropy_T))
    (both_CT * torch.randn(both_CT.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    found = {"scores": both_CT.detach()}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def granite():
    """Return a model that divides its logits."""
    register()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GraniteConfig(**sizes, vocab_size=VOCAB_SIZE, pad_token_id=0, logits_scaling=3.0)
    return GraniteForCausalLM(config).eval()


errors = {}
for name, build in (("qwen3", lambda: tiny_model("qwen3").float()), ("granite", granite)):
    torch.manual_seed(0)
    whole = build()
    want = scores_and_gradients(whole)
    torch.manual_seed(0)
    sharded = build()
    # As verl does: layers and the untied head by themselves, freed after their forward.
    for module in (*sharded.model.layers, sharded.lm_head, sharded):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
    got = scores_and_gradients(sharded)
    errors |= {f"{name} {key}": relative_error(got[key], want[key]) for key in want}
if rank == 0:
    out.write_text(json.dumps({"errors": errors, "calls": calls}))
dist.destroy_process_group()
