"""Checks of the rows of parquet files: a prompt, and what fine-tuning reads, is a list of messages.

verl fails on other rows once Ray and the engines have started, and names neither the file nor the row.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig

from verl_tree.launch.validation.code import LOOPS_KEY, MANAGER_KEY, TREE_MANAGER
from verl_tree.launch.validation.refusals import (
    DATA_KEYS,
    Check,
    Findings,
    data_files,
    is_parquet_here,
    refusal,
    value_of,
)

NUM_ROWS_READ = 1000
"""Rows of a file that are looked at; a file may have millions."""

MESSAGES = "a list of messages, each with `role` and `content`"


def message_problem(messages: Any) -> str | None:
    """Return why a value is no list of messages, or None. A content is text, a list of parts, or null."""
    if not isinstance(messages, list) or not messages:
        return f"{_short(messages)} is no conversation; give {MESSAGES}"
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {number}, {_short(message)}, has no role or no content; give {MESSAGES}"
        content = message["content"]
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(isinstance(part, Mapping) for part in parts):
            return f"the content of message {number}, {_short(content)}, is neither text nor a list of parts; give one"
    return None


def check_prompts(config: DictConfig) -> Findings:
    """Find parquet files that cannot be read, and rows without a prompt. A class of the user's reads what it likes."""
    column: Any = value_of(config, "data.prompt_key")
    if value_of(config, "data.custom_cls.path"):
        return
    # verl hands a prompt that is text to the loop as it is, and a loop of the user's may read that.
    takes_text = bool(value_of(config, LOOPS_KEY)) or value_of(config, MANAGER_KEY) != TREE_MANAGER
    for key in DATA_KEYS:
        for name in filter(is_parquet_here, data_files(config, key)):
            for problem in row_problems(name, column=column, named_by="data.prompt_key", takes_text=takes_text):
                yield refusal(config, key, problem)


def row_problems(name: str, *, column: Any, named_by: str, takes_text: bool = False) -> Iterator[str]:
    """Yield the first thing that is wrong with the rows of a parquet file that have messages in a column.

    `named_by` is the option that names the column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(name)
    except (pyarrow.ArrowException, OSError) as error:
        yield f"{name} cannot be read as parquet ({error}); give another file, or write it anew"
        return
    with file:
        if column not in file.schema_arrow.names:
            known = ", ".join(file.schema_arrow.names)
            yield f"{name} has no column {column!r} but {known}; rename one, or name it in {named_by}"
        elif not file.metadata.num_rows:
            yield f"{name} has no rows; give another file"
        else:
            batch = next(file.iter_batches(batch_size=NUM_ROWS_READ, columns=[column]))
            for number, value in enumerate(batch.column(0).to_pylist()):
                if not (takes_text and isinstance(value, str)) and (problem := message_problem(value)):
                    yield f"{name}, row {number}, column {column}: {problem}"
                    return


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


CHECKS: tuple[Check, ...] = (check_prompts,)
