"""What the driver reads of rows beyond their shapes, where someone asks for it: calls, trees to show, flat counts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from rollout_hooks.capture.image_runs import IMAGES_FIELD, THUMBNAILS_FIELD
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.rows import CALLS_FIELD, LEFT_OUT_FIELD, LeftOutLeaf
from verl_tree.packing.counts import ForestCounts
from verl_tree.records import LEFT_OUT, CallRun, ImageRun, StoredLeaf, StoredTree
from verl_tree.trainer.advantages import Call
from verl_tree.trainer.row_keys import group_rows, parse_row_key
from verl_tree.trainer.rows.batching import RowAssignment
from verl_tree.trainer.rows.calls import calls_of_row, recorded_calls
from verl_tree.trainer.rows.step_rows import StepRows, arrays, fetch, fetch_objects, keys_of_columns, objects
from verl_tree.tree import TokenForest
from verl_tree.tree.rows import trained_tokens

_VALUES = ("input_ids", "response_mask", "rm_scores", "rollout_log_probs", "advantages")
# verl puts the reward's info into the extra fields, uni-agent beside them.
_DETAILS = ("extra_fields", "reward_extra_info", THUMBNAILS_FIELD)


def fetch_calls(rows: StepRows) -> dict[str, tuple[CallRun, ...]]:
    """Read which calls sampled each row, by row key; a row that was not recorded has none."""
    if not rows.keys:
        return {}
    extras = fetch_objects(rows.keys, "extra_fields", default={}, partition_id=rows.partition_id)
    return {key: recorded_calls(extra) for key, extra in zip(rows.keys, extras, strict=True)}


def fetch_steps(rows: StepRows) -> list[list[Call]]:
    """Read the calls of each row, as an agent's steps."""
    columns = fetch(rows.keys, ("extra_fields", "response_mask"), partition_id=rows.partition_id)
    return [
        calls_of_row(extra, is_trained=_is_trained(mask, num_tokens=num_tokens))
        for extra, mask, num_tokens in zip(
            objects(columns, "extra_fields", default={}),
            arrays(columns, "response_mask"),
            rows.shapes["num_tokens"].tolist(),
            strict=True,
        )
    ]


def fetch_cells(rows: StepRows, assignment: RowAssignment) -> Iterator[list[np.ndarray]]:
    """Read the keys of the rows that a loss reads, one mini-batch of a rank after another."""
    for members in cells_of(rows.keys, assignment, is_read=rows.shapes["num_trained"] > 0):
        columns = fetch(members, ("input_ids", "extra_fields"), partition_id=rows.partition_id)
        yield keys_of_columns(columns)


def cells_of(keys: Sequence[str], assignment: RowAssignment, *, is_read: np.ndarray) -> Iterator[list[str]]:
    """Yield the keys of the rows that a loss reads, `is_read` (R,), in each mini-batch of a rank that has such rows."""
    for cell in chain.from_iterable(assignment.cells()):
        members = [keys[row] for row in cell if is_read[row]]
        if members:
            yield members


def flat_counts(cells: Iterable[Sequence[np.ndarray]]) -> ForestCounts:
    """Count what verl's own engine computes: every row in full, although the rows of a mini-batch share tokens.

    `cells` has the keys of the rows of each rank and mini-batch, of those that a loss reads: a tree engine counts no
    others. The tree tokens of the counts are what it would find in them.
    """
    counts = ForestCounts()
    for sequences in cells:
        forest = TokenForest.from_sequences(sequences)
        counts = counts + ForestCounts(
            num_flat_tokens=forest.num_flat_tokens,
            num_tree_tokens=forest.num_tokens,
            num_packed_tokens=forest.num_flat_tokens,
            num_nodes=forest.num_nodes,
            num_leaves=forest.num_leaves,
            depth=forest.depth,
        )
    return counts


def fetch_trees(batch: KVBatchMeta, *, step: int, max_trees: int | None = None) -> list[StoredTree]:
    """Read the trees of a batch without padding rows; see `trees_of`. None reads all."""
    keys = [batch.keys[row] for group in group_rows(batch.keys)[:max_trees] for row in group]
    if not keys:
        return []
    assert batch.partition_id is not None
    tags = batch.select_keys(keys).tags
    columns = fetch(keys, (*_VALUES, *_DETAILS), partition_id=batch.partition_id)
    return trees_of(keys, tags=tags, columns=columns, step=step)


