"""Trees whose tokens lie on several ranks, in float64; one process per rank.

`tests/unit/tree/test_sharding.py` starts it. Every rank has the whole model, and gradients are averaged over the
ranks, as FSDP does. The other side is transformers' own attention on one sequence after another, or for gpt-oss, whose
experts and norms compute in float32, the same tree on one rank. Rank 0 writes the worst relative error of every case.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from relay_cases import (
    LossCase,
    Result,
    flat_result,
    flat_rows,
    lay_out,
    relay_run,
    relayed_result,
    verl_rows,
    worst_error,
)
from tiny_models import tiny_model
from transformers import PreTrainedModel
from tree_cases import DEEP, flat_scores, layout_of
from typing_extensions import override

from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard

ACTOR = {"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.2}
VANILLA, KL_COV, VALUE = LossCase(options=ACTOR), LossCase("kl_cov"), LossCase("value")
RANDOM = LossCase("clip_cov")
"""It draws tokens."""
WHOLE = 10**6
"""A capacity that no forest here exceeds."""

CASES: dict[str, tuple[str, LossCase, dict[str, Any]]] = {
    "pack": ("qwen3", VANILLA, {"capacity": WHOLE}),
    "pack_joint": ("qwen3", KL_COV, {"capacity": WHOLE}),
    "pack_random_loss": ("qwen3", RANDOM, {"capacity": WHOLE}),
    "pack_checkpointing": ("qwen3 checkpointing", VANILLA, {"capacity": WHOLE}),
    "pack_one_kv_head": ("one kv head", VANILLA, {"capacity": WHOLE}),
    "pack_window": ("qwen2 window", VANILLA, {"capacity": WHOLE}),
    "pack_sinks": ("gpt-oss", VANILLA, {"capacity": WHOLE}),
    "pack_critic": ("critic", VALUE, {"capacity": WHOLE}),
    "relay": ("qwen3", VANILLA, {"capacity": 7}),
    # A section of one token leaves the other ranks without any.
    "relay_one_token": ("qwen3", VANILLA, {"capacity": 1}),
    "relay_joint": ("qwen3", KL_COV, {"capacity": 7}),
    "relay_random_loss": ("qwen3", RANDOM, {"capacity": 7}),
    "relay_groups_on_host": ("qwen3", VANILLA, {"capacity": 5, "on_host": True, "max_loss_terms": 7}),
    "relay_checkpointing": ("qwen3 checkpointing", VANILLA, {"capacity": 5}),
    "relay_one_kv_head": ("one kv head", VANILLA, {"capacity": 7}),
    "relay_window": ("qwen2 window", VANILLA, {"capacity": 3}),
    "relay_sinks": ("gpt-oss", VANILLA, {"capacity": 7}),
    "relay_critic": ("critic", VALUE, {"capacity": 3}),
}
"""The model, the loss, and how the forest is computed."""


def make_model(name: str) -> PreTrainedModel:
    """Make a model of this name."""
    if name == "critic":
        return tiny_model("qwen3 critic", num_labels=1, classifier_dropout=0.0)
    if name == "one kv head":
        return tiny_model(num_key_value_heads=1)
    if name == "qwen3 checkpointing":
        model = tiny_model().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    return tiny_model(name)


def averaged(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Average gradients over the ranks."""
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return {name: gradient / dist.get_world_size() for name, gradient in gradients.items()}


def run_case(name: str, case: LossCase, settings: dict[str, Any], *, team: dist.ProcessGroup) -> float:
    """Compute the loss and all gradients of both sides; return the worst relative difference."""
    model = make_model(name)
    model.set_attn_implementation("sdpa" if name != "gpt-oss" else "eager")
    scores = flat_rows(model, DEEP, is_critic=name == "critic")
    data = verl_rows(DEEP, scores, case, seed=3)
    if name == "gpt-oss":
        want: Result = relayed_result(model, data, case, capacity=WHOLE)
    else:
        want = flat_result(model, data, scores, case, rows=lay_out(data, capacity=2, mode="rows").rows)
    micro = lay_out(data, capacity=settings["capacity"], mode="rows")
    assert micro.is_relayed == (settings["capacity"] < WHOLE), "the case is another one than it says"
    rank = dist.get_rank()
    got = relayed_result(model, data, case, team=team, seed=rank, **settings)
    if case == RANDOM and rank > 0:
        assert got.loss != want.loss, "this rank has drawn the same tokens"
        got = replace(got, loss=want.loss)  # Only the first rank's loss is handed back.
    return worst_error(replace(got, gradients=averaged(got.gradients)), want)


