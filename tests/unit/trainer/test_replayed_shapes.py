"""The shapes of rows that were stored and are replayed: as they were, or found anew where the group is another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.skip.rollout_skip import RolloutTqSkip
from verl.utils.tensordict_utils import index_select_tensor_dict, list_of_dict_to_tensordict

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG, WrittenRow, leaf_shapes
from verl_tree.trainer.rows import step_rows as step_rows_module
from verl_tree.trainer.rows.replay import TreeRolloutSkip
from verl_tree.trainer.rows.step_rows import StepRows

# Two prompts of two sessions. In DFS order: a_0_1, a_1_0, a_0_0 and b_0_0, b_1_0.
TOKENS = {"a_0_0": [1, 2, 9], "a_0_1": [1, 2, 3], "a_1_0": [1, 2, 3, 7], "b_0_0": [4, 5], "b_1_0": [4, 6]}
KEYS = ["b_1_0", "a_1_0", "a_0_1", "b_0_0", "a_0_0"]  # in the order in which the rows were sampled


class Store:
    """The rows that were put, by key; prompts have tags only."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[TensorDict, dict[str, Any]]] = {}
        self.num_fetched = 0

    def put(self, *, keys: Sequence[str], partition_id: str, tags: Sequence[dict], fields: Any = None) -> None:
        assert partition_id == "train"
        if fields is not None:
            for index, (key, tag) in enumerate(zip(keys, tags, strict=True)):
                self.rows[key] = (index_select_tensor_dict(fields, [index])[0], tag)

    def fetch(self, keys: Sequence[str], names: Sequence[str], **_: Any) -> TensorDict:
        self.num_fetched += len(keys)
        known = [name for name in names if name in self.rows[keys[0]][0]]  # TransferQueue leaves out what no row has
        return list_of_dict_to_tensordict([{name: self.rows[key][0][name] for name in known} for key in keys])

    def batch(self) -> KVBatchMeta:
        return KVBatchMeta(partition_id="train", keys=list(self.rows), tags=[tag for _, tag in self.rows.values()])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Put a store in the place of TransferQueue."""
    store = Store()
    monkeypatch.setattr(tq, "kv_batch_put", store.put)
    monkeypatch.setattr(step_rows_module, "fetch", store.fetch)
    return store


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Store the rows of step 3 as `skip.rollout_tq` does, with the tags of our workers."""
    tags: dict[str, dict[str, Any]] = {}
    for uid in "ab":
        keys = [key for key in sorted(TOKENS) if key.startswith(uid)]
        written = [WrittenRow.of(TOKENS[key], response_mask=[1] * (len(TOKENS[key]) - 1), reward=0.5) for key in keys]
        for key, shape in zip(keys, leaf_shapes(written), strict=True):
            tags[key] = {"global_steps": 3, "min_global_steps": 2, "max_global_steps": 2}
            tags[key][LEAF_SHAPE_TAG] = shape.tobytes()
    rows = [{"input_ids": torch.tensor(TOKENS[key]), "response_mask": torch.ones(len(TOKENS[key]) - 1)} for key in KEYS]
    payload = {"tensordict": list_of_dict_to_tensordict(rows), "tags": [tags[key] for key in KEYS], "keys": KEYS}
    torch.save(payload | {"global_steps": 3}, tmp_path / "tq_batch.pt")
    return tmp_path


def load(skip_class: type, folder: Path, *, n: int) -> None:
    """Replay what is stored at step 3 as the rollouts of step 5."""
    skip = object.__new__(skip_class)
    skip.parameter_sync_step, skip.tq_batch_name, skip.print_mark = 1, "tq_batch.pt", ""
    skip._resolve_load_step_v1 = lambda step: step
    skip._get_v1_inner_dir = lambda step, inner: folder  # noqa: ARG005
    skip.load_dump_data(step=5, new_prompt_uids=["p", "q"], n=n, global_steps=5)


def found_anew(store: Store) -> np.ndarray:
    """Return the shapes of the rows in the store, found from their tokens."""
    keys = list(store.rows)
    shapes = step_rows_module.shapes_of_columns(keys, store.fetch(keys, ["input_ids", "response_mask"]))
    store.num_fetched = 0
    return shapes


def test_our_replay_keeps_the_shapes_and_reads_no_tokens(store: Store, stored: Path) -> None:
    load(TreeRolloutSkip, stored, n=2)
    expected = found_anew(store)
    rows = StepRows.fetch(store.batch())
    assert rows.keys == sorted(TOKENS)
    assert store.num_fetched == 0
    assert rows.rewards.tolist() == [0.5] * 5
    for name in ("rank", "num_shared", "num_tokens", "response_len", "num_trained", "num_new_trained"):
        assert rows.shapes[name].tolist() == expected[name].tolist(), name
    assert {tag["min_global_steps"] for tag in store.batch().tags} == {4}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_what_verls_own_replay_drops_or_repeats_gives_no_wrong_shape(store: Store, stored: Path, n: int) -> None:
    """It deals n rows to every prompt, in the order above: the first n, and from the first again.

    With two, the last of "a" in DFS order is lost, and what the others share is still known.
    """
    load(RolloutTqSkip, stored, n=n)
    assert len(store.rows) == 2 * n
    expected = found_anew(store)
    # What is found in tokens has no reward; a column is read for it.
    for row, _ in store.rows.values():
        row["rm_scores"] = torch.tensor([0.5])
    rows = StepRows.fetch(store.batch())
    profiles, others = rows.profiles(), StepRows(rows.keys, expected).profiles()
    assert [each.range_work(0, n) for each in profiles] == [each.range_work(0, n) for each in others]
    assert rows.rewards.tolist() == [0.5] * 2 * n
    assert (store.num_fetched == 0) == (n == 2)
