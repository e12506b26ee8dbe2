"""Stored trees and pages of rows with images, from real rows: a loop that branches, verl's processor, the driver."""

import base64
import io
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

pytest.importorskip("verl")

from picture_sessions import two_sessions
from scripted_llm import tokenizer

from verl_tree.records import files, read_trees, write_trees
from verl_tree.records.page import tree_page
from verl_tree.records.page.content import page_content
from verl_tree.records.trees import StoredTree
from verl_tree.trainer.rows.step_tokens import trees_of


@pytest.fixture(scope="module")
def tree() -> StoredTree:
    keys, tags, columns = two_sessions()
    (made,) = trees_of(keys, tags=tags, columns=columns, step=7)
    return made


def test_nodes_have_their_images_once_and_leaves_those_of_their_path(tree: StoredTree, tmp_path: Path) -> None:
    write_trees(tmp_path / "t.parquet", [tree])
    (read,) = read_trees(tmp_path / "t.parquet")
    assert [leaf.images for leaf in read.leaves] == [leaf.images for leaf in tree.leaves]
    assert [len(leaf.images) for leaf in read.leaves] == [2, 2, 3] * 2
    assert read.thumbnails == tree.thumbnails
    sizes = {Image.open(io.BytesIO(file)).size for file in read.thumbnails.values()}
    assert sizes == {(128, 77), (96, 96)}
    assert read.forest().lcp.tolist() == tree.forest().lcp.tolist()
    nodes = pq.read_table(tmp_path / "t.parquet").column("images").to_pylist()
    thumbnails = [run["thumbnail"] for node in nodes for run in node]
    assert sum(file is not None for file in thumbnails) == 3 < len(thumbnails)


def test_a_file_of_version_2_has_no_images(tree: StoredTree, tmp_path: Path) -> None:
    """Its leaves have none, and its forest parts where the images did."""
    path = tmp_path / "t.parquet"
    write_trees(path, [tree])
    old = pq.read_table(path).drop_columns(["images"]).replace_schema_metadata({files.VERSION_KEY: b"2"})
    pq.write_table(old, path)
    (read,) = read_trees(path)
    assert (read.thumbnails, [leaf.images for leaf in read.leaves]) == ({}, [()] * 6)
    assert (read.forest().num_nodes, read.forest().num_tokens) == (tree.forest().num_nodes, tree.forest().num_tokens)
    assert page_content(read, tokenizer=None)["images"] == []


def test_a_page_shows_each_image_where_it_was_read(tree: StoredTree) -> None:
    content = page_content(tree, tokenizer=tokenizer())
    assert len(content["images"]) == 3
    for url in content["images"]:
        kind, _, file = url.partition(",")
        assert kind == "data:image/jpeg;base64"
        assert Image.open(io.BytesIO(base64.b64decode(file))).format == "JPEG"
    shown = [(passage["image"], passage["text"]) for node in content["nodes"] for passage in node["passages"]]
    captions = [text for image, text in shown if image is not None]
    # In the order of the page: the map, the wood in its branch, the sea, and behind it the wood again.
    assert [caption.split(",")[0] for caption in captions] == ["image 1", "image 2", "image 3", "image 2"]
    assert [node["passages"][0]["who"] for node in content["nodes"]] == ["prompt"] + ["environment"] * 4
    assert not any("<|image_pad|>" in text for _, text in shown)
    page = tree_page(tree, tokenizer=tokenizer())
    assert "img-src data:;" in page
    assert all(page.count(url) == 1 for url in content["images"])