def trees_of(
    keys: Sequence[str], *, tags: Sequence[Mapping[str, Any]], columns: TensorDict, step: int
) -> list[StoredTree]:
    """Return the trees of rows, one per group in the order of uids, leaves by session and leaf.

    `columns` are verl's columns `input_ids` and `response_mask` (from which rollout correction may have taken tokens)
    and where known `rm_scores`, `rollout_log_probs`, `advantages`, `extra_fields`, `reward_extra_info` and
    `image_thumbnails`.
    """
    values = {name: arrays(columns, name) for name in _VALUES if name in columns}
    extras = objects(columns, "extra_fields", default={})
    infos = objects(columns, "reward_extra_info", default=None)
    thumbnails = objects(columns, THUMBNAILS_FIELD, default={})
    leaves = [
        _leaf(
            key,
            tag=tags[row],
            values={name: column[row] for name, column in values.items()},
            extra={"reward_extra_info": infos[row]} | extras[row],
        )
        for row, key in enumerate(keys)
    ]
    row_keys = keys_of_columns(columns)
    return [
        StoredTree(
            step,
            parse_row_key(keys[group[0]]).uid,
            tuple(leaves[row] for row in group),
            # Rows that show different images share no node behind them, although their token ids may be equal.
            known_forest=TokenForest.from_sequences([row_keys[row] for row in group]),
            thumbnails={number: file for row in group for number, file in thumbnails[row].items()},
            left_out=tuple(leaf for row in group for leaf in _left_out(keys[row], extras[row])),
        )
        for group in group_rows(keys)
    ]


def _left_out(key: str, extra: Mapping[str, Any]) -> list[StoredLeaf]:
    """Return the leaves that made no row, numbered on from the last row of their session, which tells of them."""
    place = parse_row_key(key)
    return [
        StoredLeaf(
            session=place.session,
            leaf=place.leaf + number,
            token_ids=np.asarray(each.token_ids),
            prompt_len=each.prompt_len,
            is_trained=np.zeros(len(each.token_ids), dtype=bool),
            log_probs=np.full(len(each.token_ids), np.nan),
            reward_extra_info={LEFT_OUT: each.reason},
            calls=recorded_calls({CALLS_FIELD: each.sampled_by}),
            role=each.role,
        )
        for number, each in enumerate((LeftOutLeaf(*values) for values in extra.get(LEFT_OUT_FIELD, ())), 1)
    ]


def _leaf(
    key: str, *, tag: Mapping[str, Any], values: Mapping[str, np.ndarray], extra: Mapping[str, Any]
) -> StoredLeaf:
    place = parse_row_key(key)
    token_ids, mask = values["input_ids"].astype(np.int32), values["response_mask"]
    is_trained = _is_trained(mask, num_tokens=len(token_ids))
    prompt_len = len(token_ids) - len(mask)
    calls = recorded_calls(extra)
    log_probs = np.full(len(token_ids), np.nan, dtype=np.float32)
    if "rollout_log_probs" in values:
        # verl writes 0 for tokens that were only read, but a sampled token may have a log-prob of 0, too.
        was_sampled = is_trained.copy()
        for run in calls:
            was_sampled[max(run.start, prompt_len) : run.end] = True
        given = values["rollout_log_probs"]
        log_probs[prompt_len:] = np.where(was_sampled[prompt_len:] | (given != 0), given, np.nan)
    return StoredLeaf(
        session=place.session,
        leaf=place.leaf,
        token_ids=token_ids,
        prompt_len=prompt_len,
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=values.get("rm_scores"),
        token_advantages=values.get("advantages"),
        reward_extra_info=extra.get("reward_extra_info"),
        min_global_steps=tag.get("min_global_steps"),
        max_global_steps=tag.get("max_global_steps"),
        calls=calls,
        images=tuple(ImageRun(*run) for run in extra.get(IMAGES_FIELD, ())),
        role=tag.get(ROLE),
    )


def _is_trained(response_mask: np.ndarray, *, num_tokens: int) -> np.ndarray:
    """Return which of a row's tokens a loss reads, (num_tokens,) bool."""
    return trained_tokens(response_mask, mask_lens=np.array([len(response_mask)]), row_lens=np.array([num_tokens]))
