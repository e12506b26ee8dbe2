"""The images of verl's rows: which rows a tree engine takes, and how packs get images and positions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import IMAGE, tiny_model

pytest.importorskip("verl")

from image_cases import Row, branching_rows, draw_image, positions_of
from process_groups import group_of_one
from tensordict import TensorDict
from transformers import PreTrainedModel, Qwen3Config
from verl.utils import tensordict_utils as tu

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.config import TREE_STRATEGY, TreeConfig
from verl_tree.cost.model import CostModel
from verl_tree.engine.rows.columns import check_rows, jagged
from verl_tree.engine.rows.media import rows_with_images, with_images
from verl_tree.engine.rows.packs import split_into_packs
from verl_tree.engine.rows.positions import settle_positions
from verl_tree.functional.images import RowsWithImages
from verl_tree.testing.local_worker import local_worker
from verl_tree.tree.row_keys import row_keys


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_vl", size="engine")


def inputs_of(row: Row, **others: Any) -> dict[str, Any]:
    """Return what verl's agent loops write of a row's images."""
    if not row.images:
        return dict(others)
    grids = torch.tensor([image.grid for image in row.images])
    return {
        "pixel_values": torch.cat([image.pixels_AX for image in row.images]),
        "image_grid_thw": grids,
        "images_seqlens": grids.prod(-1),
        **others,
    }


def batch_of(model: PreTrainedModel, rows: list[Row], inputs: list[Any] | None = None) -> TensorDict:
    columns = {
        "input_ids": [torch.tensor(row.ids) for row in rows],
        "position_ids": [positions_of(model, row) for row in rows],
    }
    packed = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in columns.items()}
    data = TensorDict(packed, batch_size=len(rows))
    settle_positions(data, keep_components=True)
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", inputs or [inputs_of(row) for row in rows])
    return data


def read(model: PreTrainedModel, data: TensorDict) -> RowsWithImages:
    check_rows(data, with_images=True)
    images = rows_with_images(data, config=model.config)
    assert images is not None
    return images


def test_rows_of_verl_get_the_images_of_their_columns(model: PreTrainedModel) -> None:
    rows = branching_rows(1)
    images = read(model, batch_of(model, rows))
    distinct = {image.digest(): image for row in rows for image in row.images}
    assert [image.digest() for image in images.images] == list(distinct)
    assert all(torch.equal(a.pixels_AX, b.pixels_AX) for a, b in zip(images.images, distinct.values(), strict=True))


def test_packs_have_the_ids_positions_and_features_of_their_rows(model: PreTrainedModel) -> None:
    """In every pack, at every place of every row; the features of image tokens count up within an image."""
    rows = branching_rows(1)
    data = batch_of(model, rows)
    images = read(model, data)
    tokens, offsets = (each.numpy() for each in jagged(data["input_ids"]))
    batch = split_into_packs(
        tokens,
        keys=row_keys(tokens, images.number_F),
        offsets=offsets,
        trained=np.ones(offsets[-1], dtype=bool),
        capacity=60,
        config=TreeConfig(),
        cost_model=CostModel.prior(),
    )
    batch = with_images(batch, images, data, cost_model=CostModel.prior())
    assert len(batch.micro_batches) > 1
    for micro in batch.micro_batches:
        assert micro.images is not None
        bounds = micro.layout.leaf_offsets
        for leaf, row in enumerate(micro.rows.tolist()):
            place = micro.layout.tree_index_F[bounds[leaf] : bounds[leaf + 1]]
            assert micro.layout.token_ids_T[place].tolist() == list(rows[row].ids)
            assert torch.equal(micro.images.position_CT[:, place], positions_of(model, rows[row]))
            feature = micro.images.feature_T[place]
            assert ((feature >= 0) == (torch.tensor(rows[row].ids) == IMAGE)).all()
            of_row = feature[feature >= 0].tolist()
            wanted = []
            for image in rows[row].images:
                number = [each.digest() for each in images.images].index(image.digest())
                wanted += range(images.feature_bounds[number], images.feature_bounds[number + 1])
            assert of_row == wanted


@pytest.mark.parametrize(("capacity", "tree"), [(60, {"relay": "never"}), (7, {"relay": "always"})])
def test_the_work_of_a_micro_batch_has_the_features_of_each_of_its_calls(
    model: PreTrainedModel, capacity: int, tree: dict[str, str]
) -> None:
    """Each image once in each pack or section that shows a part of it; the dearest micro-batch comes first."""
    data = batch_of(model, branching_rows(1))
    images = read(model, data)
    tokens, offsets = (each.numpy() for each in jagged(data["input_ids"]))
    cost_model = replace(CostModel.prior(), s_per_feature=50.0)
    split = split_into_packs(
        tokens,
        keys=row_keys(tokens, images.number_F),
        offsets=offsets,
        trained=np.ones(offsets[-1], dtype=bool),
        capacity=capacity,
        config=TreeConfig(**tree),
        cost_model=cost_model,
    )
    batch = with_images(split, images, data, cost_model=cost_model)
    for micro in batch.micro_batches:
        assert micro.images is not None
        calls = micro.calls(scores_own_tokens=False).sections
        grids = [micro.images.of_call(torch.from_numpy(call.token_Q)).grids_I3 for call in calls]
        assert micro.work.num_features == sum(int(grids_I3.prod(-1).sum()) // 4 for grids_I3 in grids)
    assert sum(micro.work.num_features for micro in batch.micro_batches) > 4 + 8 + 4 + 8
    predicted = [cost_model.predict(micro.work) for micro in batch.micro_batches]
    assert predicted == sorted(predicted, reverse=True)


def test_models_that_read_no_images_have_none(model: PreTrainedModel) -> None:
    data = batch_of(model, [Row((5, 6))])
    assert rows_with_images(data, config=Qwen3Config()) is None


@pytest.mark.parametrize("nothing", [None, {}, {"pixel_values": None, "image_grid_thw": None}])
def test_rows_without_images_say_so_in_any_way(model: PreTrainedModel, nothing: Any) -> None:
    data = batch_of(model, [Row((5, 6)), Row((5, 7))], [nothing, {}])
    assert read(model, data).number_F.tolist() == [0, 0, 0, 0]
    del data["multi_modal_inputs"]
    assert read(model, data).number_F.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("name", ["pixel_values_videos", "video_grid_thw", "input_features", "second_per_grid_ts"])
def test_other_media_are_refused_by_name(model: PreTrainedModel, name: str) -> None:
    data = batch_of(model, [Row((5, 6)), Row((5, 7))], [{}, {name: torch.ones(1)}])
    with pytest.raises(ValueError, match=f"row 1 has {name} in multi_modal_inputs"):
        read(model, data)


def test_image_tokens_without_pixels_are_refused(model: PreTrainedModel) -> None:
    """Such a row would train as text."""
    image = draw_image(np.random.default_rng(0), 2, 4)
    data = batch_of(model, [Row((5, IMAGE, IMAGE), (image,))])
    del data["multi_modal_inputs"]
    with pytest.raises(ValueError, match="row 0 has 2 image tokens"):
        read(model, data)


def test_the_first_component_must_count_up(model: PreTrainedModel) -> None:
    data = batch_of(model, branching_rows(1))
    data["position_ids"].values()[0, 3] = 7
    with pytest.raises(ValueError, match=r"position_ids are not 0, 1, 2"):
        read(model, data)


def test_a_critic_is_refused_by_name_when_it_is_built(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is not on this machine the launch knows nothing."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # what verl's workers read
    model.save_pretrained(tmp_path)
    with (
        group_of_one(),
        pytest.raises(ValueError, match="there is no critic that reads images"),
    ):
        local_worker(str(tmp_path), strategy=TREE_STRATEGY, max_token_len=64, is_critic=True)
