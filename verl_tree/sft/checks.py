"""Checks that refuse a configuration of fine-tuning that cannot work, before the process group starts."""

import os
from glob import glob
from typing import Any

from omegaconf import DictConfig

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.launch.checks import features
from verl_tree.launch.checks.choices import NO_QAT, OFF, ON, Choice
from verl_tree.launch.checks.inputs import check_models
from verl_tree.launch.checks.prompts import row_problems
from verl_tree.launch.checks.refusals import (
    DATA_KEYS,
    Check,
    Finding,
    Findings,
    columns,
    data_files,
    has_scheme,
    is_parquet_here,
    missing,
    refusal,
    settle,
    uses_flat,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.resume import check_checkpoints, check_chosen_checkpoint
from verl_tree.launch.checks.settings import check_attention, check_device, check_tree_options
from verl_tree.launch.checks.values import COUNT, Range, check_kinds, ranges
from verl_tree.records import holds_trees

RULES: tuple[Choice, ...] = (
    Choice("engine.strategy", (TREE_STRATEGY,), uses_tree, reason="tree.enabled=true trains on trees"),
    Choice("engine.strategy", (FLAT_STRATEGY, "fsdp"), uses_flat, reason="tree.enabled=false trains with verl's FSDP"),
    Choice("engine.qat.enable", OFF, reason=NO_QAT),
    Choice("model.mtp.enable", OFF, reason="heads for several tokens are not supported"),
    Choice("data.pad_mode", ("no_padding",), reason="a step has rows of any length, which are not padded"),
    Choice("data.truncation", ("error", "right"), reason="a tree shares its beginning, so rows are cut at their end"),
    Choice("data.use_dynamic_bsz", ON, reason="a step has any number of rows, so micro-batches are cut by tokens"),
    Choice("data.balance_dp_token", OFF, reason="ranks are balanced by predicted time anyway"),
    Choice("data.num_workers", (0,), reason="rows are in memory, so no process reads them"),
)
"""Keys that must have a certain value."""


RANGES: tuple[Range, ...] = (
    *ranges("data", "train_batch_size", "min_shared", "max_length", "max_token_len_per_gpu", **COUNT),
    *ranges("trainer", "total_epochs", **COUNT),
    *ranges("trainer", "total_training_steps", **COUNT, or_null=True),
    Range("optim.lr", least=0),
)
"""Numbers outside of which fine-tuning cannot work."""

TIMES = ("trainer.test_freq", "trainer.save_freq")
"""Numbers of steps, or `after_each_epoch`."""


def find_wrong_values(config: DictConfig) -> Findings:
    """Yield the values of a wrong kind; where there are none, the numbers out of their range."""
    wrong = list(check_kinds(config, texts=TIMES))
    yield from wrong
    for check in () if wrong else RANGES:
        yield from check(config)


def check_numbers(config: DictConfig) -> Findings:
    """Find options of the wrong type."""
    if not isinstance(config.data.min_reward, int | float | None):
        yield refusal(config, "data.min_reward", "give a number, or null to train all leaves")
    if not isinstance(config.data.tree_key, str | None):
        yield refusal(config, "data.tree_key", "give the name of a column, or null to find trees from the tokens")


def check_longest_row(config: DictConfig) -> Findings:
    """Find rows that may not fit into a pass, where a row may not be cut into sections."""
    capacity: Any = config.tree.capacity if uses_tree(config) else None
    capacity = config.data.max_token_len_per_gpu if capacity is None else capacity
    holds_rows = uses_flat(config) or config.tree.relay == "never"
    if holds_rows and isinstance(capacity, int) and config.data.max_length > capacity:
        remedy = f"a pass holds {capacity} tokens, and no row is cut; lower it, or raise data.max_token_len_per_gpu"
        yield refusal(config, "data.max_length", f"{remedy} or tree.capacity")


def check_validation(config: DictConfig) -> Findings:
    """Find a validation without rows."""
    for key in TIMES:
        value = value_of(config, key)
        if value == 0:
            yield refusal(config, key, "verl divides by it; set -1 for never")
        elif value != "after_each_epoch" and not (isinstance(value, int) and not isinstance(value, bool)):
            yield refusal(config, key, "give a whole number of steps, after_each_epoch, or -1 for never")
        elif key == "trainer.test_freq" and (value == "after_each_epoch" or value > 0) and not config.data.val_files:
            yield refusal(config, key, "there are no data.val_files; give some, or set -1")


def check_files(config: DictConfig) -> Findings:
    """Find files that do not exist or have other rows than text. For a class of the user's a name may mean anything."""
    if value_of(config, "data.custom_cls.path"):
        return
    for key in DATA_KEYS:
        names = data_files(config, key)
        if key == DATA_KEYS[0] and not names:
            yield refusal(config, key, "names no file; give a parquet file, or a list of them")
        for name in (name for name in names if not has_scheme(name)):
            if not os.path.isfile(name) and not glob(name):
                yield refusal(config, key, missing(name, "file"))
            for column in ("images", "videos"):
                if column in columns(name) and "messages" in columns(name):
                    yield refusal(config, key, f"{name} has the column {column}; only text rows are supported, drop it")
            if is_parquet_here(name) and not holds_trees(name):
                for problem in row_problems(name, column=config.data.messages_key, named_by="data.messages_key"):
                    yield refusal(config, key, problem)


def check_start(config: DictConfig) -> Findings:
    """Find checkpoints that no run can go on from; verl reads `resume_from_path` in the mode `auto`, too."""
    if config.trainer.resume_from_path is None:
        yield from check_checkpoints(config)
    yield from check_chosen_checkpoint(config)


CHECKS: tuple[Check, ...] = (
    check_tree_options,
    *features.CHECKS,
    *RULES,
    check_device,
    check_numbers,
    check_longest_row,
    check_validation,
    check_files,
    check_models,
    check_attention,
    check_start,
)
"""All checks, in the order in which a user should hear of problems."""


def find(config: DictConfig) -> list[Finding]:
    """Return everything that the checks find in a resolved configuration."""
    # The other checks compute with these values.
    return list(find_wrong_values(config)) or [finding for check in CHECKS for finding in check(config)]


def validate(config: DictConfig) -> None:
    """Run the checks on a resolved configuration and log their warnings.

    Raises:
        ValueError: Settings cannot work; the message has a line for each, with its remedy.
    """
    settle(find(config))
