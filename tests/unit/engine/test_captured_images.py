"""Rows that loops with images wrote, as the tree engine reads them: one forest, images once, positions that agree."""

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

from picture_cases import processor
from picture_sessions import two_sessions

from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.media import rows_with_images
from verl_tree.engine.rows.positions import positions_of
from verl_tree.trainer.rows.step_rows import keys_of_columns
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.row_keys import row_keys
from verl_tree.tree.rows import ranges


def test_the_engine_finds_the_forest_that_the_driver_knows() -> None:
    """Six rows with fourteen images, three of them distinct; the wood is in two places of the tree."""
    _, _, columns = two_sessions()
    rows = rows_with_images(columns, config=processor().config)
    assert rows is not None
    assert len(rows.images) == 3
    tokens, offsets = (each.numpy() for each in jagged(columns["input_ids"]))
    forest = TokenForest.from_sequences(np.split(row_keys(tokens, rows.number_F), offsets[1:-1]))
    known = TokenForest.from_sequences(keys_of_columns(columns))
    assert forest.lcp.tolist() == known.lcp.tolist()
    # A leaf of each kind has what its own branch reads: of ids alone, the branches would share their first image.
    of_ids = TokenForest.from_sequences([row.numpy() for row in columns["input_ids"].unbind()])
    assert forest.num_tokens > of_ids.num_tokens
    layout = TreeLayout.from_forest(forest)
    place_F = torch.from_numpy(ranges(offsets[layout.leaves], np.diff(layout.leaf_offsets)))
    # Raises if rows that share a token gave it different positions.
    images = rows.of_pack(layout, place_F, position_CF=positions_of(columns["position_ids"]))
    layout = layout.with_token_ids(torch.from_numpy(tokens)[place_F])
    assert torch.equal(layout.token_ids_T == processor().image_token_id, images.feature_T >= 0)
    # Map 60; in the branches sea 64, wood 64, and behind the sea the wood once more.
    assert int((images.feature_T >= 0).sum()) == 60 + 64 + 64 + 64
    assert int(images.feature_T.max()) == 60 + 64 + 64 - 1
