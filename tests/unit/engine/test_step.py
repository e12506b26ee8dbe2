"""A mini-batch on an engine of one process without FSDP, in float64, beside the rows by themselves."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from process_groups import group_of_one
from tiny_models import tiny_model

pytest.importorskip("verl")

from plain_engine import PlainEngine
from relay_cases import LossCase, Result, flat_result, flat_rows, verl_rows, worst_error
from torch import Tensor
from tree_cases import DEEP, random_sequences
from verl.utils import tensordict_utils as tu

from verl_tree.attention.hf import ATTENTION_NAME


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with group_of_one():
        yield


def run_both(
    case: LossCase, *, sequences: Sequence[Any], is_critic: bool = False, **tree: Any
) -> tuple[Result, Result, PlainEngine]:
    """Return the result of the engine and of flat rows, and the engine."""
    model = tiny_model("qwen3 critic", num_labels=1) if is_critic else tiny_model()
    model.set_attn_implementation("sdpa")
    scores = flat_rows(model, sequences, is_critic=is_critic)
    data = verl_rows(sequences, scores, case, seed=1)
    tu.assign_non_tensor(data, calculate_entropy=True)
    model.set_attn_implementation(ATTENTION_NAME)
    engine = PlainEngine(model, is_critic=is_critic, **tree)
    torch.manual_seed(0)
    output = engine.forward_backward_batch(data, case.function())
    got = Result(sum(output["loss"]), {name: each.grad for name, each in model.named_parameters()}, [])
    got = Result(got.loss, {name: each.clone() for name, each in got.gradients.items() if each is not None}, [])
    return got, flat_result(model, data, scores, case, rows=np.arange(len(sequences))), engine


@pytest.mark.parametrize(
    ("case", "is_critic"),
    [
        (LossCase(options={"entropy_coeff": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.3}), False),
        (LossCase("value"), True),
    ],
    ids=["policy", "critic"],
)
@pytest.mark.parametrize(
    "tree",
    [{"capacity": 1000}, {"capacity": 12, "relay": "never"}, {"capacity": 5}],
    ids=["one pack", "packs", "relayed"],
)
def test_a_mini_batch_is_that_of_its_rows(case: LossCase, is_critic: bool, tree: dict[str, Any]) -> None:
    drawn = random_sequences(np.random.default_rng(2), num_sequences=12, mean_len=3)
    sequences = [row for row in [*DEEP, *drawn] if 1 < len(row) <= 12]
    got, want, engine = run_both(case, sequences=sequences, is_critic=is_critic, **tree)
    assert worst_error(got, want) < 1e-10
    counts = engine.tree_counts
    assert counts.num_leaves == len(sequences)
    assert (counts.num_sections > 0) == (tree["capacity"] == 5)
    assert counts.num_packs + counts.num_sections > 1 or tree["capacity"] == 1000
    assert counts.num_tree_tokens < counts.num_flat_tokens == sum(map(len, sequences))
    # A section of the spine is one more call.
    assert engine.num_calls >= counts.num_packs + counts.num_sections


class RandomGate(torch.nn.Module):
    """It draws and has no setting that says so."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rand_like(hidden)


@pytest.mark.parametrize("is_random", [False, True])
def test_a_model_that_draws_is_refused_where_a_tree_is_relayed(is_random: bool) -> None:
    model = tiny_model().train()
    data = verl_rows(DEEP[:6], flat_rows(model, DEEP[:6]), LossCase(), seed=1)
    if is_random:
        model.model.layers[0].mlp.act_fn = RandomGate()
    model.set_attn_implementation(ATTENTION_NAME)
    PlainEngine(model, capacity=12, relay="never").forward_backward_batch(data.copy(), LossCase().function())
    relaying = PlainEngine(model, capacity=5)
    relaying.forward_backward_batch(data.copy(), None, forward_only=True)
    with nullcontext() if not is_random else pytest.raises(ValueError, match=r"draws random numbers .*relay=never"):
        relaying.forward_backward_batch(data.copy(), LossCase().function())
