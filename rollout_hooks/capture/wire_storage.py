"""TransferQueue's storage with trees on the wire: what an agent loop worker writes has each token of a prompt once.

Importing this module replaces the queue's storage manager of this process (`SimpleStorage`). A process writes trees
where `writing` says so and `transfer_queue.backend.SimpleStorage.trees` is true; every process reads them, as the flat
rows that verl expects. What other processes write stays flat.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema
from transfer_queue.storage import StorageManagerFactory
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from transfer_queue.storage.simple_storage import StorageKeyNotFoundError

from rollout_hooks.capture.wire_columns import ColumnReader, Place, PromptColumns, owner_is_gone

# The decorator of the queue's registry hides the class from type checkers.
_StorageManager = cast(Any, AsyncSimpleStorageManager)

_PROMPT: ContextVar[PromptColumns] = ContextVar("the prompt whose rows a task writes")


@contextmanager
def writing(prompt: PromptColumns) -> Iterator[None]:
    """Rows that are written inside are those of a prompt; all of them are cleared together."""
    token = _PROMPT.set(prompt)
    try:
        yield
    finally:
        _PROMPT.reset(token)


@StorageManagerFactory.register("SimpleStorage")
class TreeStorageManager(_StorageManager):
    """Writes what a prompt's rows add to each other, and reads rows."""

    async def put_data(
        self, data: TensorDict, metadata: BatchMeta, data_parser: Callable[[Any], Any] | None = None
    ) -> None:
        """Write rows: as trees what `writing` has said to be a prompt's, as they are otherwise."""
        prompt = _PROMPT.get(None)
        if prompt is None or metadata.size == 0 or data_parser is not None or not self.config.get("trees", False):
            return await super().put_data(data, metadata, data_parser)
        draft = prompt.copy()
        columns = {name: values_of(column) for name, column in data.items()}
        rows = metadata.global_indexes
        encoded = {
            row: draft.encode({name: each[index] for name, each in columns.items()}, row)
            for index, row in enumerate(rows)
        }
        await asyncio.gather(
            *(
                self._request_with_retry(
                    "put",
                    unit,
                    f"samples={len(group.global_indexes)} fields={list(columns)}",
                    partial(
                        self._put_to_single_storage_unit,
                        group.global_indexes,
                        {name: [encoded[row][name] for row in group.global_indexes] for name in columns},
                        target_storage_unit=unit,
                    ),
                )
                for unit, group in self._group_by_hash(rows).items()
            )
        )
        # The queue's schema is that of the flat columns.
        await self.notify_data_update(metadata.partition_ids[0], rows, extract_field_schema(data))
        prompt.take(draft)
        return None

    async def get_data(self, metadata: BatchMeta) -> TensorDict:
        """Return the columns of rows as they were before they were written.

        Raises:
            RuntimeError: Rows that have a part of them were cleared or written again (`owner_is_gone`).
        """
        if metadata.size == 0:
            return await super().get_data(metadata)
        rows, names = metadata.global_indexes, metadata.field_names
        known = await self.stored(rows, names)
        places = list(known)
        reader = ColumnReader(known)
        while missing := reader.missing(places):
            of_rows: dict[frozenset[int], list[str]] = {}
            for name in sorted({name for name, _ in missing}):
                of_rows.setdefault(frozenset(row for each, row in missing if each == name), []).append(name)
            try:
                found = await asyncio.gather(*(self.stored(sorted(each), of) for each, of in of_rows.items()))
            except StorageKeyNotFoundError as error:
                raise owner_is_gone(min(missing)) from error
            for each in found:
                known |= each
        columns = {name: self._column(reader, name, rows) for name in names}
        return TensorDict(columns, batch_size=len(metadata))

    def _column(self, reader: ColumnReader, name: str, rows: Sequence[int]) -> Any:
        nested = reader.read_nested(name, rows)
        return self._pack_field_values([reader.read((name, row)) for row in rows]) if nested is None else nested

    async def stored(self, rows: Sequence[int], names: Sequence[str]) -> dict[Place, Any]:
        """Return the values of columns of rows as they are stored."""
        routing = self._group_by_hash(list(rows))
        requests = [
            self._request_with_retry(
                "get",
                unit,
                f"samples={len(group.global_indexes)} fields={list(names)}",
                partial(self._get_from_single_storage_unit, group.global_indexes, names, target_storage_unit=unit),
            )
            for unit, group in routing.items()
        ]
        results = await asyncio.gather(*requests)
        return {
            (name, row): value
            for group, (_, columns) in zip(routing.values(), results, strict=True)
            for name in names
            for row, value in zip(group.global_indexes, columns[name], strict=True)
        }


def values_of(column: Any) -> Sequence[Any]:
    """Return the values of a column, one a row; who has the column must drop it when it is written."""
    if not isinstance(column, torch.Tensor):
        return column.tolist() if isinstance(column, NonTensorStack) else column
    values = column.unbind()
    if column.is_nested:
        # The queue unbinds a column four more times, which would take longer than to encode it.
        vars(column)["unbind"] = lambda *_: values
    return values
