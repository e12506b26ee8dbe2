"""The rows of one training step, as the driver knows them: read from TransferQueue once, found by row key.

The trainer balances the ranks with their tokens, shows them to the estimators and logs their trees. verl reorders and
pads the rows in between, so a row is never found by its position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

import numpy as np
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta

from rollout_hooks.capture.rows import CALLS_FIELD
from verl_tree.cost.model import WorkProfile
from verl_tree.packing.counts import ForestCounts
from verl_tree.records import CallRun, StoredLeaf, StoredTree
from verl_tree.trainer.advantages import Call, Rows
from verl_tree.trainer.batching import RowAssignment, RowKey, group_rows, parse_row_key
from verl_tree.trainer.calls import calls_of_row
from verl_tree.tree import TokenForest
from verl_tree.tree.rows import trained_tokens

_SAMPLED = ("input_ids", "response_mask", "rm_scores")
_RESULTS = ("response_mask", "rollout_log_probs", "advantages")
_DETAILS = ("extra_fields", "reward_extra_info")  # verl puts the second into the first, uni-agent beside it


@dataclass(frozen=True, slots=True, eq=False)
class StepRow:
    """One trajectory of L tokens, the last R of them the response."""

    place: RowKey
    tag: Mapping[str, Any]  # of TransferQueue
    token_ids: np.ndarray  # (L,) int32
    response_mask: np.ndarray  # (R,) whether each token of the response is trained, as sampled
    token_rewards: np.ndarray | None  # (R,) float32; None if nothing was scored

    @property
    def is_trained(self) -> np.ndarray:
        """(L,) bool, the tokens that a loss reads."""
        mask_lens, row_lens = np.array([len(self.response_mask)]), np.array([len(self.token_ids)])
        return trained_tokens(self.response_mask, mask_lens=mask_lens, row_lens=row_lens)


@dataclass(frozen=True, slots=True, eq=False)
class StepRows:
    """The rows of a step, without padding rows: keyed as in TransferQueue, in the order of the batch that was read."""

    rows: Mapping[str, StepRow] = field(default_factory=dict)
    partition_id: str = "train"
    _forests: dict[tuple[str, ...], TokenForest] = field(default_factory=dict)

    @classmethod
    def fetch(cls, batch: KVBatchMeta) -> Self:
        """Read what is known of rows once they are sampled and scored."""
        assert batch.partition_id is not None
        if not batch.keys:
            return cls(partition_id=batch.partition_id)
        columns = _fetch(batch.keys, partition_id=batch.partition_id, names=_SAMPLED)
        return cls.from_columns(batch.keys, tags=batch.tags, columns=columns, partition_id=batch.partition_id)

    @classmethod
    def from_columns(
        cls, keys: Sequence[str], *, tags: Sequence[Mapping[str, Any]], columns: TensorDict, partition_id: str = "train"
    ) -> Self:
        """Make the rows from verl's columns `input_ids`, `response_mask` and, where known, `rm_scores`."""
        token_ids, masks = _arrays(columns, "input_ids"), _arrays(columns, "response_mask")
        rewards = _arrays(columns, "rm_scores") if "rm_scores" in columns else [None] * len(keys)
        rows = {
            key: StepRow(parse_row_key(key), tag, ids.astype(np.int32), mask, token_rewards)
            for key, tag, ids, mask, token_rewards in zip(keys, tags, token_ids, masks, rewards, strict=True)
        }
        return cls(rows, partition_id)

    def select(self, keys: Sequence[str]) -> Self:
        """Return the rows of these keys, in their order; forests that were made are kept."""
        return type(self)({key: self.rows[key] for key in keys}, self.partition_id, self._forests)

    def __or__(self, other: Self) -> Self:
        return type(self)({**self.rows, **other.rows}, other.partition_id, self._forests | other._forests)

    @property
    def keys(self) -> list[str]:
        """Row keys."""
        return list(self.rows)

    @property
    def groups(self) -> list[list[int]]:
        """Positions of each group's rows; see `group_rows`."""
        return group_rows(self.keys)

    @property
    def rewards(self) -> np.ndarray:
        """(R,) float64 reward of each row: the sum of its token rewards."""
        scores = [row.token_rewards for row in self.rows.values() if row.token_rewards is not None]
        assert len(scores) == len(self.rows), "verl scores rows before it balances them"
        return np.array([each.sum(dtype=np.float64) for each in scores])

    def announcement(self, *, weigh_sessions: bool) -> Rows:
        """Return what estimators are told."""
        rows = self.rows.values()
        response_lens = [len(row.response_mask) for row in rows]
        return Rows(self.keys, [row.token_ids for row in rows], response_lens, weigh_sessions)

    def fetch_steps(self) -> list[list[Call]]:
        """Read the calls of each row, as an agent's steps."""
        columns = _fetch(self.keys, partition_id=self.partition_id, names=("extra_fields",))
        extras = _objects(columns, "extra_fields", default={})
        return [
            calls_of_row(extra, is_trained=row.is_trained)
            for extra, row in zip(extras, self.rows.values(), strict=True)
        ]

    def profiles(self) -> list[WorkProfile]:
        """Return the work of each group; rows that no loss reads cost nothing, because tree engines leave them out."""
        return [self._profile(keys) for keys in self._group_keys()]

    def _profile(self, keys: Sequence[str]) -> WorkProfile:
        masks = {key: self.rows[key].is_trained for key in keys}
        read = [key for key in keys if masks[key].any()]
        profile = WorkProfile.from_forest(self._forest(read), trained=[masks[key] for key in read])
        if len(read) == len(keys):
            return profile
        return profile.with_idle_leaves(np.flatnonzero([masks[key].any() for key in keys]), num_leaves=len(keys))

    def flat_counts(self, assignment: RowAssignment) -> ForestCounts:
        """Count what verl's own engine computes: every row in full, although the rows of a mini-batch share tokens.

        The tree tokens of the counts are what a tree engine would find in the same mini-batches.
        """
        counts, keys = ForestCounts(), self.keys
        order = iter(assignment.row_order)
        for num_rows in (num_rows for rank_rows in assignment.plan.rows for num_rows in rank_rows):
            # Padding rows have the indices after the last row.
            members = [keys[row] for row in islice(order, num_rows) if row < len(keys)]
            if members:
                forest = TokenForest.from_sequences([self.rows[key].token_ids for key in members])
                counts = counts + ForestCounts(
                    num_flat_tokens=forest.num_flat_tokens,
                    num_tree_tokens=forest.num_tokens,
                    num_packed_tokens=forest.num_flat_tokens,
                    num_nodes=forest.num_nodes,
                    num_leaves=forest.num_leaves,
                    depth=forest.depth,
                )
        return counts

    def fetch_calls(self) -> dict[str, tuple[CallRun, ...]]:
        """Read which calls sampled each row, by row key; a row that was not recorded has none."""
        if not self.rows:
            return {}
        columns = _fetch(self.keys, partition_id=self.partition_id, names=("extra_fields",))
        return {
            key: _calls(each)
            for key, each in zip(self.keys, _objects(columns, "extra_fields", default={}), strict=True)
        }

    def fetch_trees(self, *, step: int) -> list[StoredTree]:
        """Read what has become known since the rows were sampled, and return their trees; see `trees`."""
        if not self.rows:
            return []
        columns = _fetch(self.keys, partition_id=self.partition_id, names=(*_RESULTS, *_DETAILS))
        return self.trees(step=step, columns=columns)

    def trees(self, *, step: int, columns: TensorDict) -> list[StoredTree]:
        """Return the trees that are stored and shown, one per group in the order of uids, leaves by session and leaf.

        `columns` are verl's columns of these rows: `response_mask`, from which rollout correction may have taken tokens
        since, and where known `rollout_log_probs`, `advantages`, `extra_fields` and `reward_extra_info`.
        """
        names = [name for name in _RESULTS if name in columns]
        values = {name: _arrays(columns, name) for name in names}
        extras = _objects(columns, "extra_fields", default={})
        infos = _objects(columns, "reward_extra_info", default=None)
        leaves = {
            key: _leaf(
                row,
                results={name: values[name][index] for name in names},
                extra={"reward_extra_info": infos[index]} | extras[index],
            )
            for index, (key, row) in enumerate(self.rows.items())
        }
        return [
            StoredTree(step, self.rows[keys[0]].place.uid, tuple(leaves[key] for key in keys), self._forest(keys))
            for keys in self._group_keys()
        ]

    def _group_keys(self) -> list[list[str]]:
        keys = self.keys
        return [[keys[row] for row in group] for group in self.groups]

    def _forest(self, keys: Sequence[str]) -> TokenForest:
        """Return the forest of a group, made once."""
        members = tuple(keys)
        if members not in self._forests:
            self._forests[members] = TokenForest.from_sequences([self.rows[key].token_ids for key in members])
        return self._forests[members]


