"""What rows in TransferQueue keep and say of themselves; its controller, without sockets, and its storage's columns."""

import inspect
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from tensordict import NonTensorData, NonTensorStack
from transfer_queue import controller as controllers
from transfer_queue.metadata import extract_field_schema
from transfer_queue.sampler import SequentialSampler
from transfer_queue.storage import StorageManagerFactory
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.utils import serial_utils
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from rollout_hooks.capture.wire_storage import TreeStorageManager, values_of
from verl_tree.launch.command.composition import compose_config

KEYS = ["u_0_0", "u_0_1", "u_1_0"]


def new_controller() -> Any:
    """Make the controller of a queue in this process."""
    controller = object.__new__(controllers.TransferQueueController.__ray_metadata__.modified_class)
    controller.controller_id, controller.partitions = "test", {}
    controller.index_manager, controller.sampler = controllers.PartitionIndexManager(), SequentialSampler()
    return controller


def put(controller: Any, keys: list[str], *, names: list[str], tag: dict[str, Any]) -> None:
    """Register rows with fields and add to their tags, as `kv_batch_put` asks the controller to."""
    known = controller.kv_retrieve_meta(keys, "train", create=True)
    schema = {name: {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True} for name in names}
    controller.update_production_status("train", known.global_indexes, schema)
    known.update_custom_meta([dict(tag) for _ in keys])
    tags = dict(zip(known.global_indexes, known.custom_meta, strict=True))
    controller.set_custom_meta({"train": tags})


def test_the_fields_of_rows_are_those_that_all_of_them_have() -> None:
    controller = new_controller()
    put(controller, KEYS, names=["prompts", "uid"], tag={})
    put(controller, KEYS[:2], names=["rm_scores"], tag={})
    names = {len(keys): controller.kv_retrieve_meta(keys, "train").field_names for keys in (KEYS, KEYS[:2], KEYS[2:])}
    assert names == {3: ["prompts", "uid"], 2: ["prompts", "rm_scores", "uid"], 1: ["prompts", "uid"]}


def test_tags_that_are_written_later_are_added_and_outlive_a_checkpoint(tmp_path: Path) -> None:
    """The shape of a row is bytes in a tag, which its worker adds when the prompt has ended."""
    controller, restored = new_controller(), new_controller()
    put(controller, KEYS, names=["prompts"], tag={"seq_len": 3})
    put(controller, KEYS, names=[], tag={"leaf_shape": b"\x00\x01"})
    controller.save_checkpoint(str(tmp_path / "controller.pkl"))
    restored.load_checkpoint(str(tmp_path / "controller.pkl"))
    for each in (controller, restored):
        assert each.kv_retrieve_meta(KEYS, "train").custom_meta == [{"seq_len": 3, "leaf_shape": b"\x00\x01"}] * 3


def test_values_that_rows_share_are_a_column_like_any_other() -> None:
    """As `verl_tree.trainer.rows.padding` writes the fields of equal rows that are no tensors."""
    value = {"calls": [(0, 1)]}
    rows = list_of_dict_to_tensordict([{"extra_fields": value} for _ in range(4)])
    shared = rows.empty()
    shared["extra_fields"] = NonTensorStack.from_list([NonTensorData(value)] * 4)
    assert extract_field_schema(shared) == extract_field_schema(rows)
    parts = [
        AsyncSimpleStorageManager._select_by_positions(columns.get("extra_fields"), [0, 3])
        for columns in (rows, shared)
    ]
    assert [type(part) for part in parts] == [NonTensorStack] * 2
    assert [part.tolist() for part in parts] == [[value] * 2] * 2


def test_the_queue_takes_a_column_as_it_was_unbound_once() -> None:
    """`rollout_hooks.capture.wire_storage.values_of`; the queue finds the same shapes, whether it unbinds or not."""
    rows = list_of_dict_to_tensordict([{"ids": torch.arange(num)} for num in (2, 3)])
    schema = extract_field_schema(rows)
    values = values_of(rows["ids"])
    assert extract_field_schema(rows) == schema
    assert rows["ids"].unbind() is values


def test_our_storage_manager_is_the_queues_in_a_process_that_imports_it() -> None:
    """`rollout_hooks.capture.wire_storage`: the registry takes the last class of a name, and units get the config."""
    assert StorageManagerFactory._registry["SimpleStorage"] is TreeStorageManager
    assert compose_config(["profile=cpu"]).transfer_queue.backend.SimpleStorage.trees is True


@pytest.mark.parametrize(
    "method",
    [
        "_group_by_hash(self, global_indexes)",
        "_request_with_retry(self, operation, target_storage_unit, request_context, make_request, max_attempts)",
        "_get_from_single_storage_unit(self, global_indexes, fields, target_storage_unit, socket)",
        "_put_to_single_storage_unit(self, global_indexes, storage_data, target_storage_unit, data_parser, socket)",
        "_pack_field_values(values)",
        "put_data(self, data, metadata, data_parser)",
        "get_data(self, metadata)",
    ],
)
def test_the_storage_manager_has_the_methods_that_trees_go_through(method: str) -> None:
    name, parameters = method.removesuffix(")").split("(")
    assert ", ".join(inspect.signature(getattr(AsyncSimpleStorageManager, name)).parameters) == parameters


def test_the_queues_own_coding_of_a_value_is_read_back_from_bytes() -> None:
    """Values that are no tensors are what the queue makes of them: it reads a tuple as a list."""
    value = {"calls": [(0, 1)], "pixels": torch.arange(6.0).view(2, 3)}
    read = serial_utils.decode([bytearray(bytes(frame)) for frame in serial_utils.encode(value)])
    assert read["calls"] == [[0, 1]]
    assert torch.equal(read["pixels"], value["pixels"])
