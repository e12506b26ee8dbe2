"""Rows with images: where they stand and what they show, as the rollout notes it and the driver compares it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")

import transfer_queue as tq
from PIL import Image
from tensordict import TensorDict
from transformers import BatchFeature
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from worker_cases import InProcessWorker

from rollout_hooks.capture.image_runs import IMAGES_FIELD, image_runs, tree_keys
from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE, LEAF_SHAPE_TAG
from rollout_hooks.capture.recording import recording_client
from rollout_hooks.capture.running import PromptProgress
from verl_tree.records import forests, read_trees, write_trees
from verl_tree.trainer.rows import step_rows as step_rows_module
from verl_tree.trainer.rows.step_rows import StepRows, shapes_of_columns
from verl_tree.trainer.rows.step_tokens import trees_of
from verl_tree.tree import TokenForest

IMAGE = 9
PROCESSOR = SimpleNamespace(image_token_id=IMAGE, image_processor=SimpleNamespace(merge_size=2))


class ColourProcessor:
    """A processor that makes two tokens of an image of one colour."""

    image_token_id = IMAGE
    image_processor = PROCESSOR.image_processor

    def __call__(self, *, images: list[Image.Image], **_others: Any) -> BatchFeature:
        return BatchFeature(inputs_of(*(image.getpixel((0, 0))[0] for image in images)))


def inputs_of(*values: float, grid: tuple[int, int, int] = (1, 2, 4)) -> dict[str, torch.Tensor]:
    """Return verl's `multi_modal_inputs` of images of one colour; each becomes two tokens."""
    return {
        "pixel_values": torch.cat([torch.full((8, 3), value) for value in values]),
        "image_grid_thw": torch.tensor([grid] * len(values)),
    }


def runs_of(token_ids: list[int], inputs: dict[str, torch.Tensor]) -> list[tuple[int, int, int]]:
    return image_runs(token_ids, inputs, processor=PROCESSOR)


def test_runs_say_where_images_stand_and_which_are_equal() -> None:
    runs = runs_of([5, IMAGE, IMAGE, 6, IMAGE, IMAGE, IMAGE, IMAGE], inputs_of(0.0, 1.0, 0.0))
    (first, second, third) = [number for _, _, number in runs]
    assert [run[:2] for run in runs] == [(1, 3), (4, 6), (6, 8)]
    assert first == third != second
    assert all(2**31 <= number < 2**32 for number in (first, second))
    ((_, _, tall),) = runs_of([IMAGE, IMAGE], inputs_of(0.0, grid=(1, 4, 2)))
    assert tall != first
    assert runs_of([5, 6], {}) == []


def test_keys_are_ids_with_images_in_their_place() -> None:
    runs = [(1, 3, 2**31 + 7)]
    assert tree_keys([5, IMAGE, IMAGE, 6], {IMAGES_FIELD: runs}).tolist() == [5, 2**31 + 7, 2**31 + 7, 6]
    assert tree_keys([5, 6], {}).tolist() == [5, 6]


def test_a_row_that_cuts_an_image_is_refused() -> None:
    with pytest.raises(ValueError, match="a row has 3 image tokens, and its 2 images make 4"):
        runs_of([5, IMAGE, IMAGE, 6, IMAGE], inputs_of(0.0, 1.0))


