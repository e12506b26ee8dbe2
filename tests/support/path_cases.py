"""A recurrence on forests beside itself along each path alone."""

import numpy as np
import pytest
import torch
from hybrid_cases import chain_of_one_token_nodes
from tree_cases import DEEP, layout_of, random_sequences, relative_error

FORESTS = {
    "deep": DEEP,
    "chain": chain_of_one_token_nodes(20),
    "random": random_sequences(np.random.default_rng(3), num_sequences=12, mean_len=6),
    "one token": [[3]],
    "long": [[*range(50)] * 3, [*range(50)] * 2 + [7]],
}


def on_forests_and_chunk_sizes(test):
    """Run a test on every forest, in chunks of several sizes."""
    test = pytest.mark.parametrize("sequences", FORESTS.values(), ids=FORESTS)(test)
    return pytest.mark.parametrize("size", [1, 3, 64])(test)


def assert_equals_each_path(sequences, size, *, inputs_of, on_tree, by_path):
    """Compare a recurrence `on_tree` with the one `by_path` on drawn inputs: outputs and gradients."""
    layout = layout_of(sequences)
    inputs = inputs_of(layout.num_tokens)
    got, want = on_tree(inputs, layout, size=size), by_path(inputs, layout)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    weight = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for got_one, want_one in zip(
        torch.autograd.grad((weight * got).sum(), inputs),
        torch.autograd.grad((weight * want).sum(), inputs),
        strict=True,
    ):
        assert relative_error(got_one, want_one) < 1e-10
