"""What is said of the nodes of a cluster; tests/long/test_machines.py and tests/faults/test_nodes.py have two."""

import pytest

from verl_tree.launch.command.composition import compose_config
from verl_tree.launch.run.nodes import _find_own_folders, _find_small_nodes

NODE = {"GPU": 2.0, "CPU": 6.0}


@pytest.mark.parametrize(
    ("sizes", "num_fitting"),
    [
        ([NODE, NODE], None),
        ([{"GPU": 4.0, "CPU": 12.0}], None),  # two of verl's nodes on one of Ray's
        ([NODE, {"CPU": 64.0}], 1),
        ([NODE, {"GPU": 2.0, "CPU": 5.0}], 1),
        ([{"GPU": 4.0}], 0),
    ],
)
def test_a_cluster_without_room_is_refused(sizes: list[dict[str, float]], num_fitting: int | None) -> None:
    config = compose_config(["profile=cpu", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"])
    told = [each.message for each in _find_small_nodes(config, sizes)]
    if num_fitting is None:
        assert told == []
    else:
        (message,) = told
        assert message.startswith(f"trainer.nnodes=2: Ray has room for {num_fitting} with 2 GPU and 6 CPU each,")


@pytest.mark.parametrize(
    ("options", "is_near", "expected"),
    [
        ((), True, []),
        ((), False, [("where ranks save; a start needs the same nodes", True)]),
        (("model_engine=megatron",), True, []),
        (("model_engine=megatron",), False, [("Megatron's ranks save and load together", False)]),
        (("trainer.v1.trainer_mode=separate_async",), True, [("processes of TransferQueue, anywhere, save", False)]),
        (("trainer.v1.trainer_mode=colocate_async",), False, [("processes of TransferQueue, anywhere, save", False)]),
    ],
)
def test_folders_of_checkpoints_that_nodes_do_not_share(
    options: tuple[str, ...], is_near: bool, expected: list[tuple[str, bool]]
) -> None:
    config = compose_config(["profile=cpu", "trainer.default_local_dir=/runs/mine", *options])
    found = list(_find_own_folders(config, ["10.0.0.2", "10.0.0.1"], is_near=is_near))
    assert len(found) == len(expected)
    for finding, (words, is_warning) in zip(found, expected, strict=True):
        assert finding.key == "trainer.default_local_dir"
        assert words in finding.message
        assert "nodes 10.0.0.1, 10.0.0.2" in finding.message
        assert finding.is_warning == is_warning
