"""Which trees are relayed, what is counted of them, and the model calls that ranks make in step: by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_tree.config import TreeConfig
from verl_tree.cost.model import CostModel, Work
from verl_tree.engine.rows.packs import TreeBatch, split_into_packs
from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.relay.run import Mode, NumCalls
from verl_tree.tree.row_keys import row_keys, value_numbers

# A prompt of 3 tokens and two branches of 4: T = 11. With C = 8, packs are two of 7 tokens, 14 in all. Sections are two
# behind a spine of 3, which is the context of the second.
FORK = [[1, 2, 3, 10, 11, 12, 13], [1, 2, 3, 20, 21, 22, 23]]
SMALL = [[50, 51], [50, 52]]


def split(
    rows: list[list[int]],
    *,
    capacity: int = 8,
    cost_model: CostModel | None = None,
    mode: Mode = "rows",
    values: list | None = None,
    **options,
) -> TreeBatch:
    """Every token is trained but the first of each row."""
    tokens, offsets = np.concatenate(rows), np.cumsum([0, *map(len, rows)])
    return split_into_packs(
        tokens,
        offsets=offsets,
        trained=np.concatenate([np.arange(len(row)) > 0 for row in rows]),
        capacity=capacity,
        config=TreeConfig(**options),
        cost_model=CostModel.prior() if cost_model is None else cost_model,
        mode=mode,
        keys=None if values is None else row_keys(tokens, value_numbers(offsets, values=values)),
    )


def is_relayed(rows: list[list[int]], **options) -> bool:
    batch = split(rows, **options)
    assert len(batch.micro_batches) == 1 or not any(micro.is_relayed for micro in batch.micro_batches)
    return batch.micro_batches[0].is_relayed


def test_a_tree_that_fits_is_packed() -> None:
    for relay in ("auto", "always", "never"):
        assert not is_relayed(FORK, capacity=11, relay=relay)
    assert is_relayed(FORK, capacity=10)


def test_the_prior_prefers_a_relay() -> None:
    """11 tokens, 3 / 3 for the spine and 3 / 300 for the context, against 14 tokens."""
    assert is_relayed(FORK)
    assert is_relayed(FORK, mode="forward")
    # The joint form forwards all 11 once more: 11 + 11 / 3 = 14.7.
    assert not is_relayed(FORK, mode="joint")
    assert is_relayed(FORK, mode="joint", relay="always")
    assert not is_relayed(FORK, relay="never")


def test_a_fitted_model_decides() -> None:
    """Without pairs, a relay costs 11 + 3 s_per_spine + 3 s_per_context, packs 14, and either 2 s_per_pack."""
    linear = replace(CostModel.prior(), s_per_pair=0.0, s_per_spine=0.0, s_per_context=0.0)
    for name, highest in (("s_per_spine", 1.0), ("s_per_context", 1.0)):
        assert is_relayed(FORK, cost_model=replace(linear, **{name: highest - 0.01}, s_per_pack=5.0))
        assert not is_relayed(FORK, cost_model=replace(linear, **{name: highest + 0.01}, s_per_pack=5.0))
        assert is_relayed(FORK, cost_model=replace(linear, **{name: highest + 0.01}), relay="always")


def test_dear_sections_are_counted() -> None:
    """A prompt of 6 tokens and three branches of 4, C = 12: three packs of 10 tokens, or 18 tokens in two sections."""
    rows = [[1, 2, 3, 4, 5, 6, branch, 7, 8, 9] for branch in (10, 20, 30)]
    batch = split(rows, capacity=12)
    (micro,) = batch.micro_batches
    assert (micro.cut.num_sections, len(micro.cut.spine)) == (2, 6)
    # Tokens cost next to nothing here and the spine 1 each, so it is 6 against one more pass.
    model = replace(CostModel.prior(), s_per_token=1e-6, s_per_pair=0.0, s_per_spine=1.0, s_per_context=0.0)
    assert is_relayed(rows, capacity=12, cost_model=replace(model, s_per_pack=6.1))
    assert not is_relayed(rows, capacity=12, cost_model=replace(model, s_per_pack=5.9))


def test_a_trajectory_longer_than_the_capacity_is_relayed() -> None:
    """Whatever the cost model and the gate say: packs cannot hold it."""
    dear = replace(CostModel.prior(), s_per_spine=1000.0)
    for mode in ("forward", "rows", "joint"):
        assert is_relayed(FORK, capacity=6, mode=mode, cost_model=dear)
        assert is_relayed(FORK, capacity=6, mode=mode, gate="always")
        assert is_relayed(FORK[:1], capacity=6, mode=mode)
    with pytest.raises(ValueError, match=r"tree\.relay"):
        split(FORK, capacity=6, relay="never")


def test_a_gate_that_is_always_flat_comes_first() -> None:
    batch = split(FORK, gate="always")
    assert [micro.is_flat for micro in batch.micro_batches] == [True, True]
    assert not is_relayed(FORK, gate="always", relay="always")
    # With gate=never, a relay is still the choice of the cost model.
    assert is_relayed(FORK, gate="never")


def test_the_work_and_the_calls_of_a_relayed_tree() -> None:
    """Positions 0..6 and 3..6: 28 + 22 pairs. 10 tokens have a parent; the three nodes are the prompt and branches.

    The second section has the prompt as context, and the joint form runs it twice.
    """
    of_sections = Work(num_tokens=11, num_visible_pairs=50, num_scored=10, num_nodes=3, num_packs=2)
    expected: dict[Mode, tuple[int, int, NumCalls]] = {
        "forward": (0, 3, NumCalls(2, 0)),
        "rows": (3, 3, NumCalls(1, 2)),
        "joint": (11, 6, NumCalls(2, 2)),
    }
    for mode, (num_spine, num_context, num_calls) in expected.items():
        (micro,) = split(FORK, mode=mode, relay="always").micro_batches
        assert micro.work == replace(of_sections, num_spine=num_spine, num_context=num_context)
        assert micro.num_calls(mode) == num_calls
        assert micro.cut.spine.tolist() == [0, 1, 2]
        assert micro.is_relayed
        assert not micro.is_flat


def test_what_is_counted() -> None:
    """The fork is relayed, the small tree of 3 tokens packed. Every tree token is computed once, so ERR is POR."""
    batch = split([*FORK, *SMALL])
    assert [micro.is_relayed for micro in batch.micro_batches] == [True, False]
    assert [sorted(micro.rows.tolist()) for micro in batch.micro_batches] == [[0, 1], [2, 3]]
    counts = batch.counts
    assert (counts.num_flat_tokens, counts.num_tree_tokens, counts.num_packed_tokens) == (18, 14, 14)
    assert (counts.num_sections, counts.num_spine_tokens, counts.num_context_tokens) == (2, 3, 3)
    assert (counts.num_packs, counts.num_flat_packs, counts.num_leaves, counts.num_nodes) == (1, 0, 4, 6)
    assert counts.num_lower_bound_tokens == 14
    assert counts.num_capacity_tokens == 8 * 3
    metrics = counts.metrics()
    assert metrics["tree/err"] == metrics["tree/por"] == pytest.approx(1 - 14 / 18)
    assert metrics["tree/gap"] == 0.0
    assert metrics["tree/sections"] == 2
    assert metrics["tree/spine_ratio"] == pytest.approx(3 / 14)


def test_without_a_relay_tokens_are_computed_again() -> None:
    counts = split([*FORK, *SMALL], relay="never").counts
    assert (counts.num_packed_tokens, counts.num_sections, counts.num_spine_tokens) == (17, 0, 0)
    assert "tree/sections" not in counts.metrics()


def test_results_of_relayed_and_packed_trees_find_their_rows() -> None:
    rows = [FORK[0], SMALL[0], FORK[1], SMALL[1]]
    batch = split(rows)
    flat = np.zeros(18, dtype=np.int64)
    for micro in batch.micro_batches:
        flat[micro.flat_index_F.numpy()] = micro.layout.token_ids_T[micro.layout.tree_index_F].numpy()
    assert flat.tolist() == np.concatenate(rows).tolist()


def test_shared_tokens_are_weighed_in_relayed_trees() -> None:
    (micro,) = split(FORK, shared_tokens="mean").micro_batches
    assert micro.is_relayed
    assert micro.gradient_weight_F is not None
    assert torch.equal(micro.gradient_weight_F, torch.tensor([0, 0.5, 0.5, 1, 1, 1, 1] * 2))


def test_trees_with_other_values_stay_apart_when_one_is_relayed() -> None:
    """Prefixes of the fork's rows with another value: a tree of 5 tokens, which fits."""
    rows, values = [*FORK, FORK[0][:4], FORK[1][:4]], [1.0, 1.0, 0.5, 0.5]
    batch = split(rows, values=values)
    assert [sorted(micro.rows.tolist()) for micro in batch.micro_batches] == [[0, 1], [2, 3]]
    assert [micro.is_relayed for micro in batch.micro_batches] == [True, False]
    assert [micro.work.num_tokens for micro in batch.micro_batches] == [11, 5]


def test_a_forest_of_some_leaves_keeps_their_trees_apart() -> None:
    """Two trees that begin with the same tokens: 1 2 3 and 1 2 4 with one value, 1 2 3 with another."""
    rows = [[1, 2, 3], [1, 2, 4], [1, 2, 3]]
    tokens, offsets = np.concatenate(rows), np.array([0, 3, 6, 9])
    keys = row_keys(tokens, value_numbers(offsets, values=[0.5, 0.5, 1.0]))
    read = ReadRows.from_batch(tokens, offsets=offsets, trained=np.array([False, True, True] * 3), keys=keys)
    assert sorted(sorted(leaves.tolist()) for leaves in read.trees()) == [[0, 1], [2]]
    for leaves, num_tokens in (([0, 1], 4), ([0, 2], 6), ([2, 0], 6), ([2, 1, 0], 7), ([2], 3)):
        forest = read.forest_of(np.array(leaves))
        assert (forest.num_tokens, forest.num_leaves) == (num_tokens, len(leaves))
        assert [forest.sequence(number).tolist() for number in range(len(leaves))] == [
            keys[3 * leaf : 3 * leaf + 3].tolist() for leaf in leaves
        ]
