"""Block lists of the tree mask: the drawn example by hand, and `create_block_mask` of torch on random forests."""

import numpy as np
import pytest
import torch
from attention_cases import draw_section
from torch.distributed.utils import _apply_to_tensors
from torch.nn.attention.flex_attention import create_block_mask
from tree_cases import layout_of, random_sequences

from verl_tree.attention import AttentionPlan, blocks
from verl_tree.attention.blocks import BlockLists, BlockRows
from verl_tree.attention.pieces import mask_calls

# The forest of the module's docstring: a0 a1 a2 | b0 b1 | c0.
DRAWN = np.array([6, 6, 6, 5, 5, 6])


def lists_of(rows: BlockRows) -> dict[int, tuple[list[int], list[int]]]:
    """Full and partial columns of every block."""
    return {
        block: (rows.indices[start:middle].tolist(), rows.indices[middle:end].tolist())
        for block, start, middle, end in rows.rows_R4.tolist()
    }


def test_the_drawn_forest():
    lists = BlockLists.of_plan(AttentionPlan.from_subtree_end(DRAWN), query_block=2, key_block=2)
    assert lists_of(lists.by_query) == {0: ([], [0]), 1: ([0], [1]), 2: ([0], [1, 2])}
    assert lists_of(lists.by_key) == {0: ([1, 2], [0]), 1: ([], [1, 2]), 2: ([], [2])}
    assert lists.by_query.rows_R4.dtype == lists.by_query.indices.dtype == torch.int32
    assert lists.by_query.rows_R4[:, 0].tolist() == [2, 1, 0]  # three, two and one visible tiles


def test_the_tables_of_the_drawn_forest():
    lists = BlockLists.of_plan(AttentionPlan.from_subtree_end(DRAWN), query_block=2, key_block=2)
    num_partial, partial, num_full, full = lists.by_query.tables()
    assert num_partial.tolist() == [[[1, 1, 2]]]
    assert partial.tolist() == [[[[0, 0], [1, 0], [1, 2]]]]
    assert num_full.tolist() == [[[0, 1, 1]]]
    assert full.tolist() == [[[[0], [0], [0]]]]
    num_partial, partial, num_full, full = lists.by_key.tables()
    assert num_partial.tolist() == [[[1, 2, 1]]]
    assert partial.tolist() == [[[[0, 0], [1, 2], [2, 0]]]]
    assert num_full.tolist() == [[[2, 0, 0]]]
    assert full.tolist() == [[[[1, 2], [0, 0], [0, 0]]]]
    assert all(table.dtype == torch.int32 for table in (*lists.by_query.tables(), *lists.by_key.tables()))


def test_the_drawn_forest_behind_a_context():
    """a0 is context. The blocks of queries are a1 a2 | b0 b1 | c0, those of keys a0 a1 | a2 b0 | b1 c0."""
    lists = BlockLists.of_plan(AttentionPlan.from_subtree_end(DRAWN, num_context=1), query_block=2, key_block=2)
    assert lists_of(lists.by_query) == {0: ([0], [1]), 1: ([0, 1], [2]), 2: ([], [0, 1, 2])}
    assert lists_of(lists.by_key) == {0: ([0, 1], [2]), 1: ([1], [0, 2]), 2: ([], [1, 2])}


def test_tables_without_a_full_tile_are_one_wide():
    lists = BlockLists.of_plan(AttentionPlan.from_subtree_end(np.array([1])), query_block=128, key_block=128)
    num_partial, partial, num_full, full = lists.by_query.tables()
    assert (num_partial.tolist(), num_full.tolist()) == ([[[1]]], [[[0]]])
    assert partial.shape == full.shape == (1, 1, 1, 1)


def used(num_11R: torch.Tensor, columns_11RW: torch.Tensor) -> list[list[int]]:
    pairs = zip(num_11R[0, 0].tolist(), columns_11RW[0, 0].tolist(), strict=True)
    return [columns[:count] for count, columns in pairs]


