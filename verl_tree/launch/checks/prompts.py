"""Checks of the rows of parquet files: a prompt, and what fine-tuning reads, is a list of messages.

verl fails on other rows once Ray and the engines have started, and names neither the file nor the row.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.checks.code import LOOPS_KEY, MANAGER_KEY, TREE_MANAGER, cuts_prompts
from verl_tree.launch.checks.refusals import (
    DATA_KEYS,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    data_files,
    is_parquet_here,
    refusal,
    refusal_to_run,
    value_of,
)

NUM_ROWS_READ, NUM_PROMPTS_MEASURED = 1000, 200
"""Rows of a file that are looked at, and that are tokenised; a file may have millions."""

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


def check_num_prompts(config: DictConfig) -> Findings:
    """Find a batch that is larger than the data: verl then divides by the zero steps of an epoch."""
    import pyarrow
    import pyarrow.parquet

    names = data_files(config, "data.train_files")
    if value_of(config, "data.custom_cls.path") or not all(map(is_parquet_here, names)):
        return
    try:
        num_rows = sum(pyarrow.parquet.read_metadata(name).num_rows for name in names)
    except (pyarrow.ArrowException, OSError):
        return  # `check_prompts` names the file
    key, most = "data.train_batch_size", value_of(config, "data.train_max_samples")
    is_cut = isinstance(most, int) and 0 < most < num_rows
    if value_of(config, key) > (most if is_cut else num_rows) > 0:
        of = f"data.train_max_samples={most} rows" if is_cut else f"{num_rows} rows"
        remedy = f"data.train_files have {of}, fewer than one batch; lower it, or give more rows"
        yield refusal_to_run(config, key, remedy)


def check_prompt_lens(config: DictConfig) -> Findings:
    """Warn of prompts that are cut: agent loops keep the end of one that is too long, and train with it."""
    is_other = any(value_of(config, f"data.{name}") for name in ("custom_cls.path", "filter_overlong_prompts"))
    tokenizer = None if is_other or not cuts_prompts(config) else _tokenizer_here(config)
    if tokenizer is None:
        return
    limit, key = value_of(config, f"{ROLLOUT}.prompt_length"), "data.max_prompt_length"
    if limit != value_of(config, key):
        key = f"{ROLLOUT}.prompt_length"
    options: Any = OmegaConf.to_container(config.data.apply_chat_template_kwargs)
    for name in filter(is_parquet_here, data_files(config, "data.train_files")):
        lens = list(_prompt_lens(name, tokenizer, column=value_of(config, "data.prompt_key"), options=options))
        num_longer = sum(each > limit for each in lens)
        if num_longer:
            message = (
                f"{key}={limit}: {num_longer} of the first {len(lens)} prompts of {name} are longer, "
                f"up to {max(lens)} tokens, and agent loops drop their beginning; raise it, or set "
                "data.filter_overlong_prompts=true"
            )
            yield Finding(message, is_warning=True)


def _tokenizer_here(config: DictConfig) -> Any:
    """Return the tokenizer of the policy if that takes neither the network nor code of the model's."""
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model
    path = model.tokenizer_path or model.path
    if model.trust_remote_code or not isinstance(path, str) or not os.path.isfile(f"{path}/tokenizer_config.json"):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None  # the workers say what is wrong with it
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    return tokenizer if tokenizer.chat_template else None


def _prompt_lens(name: str, tokenizer: Any, *, column: Any, options: dict[str, Any]) -> Iterator[int]:
    """Yield the tokens of the first prompts of a file, without tools; what is no text is left out."""
    import pyarrow
    import pyarrow.parquet
    from jinja2 import TemplateError

    try:
        with pyarrow.parquet.ParquetFile(name) as file:
            batch = next(file.iter_batches(batch_size=NUM_PROMPTS_MEASURED, columns=[column]), None)
    except (pyarrow.ArrowException, OSError, TypeError):
        return  # `check_prompts` names the file
    for messages in batch.column(0).to_pylist() if batch is not None and batch.num_columns else []:
        if message_problem(messages) is None and all(isinstance(each["content"], str) for each in messages):
            with contextlib.suppress(TemplateError, TypeError, ValueError):
                rendered = tokenizer.apply_chat_template(
                    messages, **options, add_generation_prompt=True, tokenize=True, return_dict=False
                )
                yield len(rendered)


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


CHECKS: tuple[Check, ...] = (check_prompts, check_num_prompts, check_prompt_lens)