def run_scores(shard_of: Callable[[int], SequenceShard], *, temperature: float | torch.Tensor) -> dict[str, float]:
    """Compare log-probs and entropy, and their gradients, of a pack in several chunks with those of flat sequences."""
    model, layout = tiny_model(), layout_of(DEEP)
    flat_temperature = torch.as_tensor(temperature).flatten()[0].item()
    want = [flat_scores(model, DEEP[leaf], temperature=flat_temperature) for leaf in layout.leaves.tolist()]
    model.set_attn_implementation(ATTENTION_NAME)
    scores = tree_forward_log_probs(
        model,
        layout,
        plan=AttentionPlan.from_layout(layout, shard=shard_of(layout.num_tokens)),
        temperature=temperature,
        calculate_entropy=True,
        chunk_size=3,
    )
    assert scores.entropy_T is not None
    rows = [layout.tree_index_F[start + 1 : end] for start, end in pairwise(layout.leaf_offsets)]
    got = [(scores.log_probs_T[row], scores.entropy_T[row]) for row in rows]
    errors, gradients = {}, []
    for number, kind in enumerate(("log_probs", "entropy")):
        pairs = [(ours[number], theirs[number]) for ours, theirs in zip(got, want, strict=True)]
        errors[kind] = max((one - two).abs().max().item() for one, two in pairs if len(one))
    for side in (want, got):
        model.zero_grad()
        sum((log_probs.exp() * entropy.square()).sum() for log_probs, entropy in side).backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    here = averaged(gradients[1])
    whole = torch.stack([each.norm() for each in gradients[0].values()]).norm()
    difference = torch.stack([(here[name] - each).norm() for name, each in gradients[0].items()]).norm()
    return errors | {"gradient": (difference / whole).item()}


def run_example(team: dist.ProcessGroup) -> dict[str, Any]:
    """Show where the five tokens and four heads of the example in `verl_tree.tree.sharding` lie."""
    shard, rank = SequenceShard(5, team), dist.get_rank()
    # Token and head as a number of two digits; tokens count from 1, so 0 is padding.
    every = 10 * torch.arange(1, 6)[:, None] + torch.arange(4)
    mine = torch.stack([shard.slice(column) for column in every.T], dim=1)[..., None].double()
    dealt = shard.scatter_heads(mine, mine, mine[:, :1])
    index, place = shard.own(torch.tensor([0, 1, 1, 4]))
    return {
        "slice": mine[..., 0].tolist(),
        "query": dealt[0][..., 0].tolist(),
        "key": dealt[1][..., 0].tolist(),
        "one_value_head": dealt[2][..., 0].tolist(),
        "gathered": shard.gather_heads(dealt[0])[..., 0].tolist(),
        "heads": shard.own_heads(torch.arange(4)).tolist(),
        "own": [index.tolist(), place.tolist()],
        "rank": rank,
    }


def store_bytes(team: dist.ProcessGroup | None) -> int:
    """Return the bytes of the keys and values that one rank stores of a relayed forest."""
    model = tiny_model()
    data = verl_rows(DEEP, flat_rows(model, DEEP), VANILLA, seed=3)
    micro = lay_out(data, capacity=7, mode="forward")
    run = relay_run(model, micro, kinds=VANILLA.kinds, mode="forward", team=team)
    for number in range(run.num_first):
        run.first(number)
    return run.store.num_bytes


class SummedOnce(SequenceShard):
    """A shard whose gradients are not multiplied by the number of ranks: the control."""

    @property
    @override
    def _gradient_factor(self) -> int:
        return 1


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    team = dist.group.WORLD
    assert team is not None
    results: dict[str, Any] = {name: run_case(*case, team=team) for name, case in CASES.items()}
    per_token = torch.full((layout_of(DEEP).num_tokens,), 0.7, dtype=torch.float64)
    for name, temperature in (("scores", 1.0), ("temperature", per_token)):
        results[name] = run_scores(lambda num_tokens: SequenceShard(num_tokens, team), temperature=temperature)
    results["control"] = run_scores(lambda num_tokens: SummedOnce(num_tokens, team), temperature=1.0)
    results |= {"example": run_example(team), "store_bytes": [store_bytes(None), store_bytes(team)]}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, results)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(gathered, indent=1))


if __name__ == "__main__":
    main()