def assert_equals_block_mask(
    subtree_end_T: torch.Tensor, query_block: int, key_block: int, *, num_context: int = 0
) -> None:
    def tree_mask(_batch, _head, query, key):
        token = num_context + query
        return (key <= token) & (token < subtree_end_T[key])

    lens = (len(subtree_end_T) - num_context, len(subtree_end_T))
    want = create_block_mask(tree_mask, None, None, *lens, device="cpu", BLOCK_SIZE=(query_block, key_block))
    plan = AttentionPlan.from_subtree_end(subtree_end_T, num_context=num_context)
    lists = BlockLists.of_plan(plan, query_block=query_block, key_block=key_block)
    num_partial, partial, num_full, full = lists.by_query.tables()
    assert used(num_partial, partial) == used(want.kv_num_blocks, want.kv_indices)
    assert used(num_full, full) == used(want.full_kv_num_blocks, want.full_kv_indices)
    num_partial, partial, num_full, full = lists.by_key.tables()
    assert used(num_partial, partial) == used(want.q_num_blocks, want.q_indices)
    assert used(num_full, full) == used(want.full_q_num_blocks, want.full_q_indices)


@pytest.mark.parametrize("seed", range(400))
def test_random_forests_and_sections_equal_create_block_mask(seed, monkeypatch):
    """Partial and full tiles of both directions; equal and unequal sizes, any remainder, and cut into chunks.

    Blocks of queries begin behind the context, wherever that ends.
    """
    rng = np.random.default_rng(seed)
    layout = layout_of(random_sequences(rng, num_sequences=int(rng.integers(1, 20)), mean_len=int(rng.integers(1, 60))))
    query_block, key_block = (int(size) for size in rng.choice([1, 2, 5, 8, 16, 32, 64, 128], size=2))
    if seed % 3 == 0:
        monkeypatch.setattr(blocks, "CHUNK_TILES", 7)
    section = draw_section(rng, layout) if seed % 4 == 0 else None
    subtree_end_T, num_context = (
        (layout.subtree_end_T, 0) if section is None else (section.subtree_end_T, section.num_context)
    )
    assert_equals_block_mask(subtree_end_T, query_block, key_block, num_context=num_context)


def mask_of(plan: AttentionPlan, window: int) -> torch.Tensor:
    """(Q, T) bool, query by key."""
    token_T, position_T = torch.arange(plan.num_tokens), plan.position_T
    visible_TT = (token_T <= token_T[:, None]) & (token_T[:, None] < plan.subtree_end_T)
    return (visible_TT & (position_T[:, None] - position_T < window))[plan.num_context :]


@pytest.mark.parametrize("seed", range(100))
def test_the_tiles_of_a_window_hold_every_visible_pair(seed, monkeypatch):
    """What is left out sees nothing, and a full tile sees all; both directions agree. A mask is never needed twice."""
    rng = np.random.default_rng(seed)
    layout = layout_of(random_sequences(rng, num_sequences=int(rng.integers(1, 12)), mean_len=int(rng.integers(1, 40))))
    plan = draw_section(rng, layout).plan() if seed % 2 else AttentionPlan.from_layout(layout)
    query_block, key_block = (int(size) for size in rng.choice([1, 2, 5, 8, 16], size=2))
    window = int(rng.integers(1, plan.max_path_len + 2))
    if seed % 3 == 0:
        monkeypatch.setattr(blocks, "CHUNK_TILES", 7)
    lists = BlockLists.of_plan(plan, query_block=query_block, key_block=key_block, window=window)
    by_query, by_key = lists_of(lists.by_query), lists_of(lists.by_key)
    visible_QT = mask_of(plan, window)
    for query, queries in enumerate(visible_QT.split(query_block)):
        for key, tile in enumerate(queries.split(key_block, dim=1)):
            full, partial = key in by_query[query][0], key in by_query[query][1]
            assert (query in by_key[key][0], query in by_key[key][1]) == (full, partial)
            assert not (full and partial)
            assert full or partial or not tile.any()
            assert not full or (tile.all() and tile.shape == (query_block, key_block))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 200])
@pytest.mark.parametrize(("query_block", "key_block"), [(16, 16), (32, 8), (5, 16)])
def test_the_tiles_of_a_window_on_a_chain_are_those_of_create_block_mask(window, query_block, key_block):
    """On one path the smallest and largest position of a block say all, so no tile is visited in vain."""
    plan = AttentionPlan.from_subtree_end(np.full(150, 150))

    def mask(_batch, _head, query, key):
        return (key <= query) & (query - key < window)

    want = create_block_mask(mask, None, None, 150, 150, device="cpu", BLOCK_SIZE=(query_block, key_block))
    lists = BlockLists.of_plan(plan, query_block=query_block, key_block=key_block, window=window)
    num_partial, partial, num_full, full = lists.by_query.tables()
    assert used(num_partial, partial) == used(want.kv_num_blocks, want.kv_indices)
    assert used(num_full, full) == used(want.full_kv_num_blocks, want.full_kv_indices)


