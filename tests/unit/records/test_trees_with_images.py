"""Stored trees and pages of rows with images, from real rows: a loop that branches, verl's processor, the driver."""

import base64
import io
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

pytest.importorskip("verl")

import transfer_queue as tq
from loop_cases import call
from picture_cases import camera, processor, question
from scripted_llm import PictureDataset, tokenizer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from worker_cases import InProcessWorker, run_sessions

from verl_tree.records import files, read_trees, write_trees
from verl_tree.records.page import tree_page
from verl_tree.records.page.content import page_content
from verl_tree.records.trees import StoredTree
from verl_tree.trainer.step_tokens import trees_of


def drawing(colour: str, shape: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    box = (size[0] // 8, size[1] // 8, size[0] * 7 // 8, size[1] * 7 // 8)
    getattr(draw, shape)(box, fill=colour)
    return image


MAP = drawing("darkgreen", "rectangle", (160, 96))
SEA, WOOD = drawing("royalblue", "ellipse", (96, 96)), drawing("sienna", "ellipse", (96, 96))


def reply(text: str) -> str:
    """Look at both places at once; say of each, and then of both, what was seen."""
    if "the sea" in text and "the wood" in text:
        return "The sea is blue and the wood is brown."
    if "the sea" in text:
        return "A blue circle."
    return "A brown circle." if "the wood" in text else call("look", scene="sea") + call("look", scene="wood")


@pytest.fixture(scope="module")
def tree() -> StoredTree:
    """Run two sessions of `parallel_tools` on a question with a map, and return the tree of their rows."""
    puts: list[dict[str, Any]] = []

    async def put(**arguments: Any) -> None:
        puts.append(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tq, "async_kv_batch_put", put)
        worker = InProcessWorker(reply, num_sessions=2, reward_handles=None)
        worker.rollout_config.prompt_length = worker.rollout_config.response_length = 1024
        worker.processor, worker.hf_model_type, worker.dataset_cls = processor(), "qwen2_5_vl", PictureDataset
        worker.tools = [camera(sea=SEA, wood=WOOD)]
        prompt = question("What is at the places of this map? ", MAP)["raw_prompt"]
        errors = run_sessions(worker, num_sessions=2, agent_name="parallel_tools", raw_prompt=prompt)
        assert errors == [None, None]
    rows = {key: row for each in puts[:2] for key, row in zip(each["keys"], each["fields"], strict=True)}
    tags = [tag for each in puts[:2] for tag in each["tags"]]
    columns = list_of_dict_to_tensordict([row.to_dict() for row in rows.values()])
    (made,) = trees_of(list(rows), tags=tags, columns=columns, step=7)
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
    old = pq.read_table(path).drop_columns(["images"]).replace_schema_metadata({files._VERSION_KEY: b"2"})
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