def test_rows_that_see_different_images_have_shapes_that_part_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sessions sample equal tokens behind one prompt; the second was shown another image."""
    puts: list[dict[str, Any]] = []

    async def put(**arguments: Any) -> None:
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    worker = InProcessWorker(lambda _: "fine", num_sessions=3, reward_handles=None)
    worker.processor = ColourProcessor()
    output = AgentLoopOutput(
        prompt_ids=[5, IMAGE, IMAGE, 6], response_ids=[7, 8], response_mask=[1, 1], metrics=AgentLoopMetrics()
    )
    worker._prompts["u"] = PromptProgress(2, [])
    client = SimpleNamespace(tree=recording_client(worker).tree)
    for session in range(3):
        worker._session = SimpleNamespace(uid="u", session_id=session, client=client, wants_log_probs=False)
        colour = Image.new("RGB", (2, 2), "red" if session == 1 else "black")
        copied = output.model_copy(deep=True, update={"multi_modal_data": {"images": [colour]}})
        asyncio.run(worker._agent_loop_postprocess(copied, False, uid="u", session_id=session, global_steps=1))
    asyncio.run(worker._put_leaf_shapes("u", worker._prompts["u"]))
    shapes = np.array([np.frombuffer(tag[LEAF_SHAPE_TAG], LEAF_SHAPE)[0] for tag in puts[-1]["tags"]])
    in_order = shapes[shapes["rank"].argsort()]
    # 0 and 2 are duplicates; session 1 shares only the first token with either.
    assert sorted(in_order["num_shared"].tolist()) == [0, 1, 6]
    assert shapes["num_shared"][1] in (0, 1)
    # The image of two features is new where it is not shared.
    assert shapes["num_image_tokens"].tolist() == [2, 2, 2]
    assert sorted(in_order["num_new_image_tokens"].tolist()) == [0, 2, 2]
    runs = [put["fields"][0]["extra_fields"][IMAGES_FIELD] for put in puts[:-1]]
    assert runs[0] == runs[2] != runs[1]
    assert [run[:2] for run in runs[1]] == [(1, 3)]


def row_of(number: int | None, *, media: Any = None) -> dict[str, Any]:
    """Make a row 5 9 9 6 whose image has this number, if it has one that was noted."""
    row = {
        "input_ids": torch.tensor([5, IMAGE, IMAGE, 6]),
        "response_mask": torch.tensor([1]),
        "extra_fields": {} if number is None else {IMAGES_FIELD: [(1, 3, number)]},
    }
    return row if media is None else row | {"multi_modal_inputs": media}


ROWS = {"a_0_0": row_of(2**31), "a_1_0": row_of(2**31 + 1), "a_2_0": row_of(2**31)}


def columns_of(rows: dict[str, dict[str, Any]]) -> TensorDict:
    return list_of_dict_to_tensordict(list(rows.values()))


def test_the_driver_finds_the_same_shapes_from_rows() -> None:
    shapes = shapes_of_columns(list(ROWS), columns_of(ROWS))
    assert shapes["num_shared"].tolist() == [0, 1, 4]
    assert shapes["rank"].tolist() == [0, 2, 1]


def test_the_work_of_a_group_has_the_features_of_its_images() -> None:
    """Rows 0 and 2 show one image, row 1 another; a row that no loss reads shows nothing."""
    (profile,) = StepRows(list(ROWS), shapes_of_columns(list(ROWS), columns_of(ROWS))).profiles()
    assert profile.range_work(0, 3).num_features == 4
    assert profile.range_work(0, 2).num_features == profile.range_work(2, 3).num_features == 2
    rows = ROWS | {"a_0_0": ROWS["a_0_0"] | {"response_mask": torch.tensor([0])}}
    (profile,) = StepRows(list(rows), shapes_of_columns(list(rows), columns_of(rows))).profiles()
    assert [profile.range_work(0, end).num_features for end in (1, 2, 3)] == [2, 4, 4]


def test_rows_with_media_that_nobody_noted_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"a_0_0": row_of(2**31, media={"pixel_values": 1}), "a_1_0": row_of(None, media={"pixel_values": 1})}

    def read(keys: list[str], names: tuple[str, ...], *, partition_id: str) -> TensorDict:  # noqa: ARG001
        return columns_of({key: {name: rows[key][name] for name in names if name in rows[key]} for key in keys})

    monkeypatch.setattr(step_rows_module, "fetch", read)
    batch = SimpleNamespace(keys=list(rows), tags=[{}] * len(rows), partition_id="train")
    with pytest.raises(ValueError, match="row a_1_0 has multi_modal_inputs and no 'image_runs'"):
        StepRows.fetch(batch)


def test_stored_trees_part_where_images_do_also_once_they_are_read(tmp_path: Path) -> None:
    """Node 5, then one node per image; the leaves have their token ids."""
    (tree,) = trees_of(list(ROWS), tags=[{}] * 3, columns=columns_of(ROWS), step=1)
    assert (tree.forest().num_tokens, tree.forest().num_nodes) == (7, 3)
    write_trees(tmp_path / "trees.parquet", [tree])
    (read,) = read_trees(tmp_path / "trees.parquet")
    (forest,) = forests(tmp_path / "trees.parquet")
    for each in (read.forest(), forest):
        assert (each.num_tokens, each.num_nodes, each.order.tolist()) == (7, 3, [0, 2, 1])
        assert each.lcp.tolist() == [0, 4, 1]
    assert all(leaf.token_ids.tolist() == [5, IMAGE, IMAGE, 6] for leaf in read.leaves)
    assert TokenForest.from_sequences([leaf.token_ids for leaf in read.leaves]).num_nodes == 1
