"""Every family of models on random forests in float64 throughout: a tree is its trajectories, one after another.

The other side is transformers' eager attention on each trajectory by itself. The forests have nodes of one token,
strict prefixes, duplicates and several roots. Each test says what it has shown, for the table of docs/models.md.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from float64_mode import Float64
from model_cases import tree_logits
from peft import LoraConfig, get_peft_model
from tiny_models import VOCAB_SIZE, tiny_model
from tree_cases import flat_scores, gradients, layout_of, relative_error

from verl_tree.functional import tree_log_probs
from verl_tree.testing.synthetic import random_forest

FAMILIES = {
    "Qwen3": "qwen3",
    "Qwen2": "qwen2 window",
    "Llama": "llama",
    "Mistral": "mistral window",
    "Gemma 2": "gemma2",
    "Gemma 3, text": "gemma3",
    "gpt-oss": "gpt-oss",
    "Qwen3-MoE": "qwen3 moe",
}
NUM_FORESTS = 24
LOG_PROBS, GRADIENTS = 1e-10, 1e-9
ROUNDING = 1e-12
"""Some thousand times that of float64."""


def forest(seed: int) -> list[list[int]]:
    """Draw a forest; every fourth has no node longer than one token but by chance."""
    rows = random_forest(200 + seed, num_leaves=6, mean_len=1 + seed % 4, root_probability=0.15, vocab_size=VOCAB_SIZE)
    return [list(row) for row in rows]


def errors(model: Any, rows: list[list[int]], **options: Any) -> tuple[float, float]:
    """Return the worst errors of log-probs and of gradients under a loss with a sign for every (row, token)."""
    with Float64():
        got = tree_log_probs(model, rows, **options).log_probs
        want = [flat_scores(model, row)[0] for row in rows]
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(len(each), generator=generator, dtype=torch.float64) for each in want]
        found, wanted = (
            gradients(model, sum((each * weight).sum() for each, weight in zip(side, weights, strict=True)))
            for side in (got, want)
        )
    assert found.keys() == wanted.keys()
    assert len(wanted) > 8
    return (
        max(relative_error(here, there) for here, there in zip(got, want, strict=True)),
        max(relative_error(found[name], gradient) for name, gradient in wanted.items()),
    )


def assert_exact(model: Any, seeds: range, **options: Any) -> tuple[float, float]:
    """Compare on the forests of some seeds; return the worst errors."""
    model.set_attn_implementation("eager")
    log_probs, of_gradients = map(max, zip(*(errors(model, forest(seed), **options) for seed in seeds), strict=True))
    assert log_probs <= LOG_PROBS
    assert of_gradients <= GRADIENTS
    return log_probs, of_gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_rows(
    family: str, record_property: Callable[[str, object], None]
) -> None:
    backends = ["dense"] if family == "Gemma 2" else ["dense", "varlen"]  # varlen serves no softcap
    model = tiny_model(FAMILIES[family])
    for start, backend in enumerate(backends):
        log_probs, of_gradients = assert_exact(model, range(start, NUM_FORESTS, len(backends)), backend=backend)
        record_property(f"{family} | log-probs", log_probs)
        record_property(f"{family} | gradients", of_gradients)
        record_property(f"{family} | backends", backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_relayed_trees_have_the_same_gradients(family: str, record_property: Callable[[str, object], None]) -> None:
    _, of_gradients = assert_exact(tiny_model(FAMILIES[family]), range(4), capacity=5)
    record_property(f"{family} | relay", of_gradients)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_and_lora(family: str, record_property: Callable[[str, object], None]) -> None:
    model = tiny_model(FAMILIES[family]).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _, of_gradients = assert_exact(model, range(4))
    record_property(f"{family} | checkpointing", of_gradients)
    model = tiny_model(FAMILIES[family])
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).double()
    _, of_gradients = assert_exact(adapted, range(4))
    record_property(f"{family} | LoRA", of_gradients)


@pytest.mark.parametrize("family", ["gpt-oss", "Qwen3-MoE"])
def test_another_token_changes_no_other_path(family: str) -> None:
    """Experts must not see which other tokens they get: a token of one branch takes no place of another's.

    Not bit for bit: an expert gets another number of tokens, and products of other shapes may round differently.
    """
    model = tiny_model(FAMILIES[family])
    trunk, branches = [5, 6, 7], [[8, 9, 10, 11], [12, 13, 14], [15, 16, 17, 18, 19]]
    for token in range(20, 60, 4):
        changed = [branches[0], [branches[1][0], token, token + 1], branches[2]]
        with Float64():
            before, after = (
                tree_logits(model, [trunk + each for each in rows], backend="auto") for rows in (branches, changed)
            )
        same = [(before[0], after[0]), (before[2], after[2]), (before[1][:4], after[1][:4])]
        assert max(relative_error(got, want) for want, got in same) < ROUNDING
        assert relative_error(after[1][4:], before[1][4:]) > 1e-3


def test_the_forests_have_what_they_should() -> None:
    """Nodes of one token in chains, strict prefixes, duplicates, several roots."""
    chains, prefixes, duplicates, roots = 0, 0, 0, 0
    for seed in range(NUM_FORESTS):
        rows = sorted(map(tuple, forest(seed)))
        layout = layout_of(rows)
        ends = layout.subtree_end_T.tolist()
        chains += any(ends[at] != ends[at + 1] != ends[at + 2] for at in range(len(ends) - 2))
        duplicates += any(one == other for one, other in pairwise(rows))
        prefixes += any(len(one) < len(other) and other[: len(one)] == one for one, other in pairwise(rows))
        roots += len({row[0] for row in rows}) > 1
    assert min(chains, prefixes, duplicates, roots) >= 4
