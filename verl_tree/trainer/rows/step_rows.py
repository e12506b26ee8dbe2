"""The rows of one training step, as the driver knows them: by row key, with their shapes instead of their tokens.

The workers that wrote the rows of a prompt tagged each with its shape: its place in the forest of its group
(`LEAF_SHAPE`). That is enough to balance the ranks, to find the nodes of advantages and to report rewards. Of rows that
others wrote the driver reads the tokens, and finds the shapes itself.

verl reorders and pads the rows in between, so a row is never found by its position.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Self

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from rollout_hooks.capture.image_runs import IMAGES_FIELD, tree_keys
from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE, LEAF_SHAPE_TAG, MAX_REWARD, WrittenRow, leaf_shapes
from rollout_hooks.capture.roles import role_in
from verl_tree.cost.model import WorkProfile
from verl_tree.trainer.advantages import Rows
from verl_tree.trainer.row_keys import group_rows, parse_row_key
from verl_tree.tree.shape import ForestShape

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepRows:
    """The rows of a step, without padding rows, in the order of the batch that was read."""

    keys: list[str] = field(default_factory=list)
    shapes: np.ndarray = field(default_factory=lambda: np.zeros(0, LEAF_SHAPE))  # (R,) LEAF_SHAPE
    partition_id: str = "train"
    roles: dict[str, str] = field(default_factory=dict)  # by key; rows without a role are not in it

    @classmethod
    def fetch(cls, batch: KVBatchMeta) -> Self:
        """Read what is known of rows once they are sampled and scored: nothing but their tags, if these say it."""
        assert batch.partition_id is not None
        keys, partition_id = batch.keys, batch.partition_id
        if not keys:
            return cls(partition_id=partition_id)
        shapes = _tagged_shapes(batch.tags)
        named = ((key, role_in(tag, of=f"row {key}")) for key, tag in zip(keys, batch.tags, strict=True))
        roles = {key: role for key, role in named if role is not None}
        rows = None if shapes is None else cls(keys, shapes, partition_id, roles)
        if rows is None or not rows._is_complete():
            _tell_missing_shapes()
            columns = fetch(keys, ("input_ids", "response_mask", "extra_fields"), partition_id=partition_id)
            _refuse_unknown_images(keys, columns, partition_id=partition_id)
            rows = cls(keys, shapes_of_columns(keys, columns), partition_id, roles)
        if np.isnan(rows.rewards).any():
            columns = fetch(keys, ("rm_scores",), partition_id=partition_id)
            assert "rm_scores" in columns, "row_check refuses rows without rewards"
            rows.shapes["reward"] = [scores.sum(dtype=np.float64) for scores in arrays(columns, "rm_scores")]
        # Not the other way round, because NaN is not larger than anything.
        for row in np.flatnonzero(~(np.abs(rows.rewards) <= MAX_REWARD)).tolist():
            raise ValueError(
                f"row {keys[row]}: the reward is {rows.rewards[row]}; whoever scores rows gives finite numbers, "
                "also in float32 (a reward model, reward.custom_reward_function, or who writes rm_scores)"
            )
        return rows

    def select(self, keys: Sequence[str]) -> Self:
        """Return the rows of these keys, in their order."""
        place = {key: row for row, key in enumerate(self.keys)}
        return self.take([place[key] for key in keys])

    def take(self, rows: Sequence[int]) -> Self:
        """Return the rows at these places, in their order."""
        keys = [self.keys[row] for row in rows]
        roles = {key: self.roles[key] for key in keys if key in self.roles}
        return type(self)(keys, self.shapes[list(rows)], self.partition_id, roles)

    def __or__(self, other: Self) -> Self:
        shapes = np.concatenate([self.shapes, other.shapes])
        return type(self)(self.keys + other.keys, shapes, other.partition_id, self.roles | other.roles)

    @cached_property
    def groups(self) -> list[list[int]]:
        """Positions of each group's rows; see `group_rows`."""
        return group_rows(self.keys)

    def _is_complete(self) -> bool:
        """Return whether no row is missing between those of a group: what its neighbours share is then not known."""
        ranks = self.shapes["rank"]
        return all(np.array_equal(np.sort(ranks[group]), np.arange(len(group))) for group in self.groups)

    @property
    def rewards(self) -> np.ndarray:
        """(R,) float64 reward of each row: the sum of its token rewards."""
        return self.shapes["reward"]

    def role_weights(self, by_role: Mapping[str, float]) -> list[float]:
        """Return what the role of each row weighs (`tree.role_weight`), (R,); 1 where it is not named."""
        return [float(by_role.get(self.roles.get(key, ""), 1.0)) for key in self.keys]

    def announcement(self, *, weigh_sessions: bool) -> Rows:
        """Return what estimators are told."""
        shape, response_lens = _forest_shape(self.shapes, groups=self.groups), self.shapes["response_len"].tolist()
        return Rows(self.keys, shape, response_lens, weigh_sessions, roles=self.roles)

    def of_mixed_groups(self) -> np.ndarray:
        """Find the rows that are compared with another reward, in their prompt or in their role in it, (R,) bool.

        Estimators give 0 to a group of equal rewards, but its reward to a row that is alone.
        """
        groups = [(parse_row_key(key).uid, self.roles.get(key)) for key in self.keys]
        rewards: dict[tuple[str, str | None], list[float]] = defaultdict(list)
        for group, reward in zip(groups, self.rewards.tolist(), strict=True):
            rewards[group].append(reward)
        is_mixed = {group: len(set(each)) > 1 or (len(each) == 1 and any(each)) for group, each in rewards.items()}
        return np.array([is_mixed[group] for group in groups], dtype=bool)

    def profiles(self, *, sharing: str = "full", live: np.ndarray | None = None) -> list[WorkProfile]:
        """Return the work of each group; rows that no loss reads cost nothing, because tree engines leave them out.

        `sharing` is the option `tree.sharing`. With `prompt` there are no images. Rows that are not `live`, (R,), cost
        nothing either; None is none of these.
        """
        sizes = [len(group) for group in self.groups]
        rows = [row for group in self.groups for row in group]
        shapes = self.shapes[rows]
        bounds = np.cumsum([0, *sizes])
        groups = [range(start, start + size) for start, size in zip(bounds.tolist(), sizes, strict=False)]
        forest = _forest_shape(shapes, groups=groups)
        is_read = shapes["num_trained"] > 0
        if live is not None:
            is_read &= live[rows]
        read = forest.keep(is_read[forest.order])
        # What is trained is in the responses.
        of_new_scored = "num_new_trained"
        if sharing == "prompt":
            read = read.share_at_most((shapes["num_tokens"] - shapes["response_len"]).astype(np.int64))
            of_new_scored = "num_trained"
        in_order = shapes[read.order]
        profile = WorkProfile.from_shape(
            read,
            path_scored=in_order["num_trained"].astype(np.int64),
            new_scored=in_order[of_new_scored].astype(np.int64),
            path_features=in_order["num_image_tokens"].astype(np.int64),
            new_features=in_order["num_new_image_tokens"].astype(np.int64),
        )
        return profile.split(sizes)