def test_the_drawn_forest_in_a_window():
    """Positions 0 1 2 3 4 3: b1 and c0 see two tokens before them at most; a0 a1 is out of reach."""
    lists = BlockLists.of_plan(AttentionPlan.from_subtree_end(DRAWN), query_block=2, key_block=2, window=2)
    assert lists_of(lists.by_query) == {0: ([], [0]), 1: ([], [0, 1]), 2: ([], [1, 2])}
    assert lists_of(lists.by_key) == {0: ([], [0, 1]), 1: ([], [1, 2]), 2: ([], [2])}


def test_the_longest_lists_come_first():
    layout = layout_of(random_sequences(np.random.default_rng(2), num_sequences=30, mean_len=20))
    lists = BlockLists.of_plan(AttentionPlan.from_layout(layout), query_block=16, key_block=8)
    for rows in (lists.by_query, lists.by_key):
        lengths = (rows.rows_R4[:, 3] - rows.rows_R4[:, 1]).tolist()
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > lengths[-1]


def test_a_plan_finds_the_lists_of_a_size_once():
    plan = AttentionPlan.from_subtree_end(DRAWN)
    lists = BlockLists.of_plan(plan, query_block=2, key_block=4)
    assert BlockLists.of_plan(plan, query_block=2, key_block=4) is lists
    assert BlockLists.of_plan(plan, query_block=4, key_block=2) is not lists
    assert BlockLists.of_plan(plan, query_block=2, key_block=4, window=2) is not lists
    assert BlockLists.of_plan(plan, query_block=2, key_block=4, window=2) is BlockLists.of_plan(
        plan, query_block=2, key_block=4, window=2
    )
    assert (lists.query_block, lists.key_block) == (2, 4)
    assert lists_of(lists.by_query) == {0: ([], [0]), 1: ([], [0]), 2: ([], [0, 1])}


def test_planning_reads_nothing_back_from_the_device():
    """A tensor on the meta device has no values, so a copy to the host would raise."""
    plan = AttentionPlan.from_subtree_end(DRAWN, device="meta")
    for window in (None, 2):
        lists = BlockLists.of_plan(plan, query_block=2, key_block=2, window=window)
        assert lists.by_query.rows_R4.shape == (3, 4)
        assert lists.by_query.indices.device.type == "meta"
    assert mask_calls(plan, by_level=True)[0].query_offsets_S1.device.type == "meta"


def test_a_long_pack_needs_no_square_memory():
    """131,072 tokens: the lists of a chain, whose every block sees all before it; T x T booleans would be 16 GiB."""
    num_tokens, block = 131_072, 128
    plan = AttentionPlan.from_subtree_end(np.full(num_tokens, num_tokens))
    lists = BlockLists.of_plan(plan, query_block=block, key_block=block)
    num_blocks = num_tokens // block
    assert len(lists.by_query.indices) == num_blocks * (num_blocks + 1) // 2
    assert lists_of(lists.by_query)[700] == (list(range(700)), [700])
    assert lists_of(lists.by_key)[700] == (list(range(701, num_blocks)), [700])


@pytest.mark.parametrize("sizes", [(0, 16), (16, -1)])
def test_blocks_hold_tokens(sizes):
    with pytest.raises(ValueError, match=f"query_block={sizes[0]}, key_block={sizes[1]}: blocks need at least one"):
        BlockLists.of_plan(AttentionPlan.from_subtree_end(DRAWN), query_block=sizes[0], key_block=sizes[1])


def test_fsdp_hands_a_plan_on_as_it_is():
    """It copies the dataclasses among a module's arguments, layer by layer; each would search for its lists anew."""
    plan = AttentionPlan.from_subtree_end(torch.tensor([3, 2, 3]))
    assert _apply_to_tensors(lambda tensor: tensor, {"tree_plan": plan})["tree_plan"] is plan
