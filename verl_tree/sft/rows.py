"""The rows of fine-tuning: their tokens, and which of them are trained. They are read once, when training starts.

A row is a conversation, which verl's own data set turns into tokens, or a leaf of a stored tree (docs/stored_trees.md).

Legend: L tokens of a row.
"""

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from omegaconf import DictConfig
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from verl_tree.engine.rows.columns import gather
from verl_tree.launch.checks.prompts import message_problem
from verl_tree.records import holds_trees, read_trees

PADDING = -1
"""Index of the padding row, which a rank computes that has fewer rows in a step than another."""

_PADDING_LEN = 2


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """One row: `token_ids` (L,) int32, and `is_trained` (L,) bool, at least one token of it.

    Rows with the same `tree` are one tree. None: its tokens tell.
    """

    token_ids: np.ndarray
    is_trained: np.ndarray
    tree: Hashable | None = None


class TokenRows(Dataset[dict[str, Tensor]]):
    """Rows in memory, under verl's names, and the padding row under the index `PADDING`."""

    def __init__(self, rows: Sequence[TokenRow]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == PADDING:
            token_ids = np.repeat(self.rows[0].token_ids[:1], _PADDING_LEN)
            is_trained = np.zeros(_PADDING_LEN, dtype=bool)
        else:
            token_ids, is_trained = self.rows[index].token_ids, self.rows[index].is_trained
        return {
            "input_ids": torch.from_numpy(token_ids.astype(np.int64)),
            "position_ids": torch.arange(len(token_ids)),
            "loss_mask": torch.from_numpy(is_trained.astype(np.int64)),
        }


def read_rows(files: str | Sequence[str], data: DictConfig, *, model_config: Any, max_samples: int) -> TokenRows:
    """Read the rows of all files, stored trees after conversations; all ranks call it together.

    Every rank turns its share of the conversations into tokens. Rows without a trained token change nothing and are
    left out. `data` is the part `data` of the configuration, `model_config` verl's. A positive `max_samples` takes the
    first rows only. Names may be patterns such as `step_*.parquet`.

    Raises:
        ValueError: A row is too long or not text, has no reward where one is asked for, or nothing is trained.
    """
    names = [files] if isinstance(files, str) else list(files)
    paths = [path for name in names for path in sorted(glob(name)) or [name]]
    # A data set class of the user's decides itself what a file is, and verl copies those of other file systems.
    is_tree = [data.custom_cls.path is None and os.path.isfile(path) and holds_trees(path) for path in paths]
    conversations = [path for path, holds in zip(paths, is_tree, strict=True) if not holds]
    rows: list[TokenRow] = []
    if conversations:
        dataset = create_sft_dataset(
            conversations, data, model_config.tokenizer, model_config.processor, max_samples=max_samples
        )
        rows += _share_work(dataset, data)
    for path, holds in zip(paths, is_tree, strict=True):
        if holds:
            rows += _stored_rows(path, data)
    trained = [row for row in rows[: max_samples if max_samples > 0 else None] if row.is_trained.any()]
    if not trained:
        raise ValueError(
            f"data.min_reward={data.min_reward}: none of {len(rows)} rows of {', '.join(paths)} has a trained token; "
            "give other files, or a lower reward"
        )
    return TokenRows(trained)


def _share_work(dataset: Any, data: DictConfig) -> list[TokenRow]:
    """Turn the conversations into tokens, every rank a share of them, and exchange the shares."""
    trees = _tree_keys(dataset, tree_key=data.tree_key)
    _require_messages(dataset)
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = [
        _token_row(_read(dataset, index, data), tree=trees[index]) for index in range(rank, len(dataset), num_ranks)
    ]
    shares = gather(mine)
    return [shares[index % num_ranks][index // num_ranks] for index in range(len(dataset))]


def _read(dataset: Any, index: int, data: DictConfig) -> dict[str, Any]:
    """Return a conversation as tokens. Raise ValueError if it is too long or the model's template refuses it."""
    try:
        return dataset[index]
    except ValueError as error:
        if "max_length" not in str(error):
            raise
        raise ValueError(
            f"data.max_length={data.max_length}: row {index} of data.train_files is too long ({error}); raise it, or "
            "set data.truncation=right"
        ) from error
    except (TemplateError, TypeError) as error:
        # Many templates add a content to a text without a look; it may be null or a list of parts.
        remedy = "correct the row, or give a model with another chat template"
        raise ValueError(f"data.train_files: row {index}: the chat template refuses it ({error}); {remedy}") from error


def _require_messages(dataset: Any) -> None:
    """Raise ValueError for a row that is no conversation; a data set class of the user's decides itself what one is."""
    if not isinstance(dataset, MultiTurnSFTDataset):
        return
    for index, messages in enumerate(dataset.messages):
        if problem := message_problem(messages):
            raise ValueError(f"data.train_files: row {index}, column {dataset.messages_key}: {problem}")


def _tree_keys(dataset: Any, *, tree_key: str | None) -> list[Hashable | None]:
    if tree_key is None:
        return [None] * len(dataset)
    if not isinstance(dataset, MultiTurnSFTDataset):
        raise ValueError(
            f"data.tree_key={tree_key}: the data set {type(dataset).__name__} has no columns; derive it from "
            "MultiTurnSFTDataset, or set null"
        )
    if tree_key not in dataset.dataframe:
        raise ValueError(
            f"data.tree_key={tree_key}: the files have the columns {', '.join(dataset.dataframe.columns)}; name one, "
            "or set null to find trees from the tokens"
        )
    keys = dataset.dataframe[tree_key].tolist()
    for index, key in enumerate(keys):
        if not isinstance(key, str | int | float) or key != key:
            raise ValueError(
                f"data.tree_key={tree_key}: row {index} has {key!r}; give every row a text or a number, or set null to "
                "find trees from the tokens"
            )
    return [("conversation", key) for key in keys]


def _token_row(row: dict[str, Any], *, tree: Hashable | None) -> TokenRow:
    if row.get("multi_modal_inputs") or row["position_ids"].dim() > 1:
        raise ValueError(
            f"data.train_files: a row has multimodal inputs ({', '.join(row)}); fine-tuning on trees takes text only, "
            "use python -m verl.trainer.sft_trainer"
        )
    token_ids, mask = row["input_ids"].numpy().astype(np.int32), row["loss_mask"].numpy().astype(bool)
    return TokenRow(token_ids, _without_first(mask), tree=tree)


def _stored_rows(path: str, data: DictConfig) -> Iterator[TokenRow]:
    """Yield the leaves of stored trees that have the reward asked for."""
    for number, tree in enumerate(read_trees(path)):
        for leaf in tree.leaves:
            name = f"{path}, leaf {tree.uid}_{leaf.session}_{leaf.leaf}"
            if leaf.images:
                raise ValueError(f"data.train_files: {name} has images; fine-tuning on trees takes text only")
            if data.min_reward is not None and leaf.reward is None:
                raise ValueError(
                    f"data.min_reward={data.min_reward}: {name} has no reward; set null to train all leaves"
                )
            if data.min_reward is not None and leaf.reward < data.min_reward:
                continue
            if len(leaf.token_ids) > data.max_length and data.truncation == "error":
                raise ValueError(
                    f"data.max_length={data.max_length}: {name} has {len(leaf.token_ids)} tokens; raise it, or set "
                    "data.truncation=right"
                )
            is_trained = _without_first(leaf.is_trained[: data.max_length])
            yield TokenRow(leaf.token_ids[: data.max_length], is_trained, tree=("stored", path, number))


def _without_first(is_trained: np.ndarray) -> np.ndarray:
    """Return the mask without a row's first token, which nothing scores.

    verl's loss rolls the masks of a micro-batch by one token: it would train the row before.
    """
    is_trained = is_trained.copy()
    is_trained[:1] = False
    return is_trained
