"""A program that scores packs and relayed trees with the fused kernel and chunk by chunk, in float32, on two ranks.

`tests/interp/test_sharded_head.py` starts it, one process a rank, with TRITON_INTERPRET=1. Each rank computes every
case by itself, and the two as a team. Each writes the worst relative difference of loss and gradients, and the calls of
the model and of the kernel.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from relay_cases import LossCase, Result, flat_rows, lay_out, relayed_result, verl_rows, worst_error
from sharding_cases import WHOLE, averaged
from tree_cases import DEEP, tiny_model

from verl_tree.functional import linear_choice

ACTOR = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}
CASES = {
    "pack": (LossCase(options=ACTOR), WHOLE),
    "relay": (LossCase(options=ACTOR), 7),
    # The second rank of a team has none of its tokens.
    "relay of one token": (LossCase(options=ACTOR), 1),
    "relay, joint": (LossCase("kl_cov"), 7),
}


def compare(case: LossCase, *, capacity: int, team: dist.ProcessGroup | None) -> dict[str, Any]:
    """Compute loss and gradients on both paths, with attention of the same kind."""
    model: Any = tiny_model().float()
    model.set_attn_implementation("sdpa")
    data = verl_rows(DEEP, flat_rows(model, DEEP), case, seed=3)
    micro = lay_out(data, capacity=capacity, mode="rows")
    assert micro.is_relayed == (capacity < WHOLE), "the case is another one than it says"
    num_calls = Counter()
    model.register_forward_hook(lambda *_: num_calls.update(["model"]))
    kernels = linear_choice.linear_log_probs

    def counted(*args: Any) -> torch.Tensor:
        num_calls.update(["kernel"])
        return kernels(*args)

    def result() -> Result:
        got = relayed_result(model, data, case, capacity=capacity, team=team, backend="dense")
        # Of sections of one token the second rank has none, and so no gradient of its own.
        return got if team is None else replace(got, gradients=averaged(got.gradients))

    linear_choice.linear_log_probs = counted
    try:
        fused, num_fused = result(), dict(num_calls)
        del os.environ["TRITON_INTERPRET"]  # the kernels are imported, so only the choice reads it
        chunked = result()
    finally:
        linear_choice.linear_log_probs = kernels
        os.environ["TRITON_INTERPRET"] = "1"
    return {"error": worst_error(fused, chunked), "fused": num_fused, "both": num_calls}


def main() -> None:
    """Run all cases."""
    rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {
        f"{name}{', team' if team else ''}": compare(case, capacity=capacity, team=team)
        for name, (case, capacity) in CASES.items()
        for team in (None, dist.group.WORLD)
    }
    Path(f"{out}{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
