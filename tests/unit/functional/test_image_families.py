"""Families that read images on random forests in float64 throughout, as `test_families` has the families of text.

The other side is the model's own attention on each trajectory by itself. Each test says what it has shown, for the
table of docs/models.md.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from float64_mode import Float64
from image_cases import FAMILIES, flat_scores, in_float64, pack_of, random_rows, signed_loss
from peft import LoraConfig, inject_adapter_in_model
from tiny_models import TITLES, tiny_model
from tree_cases import gradients, relative_error, run_all

from verl_tree.attention.hf import ATTENTION_NAME, for_text
from verl_tree.functional import expand
from verl_tree.functional.relayed import call_scores, forest_calls
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import RelayRun
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan

NUM_FORESTS = 24
LOG_PROBS, GRADIENTS = 1e-10, 1e-9
CPU = torch.device("cpu")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    """Compute in float64, all through."""
    with Float64():
        yield request.param


def by_row(scores_CT: torch.Tensor, layout: TreeLayout) -> list[torch.Tensor]:
    """Return the scores of each row, (C, L - 1)."""
    scores_F = expand(scores_CT.T, layout).T
    of_leaves = scores_F.split(np.diff(layout.leaf_offsets).tolist(), dim=1)
    return [of_leaves[rank][:, 1:] for rank in layout.leaves.argsort()]


def tree_gradients(
    model: Any, layout: TreeLayout, images: Any, *, capacity: int, backend: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return scores of the rows and gradients of their loss, from a tree in sections of so many tokens."""
    model.set_attn_implementation(for_text(model.config, ATTENTION_NAME))
    calls = forest_calls(layout, capacity=capacity)
    assert len(calls.sections) > 1 or layout.num_tokens <= capacity

    def compute(call: RelayCall, plan: AttentionPlan) -> torch.Tensor:
        return call_scores(model, call, layout, plan=plan, images=images, calculate_entropy=True)

    run = RelayRun(calls, compute, mode="joint", device=CPU, backend=backend)
    model.zero_grad()
    run_all(run, lambda scores_CT, _leaves: signed_loss(by_row(scores_CT, layout)))
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return by_row(run.scores_CT, layout), found


def assert_exact(model: Any, seeds: range, *, capacity: int = 10_000, backend: str = "auto") -> tuple[float, float]:
    """Compare on the forests of some seeds; return the worst errors of log-probs and gradients."""
    worst = [0.0, 0.0]
    for seed in seeds:
        rows = in_float64(random_rows(seed))
        layout, images = pack_of(model, rows)
        flat = [flat_scores(model, row) for row in rows]
        wanted = gradients(model, signed_loss(flat))
        tree, found = tree_gradients(model, layout, images, capacity=capacity, backend=backend)
        assert found.keys() == wanted.keys()
        pairs = [(here[0], there[0]) for here, there in zip(tree, flat, strict=True) if here.numel()]
        worst[0] = max(worst[0], *(relative_error(here, there) for here, there in pairs))
        worst[1] = max(worst[1], *(relative_error(found[name], gradient) for name, gradient in wanted.items()))
    assert worst[0] <= LOG_PROBS
    assert worst[1] <= GRADIENTS
    return worst[0], worst[1]


@pytest.mark.parametrize("backend", ["dense", "varlen"])
def test_log_probs_and_gradients_are_those_of_the_rows(
    family: str, backend: str, record_property: Callable[[str, object], None]
) -> None:
    start = ("dense", "varlen").index(backend)
    log_probs, of_gradients = assert_exact(tiny_model(family), range(start, NUM_FORESTS, 2), backend=backend)
    record_property(f"{TITLES[family]} | log-probs", log_probs)
    record_property(f"{TITLES[family]} | gradients", of_gradients)
    record_property(f"{TITLES[family]} | backends", backend)


def test_relayed_trees_have_the_same_gradients(family: str, record_property: Callable[[str, object], None]) -> None:
    """Sections of five tokens cut through images."""
    _, of_gradients = assert_exact(tiny_model(family), range(4), capacity=5)
    record_property(f"{TITLES[family]} | relay", of_gradients)


def test_gradient_checkpointing_and_lora(family: str, record_property: Callable[[str, object], None]) -> None:
    model = tiny_model(family).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, of_gradients = assert_exact(model, range(4))
    record_property(f"{TITLES[family]} | checkpointing", of_gradients)
    model = tiny_model(family)
    inject_adapter_in_model(LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), model)
    assert any("visual" in name and p.requires_grad for name, p in model.named_parameters())
    _, of_gradients = assert_exact(model.double(), range(4))
    record_property(f"{TITLES[family]} | LoRA", of_gradients)