def _fetch(keys: Sequence[str], *, partition_id: str, names: Sequence[str]) -> TensorDict:
    """Read columns; those that do not exist yet are left out."""
    return tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=list(names))


def _arrays(columns: TensorDict, name: str) -> list[np.ndarray]:
    return [row.numpy() for row in columns[name].unbind(dim=0)]


def _calls(extra: Mapping[str, Any]) -> tuple[CallRun, ...]:
    return tuple(CallRun(*run) for run in extra.get(CALLS_FIELD, ()))


def _objects(columns: TensorDict, name: str, *, default: Any) -> list[Any]:
    """Return the objects of a column; the default for each row if there is no such column."""
    return columns.get(name).tolist() if name in columns else [default] * len(columns)


def _leaf(row: StepRow, *, results: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> StoredLeaf:
    is_trained = replace(row, response_mask=results["response_mask"]).is_trained
    prompt_len = len(row.token_ids) - len(row.response_mask)
    calls = _calls(extra)
    log_probs = np.full(len(row.token_ids), np.nan, dtype=np.float32)
    if "rollout_log_probs" in results:
        # verl writes 0 for tokens that were only read, but a sampled token may have a log-prob of 0, too.
        was_sampled = is_trained.copy()
        for run in calls:
            was_sampled[max(run.start, prompt_len) : run.end] = True
        values = results["rollout_log_probs"]
        log_probs[prompt_len:] = np.where(was_sampled[prompt_len:] | (values != 0), values, np.nan)
    return StoredLeaf(
        session=row.place.session,
        leaf=row.place.leaf,
        token_ids=row.token_ids,
        prompt_len=prompt_len,
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=row.token_rewards,
        token_advantages=results.get("advantages"),
        reward_extra_info=extra.get("reward_extra_info"),
        min_global_steps=row.tag.get("min_global_steps"),
        max_global_steps=row.tag.get("max_global_steps"),
        calls=calls,
    )
