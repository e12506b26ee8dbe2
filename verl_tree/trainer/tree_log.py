"""The trees of a run, kept and shown: parquet files of every step, and now and then pages of a few trees.

- `tree.dump_dir`: every training step becomes `step_000010.parquet` there once its advantages are known, every
  validation `val_000010.parquet` (`stored_trees`).
- `tree.show_every`: validations at least that many steps apart, and the run's last, give pages of the trees of
  NUM_SHOWN of their prompts, always the same ones; a run that never validates gives pages of training trees. They lie
  in the dump folder, or in `<trainer.default_local_dir>/trees`, and go to wandb where that is a logger (`tree_page`).

Rows are read from TransferQueue, after padding rows were left out. What verl does not know at the time is not in a
tree: advantages in validation, and there also rewards of a reward model that shares the actor's resource pool.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollout_hooks.capture.rows import CALLS_FIELD
from verl_tree.records import CallRun, StoredLeaf, StoredTree, write_trees
from verl_tree.records.page import tree_page
from verl_tree.trainer.batching import group_rows, parse_row_key

NUM_SHOWN = 4
"""Trees of a step that become pages: a page of 50,000 tokens is about a third of a megabyte, in every wandb table."""

_FIELDS = ("prompts", "input_ids", "response_mask", "rm_scores", "rollout_log_probs", "advantages", "extra_fields")


@dataclass(slots=True)
class TreeLog:
    """Writes and shows the trees of one run.

    Attributes:
        dump_dir: Folder of stored trees; None stores none.
        show_every: Fewest steps between two shows; 0 shows nothing.
        page_dir: Folder of the pages.
        last_shown: Step of the last show.
    """

    dump_dir: Path | None
    show_every: int
    page_dir: Path
    last_shown: int | None = None

    @classmethod
    def from_config(cls, config: DictConfig) -> Self:
        """Reads `tree.dump_dir`, `tree.show_every` and `trainer.default_local_dir`."""
        dump_dir = None if config.tree.dump_dir is None else Path(config.tree.dump_dir)
        page_dir = dump_dir or Path(config.trainer.default_local_dir) / "trees"
        return cls(dump_dir=dump_dir, show_every=config.tree.show_every, page_dir=page_dir)

    def log_step(self, trainer: PPOTrainer, rows: KVBatchMeta) -> None:
        """Keeps and shows the trees of a training step whose rows are still stored.

        Args:
            trainer: The run.
            rows: The step's rows without padding.
        """
        shows = trainer.config.trainer.test_freq <= 0 and self._is_due(trainer)
        if self.dump_dir is not None or shows:
            self._log(trainer, fetch_trees(rows, step=trainer.global_steps), name="step", shows=shows)

    @contextmanager
    def watch_validation(self, trainer: PPOTrainer) -> Iterator[None]:
        """Keeps and shows the trees of a validation that runs inside the context.

        verl clears each batch of rows before it samples the next one, so the trees are taken as they are sampled.
        """
        shows = self._is_due(trainer)
        if self.dump_dir is None and not shows:
            yield
            return
        buffer = trainer.replay_buffer
        watched = _WatchedBuffer(buffer, step=trainer.global_steps)
        trainer.replay_buffer = watched
        try:
            yield
        finally:
            trainer.replay_buffer = buffer
        # Prompts are drawn in any order and have new uids each time; their tokens tell which is which.
        by_prompt = sorted(watched.trees, key=lambda tree: tree.leaves[0].token_ids.tobytes())
        self._log(trainer, by_prompt, name="val", shows=shows)

    def _is_due(self, trainer: PPOTrainer) -> bool:
        step = trainer.global_steps
        is_last = step >= trainer.total_training_steps
        return self.show_every > 0 and (self.last_shown is None or is_last or step - self.last_shown >= self.show_every)

    def _log(self, trainer: PPOTrainer, trees: Sequence[StoredTree], *, name: str, shows: bool) -> None:
        step = trainer.global_steps
        if self.dump_dir is not None:
            write_trees(self.dump_dir / f"{name}_{step:06d}.parquet", trees)
        if not shows:
            return
        self.last_shown = step
        self.page_dir.mkdir(parents=True, exist_ok=True)
        pages = [tree_page(tree, trainer.tokenizer) for tree in trees[:NUM_SHOWN]]
        for number, page in enumerate(pages):
            (self.page_dir / f"{name}_{step:06d}_{number}.html").write_text(page, encoding="utf-8")
        wandb = trainer.logger.logger.get("wandb")
        if wandb is not None:
            table = wandb.Table(columns=["step", "uid", "leaves", "tree tokens", "POR", "mean reward", "tree"])
            for tree, page in zip(trees, pages, strict=False):
                # inject=False: no style sheet of wandb's own, which the page's security policy would refuse.
                table.add_data(step, tree.uid, *_summary(tree), wandb.Html(page, inject=False))
            wandb.log(data={f"{name}/trees": table}, step=step)


class _WatchedBuffer:
    """Stands in for the replay buffer during a validation and takes the trees of what is sampled."""

    def __init__(self, buffer: ReplayBuffer, *, step: int) -> None:
        self._buffer, self._step = buffer, step
        self.trees: list[StoredTree] = []

    def sample(self, **options: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """The buffer's own sample."""
        batch, metrics = self._buffer.sample(**options)
        self.trees += fetch_trees(batch, step=self._step)
        return batch, metrics


