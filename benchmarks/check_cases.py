"""What check_attention.py checks, the most valuable first: layers, and forests whose masks have every kind of tile."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sections import longest_context

from verl_tree.attention import AttentionPlan
from verl_tree.testing.synthetic import groups, random_forest, star, tool_fan_out, tree_search
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer asks of its attention; `deterministic`: under torch's deterministic algorithms."""

    dtype: str
    head_dim: int
    heads: tuple[int, int] = (8, 2)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    deterministic: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of queries, keys and values."""
        return {BF16: torch.bfloat16, FP16: torch.float16, FP32: torch.float32}[self.dtype]


@dataclass(frozen=True, slots=True)
class Case:
    """One layer on one forest, run `num_runs` times. Of a long one, some queries are compared with an oracle."""

    layer: Layer
    forest: str
    num_runs: int = 2
    is_long: bool = False


FORESTS: dict[str, Callable[[], list[np.ndarray]]] = {
    "star": lambda: star(7, prompt_len=513, branch_len=(60, 300), seed=2),
    "fine": lambda: tree_search(
        num_trees=3, num_expansions=5, num_rounds=4, num_steps=5, prompt_len=37, step_len=(3, 40), seed=1
    ),
    "agent": lambda: tool_fan_out(
        3, num_calls=3, prompt_len=200, plan_len=(10, 60), call_len=(5, 40), result_len=(20, 150), seed=3
    ),
    "one token": lambda: [np.array([3])],
    "chain": lambda: [np.arange(257)],
    "duplicates and prefixes": lambda: random_forest(3, num_leaves=40, mean_len=24),
    "exact blocks": lambda: star(3, prompt_len=256, branch_len=128, seed=4),
}

WAVES = {"4k": lambda: _search(num_trees=1, num_rounds=2, step_len=(30, 80), prompt_len=512)}
"""More blocks of work than the device has processors, so that the second ones meet what the first ones left."""

LONG = {
    "131k": lambda: [
        *star(24, prompt_len=8192, branch_len=3840, seed=5, vocab_size=1000),
        *(row + 1000 for row in _search(num_trees=2, num_rounds=11, step_len=(30, 100), prompt_len=1024)),
    ]
}

SMALL_LONG = {
    "131k": lambda: [
        *star(4, prompt_len=300, branch_len=40, seed=5, vocab_size=1000),
        *(row + 1000 for row in _search(num_trees=1, num_rounds=1, step_len=(3, 9), prompt_len=9)),
    ]
}
"""What a rehearsal takes for the long forest."""

SECTIONS = {"chain": 100, "fine": 150, "star": 700, "agent": 300, "4k": 1500, "131k": 32_768}
"""Capacity at which a forest is cut. Its section with the longest context is a case, too: `section of NAME`."""

MAIN_FORESTS = ("star", "fine", "section of agent")

BASIC = Layer(BF16, 128)
"""The layer that matters most: it is that of most models."""

WIDE = Layer(BF16, 128, (32, 8))

OPTIONS = (
    Layer(BF16, 128, (8, 2), window=300),
    Layer(BF16, 64, (8, 1), window=128, sinks=True),
    Layer(BF16, 256, (8, 2), window=300, softcap=2.0),
    Layer(FP16, 128, (8, 2), softcap=2.0),
    Layer(FP32, 64, (8, 2), window=33, softcap=2.0, sinks=True),
)
"""Few, as each is compiled anew: about those of Mistral, gpt-oss and Gemma-2; scores reach the caps."""

REHEARSED_FORESTS = ("one token", "chain", "section of chain", "duplicates and prefixes")


def cases(*, small: bool = False) -> list[Case]:
    """Return all cases, the most valuable first; for a rehearsal on a CPU those that take seconds."""
    if small:
        layers = (Layer(BF16, 64), Layer(FP32, 64), OPTIONS[-1], Layer(BF16, 64, deterministic=True))
        return [
            *(Case(layer, forest) for layer in layers for forest in REHEARSED_FORESTS),
            *(Case(Layer(BF16, 64), forest, is_long=True) for forest in LONG),
        ]
    every = (*FORESTS, *(f"section of {name}" for name in SECTIONS if name in FORESTS))
    waves, long = [*WAVES, "section of 4k"], [*LONG, "section of 131k"]

    def product(layers: tuple[Layer, ...], forests: tuple[str, ...] = every) -> list[Case]:
        return [Case(layer, forest) for layer in layers for forest in forests]

    def at_size(layer: Layer) -> list[Case]:
        return [Case(layer, forest, num_runs=3) for forest in waves]

    ordered = [
        *product((BASIC,)),
        *at_size(WIDE),
        *(Case(BASIC, forest, is_long=True) for forest in long),
        *product((Layer(BF16, 64),)),
        *at_size(Layer(BF16, 64)),
        *product((Layer(BF16, 128, deterministic=True), Layer(BF16, 64, deterministic=True)), MAIN_FORESTS),
        *product(tuple(Layer(BF16, dim, heads) for heads in ((14, 2), (8, 8), (8, 1)) for dim in (128, 64))),
        *product((Layer(FP16, 128), Layer(FP16, 64))),
        *product(OPTIONS, (*MAIN_FORESTS, "chain", "section of chain")),
        *product((Layer(BF16, 256), Layer(BF16, 96))),
        *at_size(Layer(BF16, 256)),
        *(Case(Layer(BF16, dim), "131k", is_long=True) for dim in (256, 64)),
        *product((Layer(FP32, 128), Layer(FP32, 64), Layer(FP32, 256)), MAIN_FORESTS),
        *product(
            tuple(
                Layer(dtype, dim, heads)
                for dtype, dim, heads in itertools.product(
                    (BF16, FP16, FP32), (64, 96, 128, 256), ((1, 1), (8, 8), (8, 2), (14, 2), (8, 1))
                )
            )
        ),
    ]
    return list(dict.fromkeys(ordered))


def plan_of(forest: str, *, device: str, small: bool = False) -> AttentionPlan:
    """Build the plan of a forest, or of the section of it with the longest context."""
    name = forest.removeprefix("section of ")
    makers = FORESTS | WAVES | (SMALL_LONG if small else LONG)
    layout = TreeLayout.from_forest(TokenForest.from_sequences(makers[name]()), device=device)
    if name == forest:
        return AttentionPlan.from_layout(layout)
    return longest_context(layout, capacity=SECTIONS[name])


def _search(**sizes: Any) -> list[np.ndarray]:
    """Draw searches with many short nodes."""
    return groups(partial(tree_search, num_expansions=5, num_steps=6, **sizes), num_groups=2, seed=6, vocab_size=1000)