def shapes_of_columns(keys: Sequence[str], columns: TensorDict) -> np.ndarray:
    """Find the shapes of rows from verl's columns: (R,) `LEAF_SHAPE`.

    They are `input_ids`, `response_mask`, and `extra_fields` of rows with images.
    """
    rows = [
        WrittenRow.of(row_keys, response_mask=mask, reward=None)
        for row_keys, mask in zip(keys_of_columns(columns), arrays(columns, "response_mask"), strict=True)
    ]
    shapes = np.zeros(len(rows), LEAF_SHAPE)
    for group in group_rows(keys):
        shapes[group] = leaf_shapes([rows[row] for row in group])
    return shapes


def keys_of_columns(columns: TensorDict) -> list[np.ndarray]:
    """Return the keys of each row (`tree_keys`) from the columns `input_ids` and, with images, `extra_fields`."""
    extras = objects(columns, "extra_fields", default={})
    return [tree_keys(ids, extra) for ids, extra in zip(arrays(columns, "input_ids"), extras, strict=True)]


def _refuse_unknown_images(keys: Sequence[str], columns: TensorDict, *, partition_id: str) -> None:
    """Refuse rows with media that nobody has told where they stand: rows of different images would count as equal."""
    extras = objects(columns, "extra_fields", default={})
    untold = [key for key, extra in zip(keys, extras, strict=True) if IMAGES_FIELD not in extra]
    if not untold:
        return
    # Where no row has the column, engines refuse image tokens without pixels.
    media = fetch_objects(untold, "multi_modal_inputs", default={}, partition_id=partition_id)
    for key, inputs in zip(untold, media, strict=True):
        if inputs:
            raise ValueError(
                f"row {key} has multi_modal_inputs and no {IMAGES_FIELD!r} in extra_fields: whoever writes rows with "
                "images notes them (rollout_hooks.capture.image_runs), as our agent loop workers do; or train text"
            )


def fetch(keys: Sequence[str], names: Sequence[str], *, partition_id: str) -> TensorDict:
    """Read columns from TransferQueue; those that not all rows have are left out."""
    return tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=list(names))


def arrays(columns: TensorDict, name: str) -> list[np.ndarray]:
    """Return a column as one array per row."""
    return [row.numpy() for row in columns[name].unbind(dim=0)]


def objects(columns: TensorDict, name: str, *, default: Any) -> list[Any]:
    """Return a column as one object per row; the default for each row if there is no such column."""
    return columns.get(name).tolist() if name in columns else [default] * len(columns)


def fetch_objects(keys: Sequence[str], name: str, *, default: Any, partition_id: str) -> list[Any]:
    """Read a column as one object per row; the default for each row if there is no such column."""
    columns = fetch(keys, (name,), partition_id=partition_id)
    # TransferQueue returns no rows at all where no column is found.
    return objects(columns, name, default=default) if name in columns else [default] * len(keys)


def _tagged_shapes(tags: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    if any(LEAF_SHAPE_TAG not in tag for tag in tags):
        return None
    # A copy, because what frombuffer returns is read-only.
    return np.frombuffer(b"".join(tag[LEAF_SHAPE_TAG] for tag in tags), LEAF_SHAPE).copy()


@cache
def _tell_missing_shapes() -> None:
    logger.warning(
        "rows without the tag %r, or without the rows between them (tree.rows=longest): the driver reads the tokens of "
        "every step to balance the ranks. Our agent loop workers write the tag; see docs/scale.md",
        LEAF_SHAPE_TAG,
    )


def _forest_shape(shapes: np.ndarray, *, groups: Sequence[Sequence[int]]) -> ForestShape:
    """Return the shape of the forest of all rows, of which those of different groups share nothing."""
    group_of = np.empty(len(shapes), dtype=np.int64)
    for number, rows in enumerate(groups):
        group_of[rows] = number
    order = np.lexsort((shapes["rank"], group_of))
    return ForestShape(
        order=order,
        sequence_lens=shapes["num_tokens"].astype(np.int64),
        lcp=shapes["num_shared"][order].astype(np.int64),
    )