def fetch_trees(rows: KVBatchMeta, *, step: int) -> list[StoredTree]:
    """The trees of rows that are in TransferQueue; see `trees_of_rows`."""
    if not rows.keys:
        return []
    data = tq.kv_batch_get(keys=rows.keys, partition_id=rows.partition_id, select_fields=list(_FIELDS))
    return trees_of_rows(rows.keys, tags=rows.tags, data=data, step=step)


def trees_of_rows(
    keys: Sequence[str], *, tags: Sequence[dict[str, Any]], data: TensorDict, step: int
) -> list[StoredTree]:
    """Makes the trees of verl's rows.

    Args:
        keys: (R,) row keys, no padding rows.
        tags: (R,) their tags; weight versions are read.
        data: The rows: `prompts`, `input_ids`, `response_mask`, and where known `rm_scores`, `rollout_log_probs`,
            `advantages` and `extra_fields` (`reward_extra_info`, recorded calls).
        step: The trainer's global step.

    Returns:
        One tree per group in the order of uids, its leaves in the order of sessions and leaves.
    """
    columns = {name: column for name in _FIELDS if (column := data.get(name, None)) is not None}
    extra_fields = columns.pop("extra_fields").tolist() if "extra_fields" in columns else [{}] * len(keys)
    arrays = {name: [row.numpy() for row in column.unbind()] for name, column in columns.items()}
    leaves = [
        _leaf(key, tag=tag, extra=extra, row={name: rows[index] for name, rows in arrays.items()})
        for index, (key, tag, extra) in enumerate(zip(keys, tags, extra_fields, strict=True))
    ]
    return [
        StoredTree(step=step, uid=parse_row_key(keys[group[0]]).uid, leaves=tuple(leaves[row] for row in group))
        for group in group_rows(keys)
    ]


def _leaf(key: str, *, tag: dict[str, Any], extra: dict[str, Any], row: dict[str, np.ndarray]) -> StoredLeaf:
    """One row as a leaf."""
    place, prompt_len = parse_row_key(key), len(row["prompts"])
    calls = tuple(CallRun(*run) for run in extra.get(CALLS_FIELD, ()))
    is_trained = np.zeros(len(row["input_ids"]), dtype=bool)
    is_trained[prompt_len:] = row["response_mask"]
    log_probs = np.full(len(is_trained), np.nan, dtype=np.float32)
    if "rollout_log_probs" in row:
        # verl writes 0 for tokens that were only read; a sampled one may have it, too.
        has_log_prob = is_trained.copy()
        for run in calls:
            has_log_prob[max(run.start, prompt_len) : run.end] = True
        values, known = row["rollout_log_probs"], has_log_prob[prompt_len:]
        log_probs[prompt_len:] = np.where(known | (values != 0), values, np.nan)
    return StoredLeaf(
        session=place.session,
        leaf=place.leaf,
        token_ids=row["input_ids"],
        prompt_len=prompt_len,
        is_trained=is_trained,
        log_probs=log_probs,
        token_rewards=row.get("rm_scores"),
        token_advantages=row.get("advantages"),
        reward_extra_info=extra.get("reward_extra_info"),
        min_global_steps=tag.get("min_global_steps"),
        max_global_steps=tag.get("max_global_steps"),
        calls=calls,
    )


def _summary(tree: StoredTree) -> tuple[int, int, float, float | None]:
    """Leaves, tree tokens, POR and mean reward."""
    forest = tree.forest()
    rewards = [leaf.reward for leaf in tree.leaves if leaf.reward is not None]
    mean_reward = sum(rewards) / len(rewards) if rewards else None
    return forest.num_leaves, forest.num_tokens, forest.potential_overlap_ratio, mean_reward
