"""Refuses code that is not there, before Ray starts: agent loops, tools, reward functions, data set classes.

No module of the user's is run here, only the packages that it lies in: it may need what only Ray's processes have.
Where those may be on other machines, or bring modules along, what is missing is a warning.
"""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.validation.refusals import (
    DATA_KEYS,
    ROLLOUT,
    column_names,
    data_files,
    missing,
    refuse,
    refuse_here,
    value_of,
)

LOOPS_KEY = f"{ROLLOUT}.agent.agent_loop_config_path"
DEFAULT_LOOP_KEY = f"{ROLLOUT}.agent.default_agent_loop"
MANAGER_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
LOOPS_FORMAT = "it must be a YAML list, each entry with `name` and `_target_` (docs/agent_loops.md)"
ON_PATH = "correct it, or add its folder to PYTHONPATH"
DEFAULT_REWARD_MANAGER = "naive"
"""verl's own; to look another one up takes an import that the driver does not need otherwise."""

LEGACY_GROUPS = ("custom_reward_function", "reward_model", "sandbox_fusion")
MOVED = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "reward_model.reward_loop_module_path": "reward.reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.model.external_lib": None,
    "reward_model.model.trust_remote_code": None,
}
"""Where keys of `LEGACY_GROUPS` are now, None for nowhere; the others have moved below `reward` as they are.

Source: `verl.experimental.reward_loop.migrate_legacy_reward_impl` (0.9.1)."""


def check_agent_loops(config: DictConfig) -> None:
    """The file of loops, the classes that it names, the loops of rows with `agent_name`, and that of the others."""
    entries = _read_loops(config)
    if entries is None:
        return
    for entry in entries:
        problem = _target_problem(entry["_target_"])
        if problem:
            where = f"_target_={entry['_target_']} of the loop {entry['name']}"
            refuse_here(config, LOOPS_KEY, f"{where}: {problem}; {ON_PATH}", brings_code=True)
    in_file = {entry["name"] for entry in entries}
    unknown = [(key, name) for key, name in _loops_in_use(config) if name not in in_file]
    known = sorted({*in_file, *_registered_loops(config)}) if unknown else []
    for key, name in unknown:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            guess = f"did you mean {close[0]}? " if close else ""
            remedy = f"{guess}choose one of {', '.join(known)}, or add it to the file of {LOOPS_KEY}"
            column = "" if key == DEFAULT_LOOP_KEY else f"the column agent_name has {name!r}: "
            refuse_here(config, key, f"{column}no such agent loop; {remedy}", brings_code=True)


def _loops_in_use(config: DictConfig) -> list[tuple[str, Any]]:
    """Returns the option and the name of every loop that a row runs; the default unless all rows name their own."""
    import pyarrow.parquet

    named, has_unnamed = {}, False
    for key in DATA_KEYS:
        for name in data_files(config, key):
            path = Path(name)
            if path.suffix == ".parquet" and path.is_file() and "agent_name" in column_names(path):
                column = pyarrow.parquet.read_table(path, columns=["agent_name"]).column(0)
                named |= {(key, each): None for each in column.unique().to_pylist()}
            else:
                has_unnamed = True
    default = [(DEFAULT_LOOP_KEY, value_of(config, DEFAULT_LOOP_KEY))] if has_unnamed else []
    return [*default, *named]


def _read_loops(config: DictConfig) -> list[dict[str, Any]] | None:
    """Returns the entries of the file of loops, none if none is set, None if it was only warned of."""
    import yaml

    if not value_of(config, LOOPS_KEY):
        return []
    path = _config_file(config, LOOPS_KEY)
    if path is None:
        return None
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        raise ValueError(f"{LOOPS_KEY}={path}: {LOOPS_FORMAT}, but it is not YAML: {error}") from error
    if not isinstance(entries, list) or not entries:
        refuse(config, LOOPS_KEY, LOOPS_FORMAT)
    for number, entry in enumerate(entries, start=1):
        lacks = [each for each in ("name", "_target_") if not isinstance(entry, dict) or not entry.get(each)]
        if lacks:
            refuse(config, LOOPS_KEY, f"{LOOPS_FORMAT}; entry {number} lacks {', '.join(lacks)}")
    return entries


def _target_problem(target: str) -> str | None:
    """Says why a class cannot be imported, without running its module (parent packages are imported).

    A module of the user's may read variables that only Ray's processes have, or import vLLM; so its source is searched
    for the name of the class instead.
    """
    parts = target.split(".")
    if len(parts) < 2:
        return "not the full name of a class (package.module.Class)"
    spec, is_package, num_found = None, True, 0
    while is_package and num_found < len(parts) - 1:
        try:
            found = importlib.util.find_spec(".".join(parts[: num_found + 1]))
        except ImportError as error:
            return f"a package of it cannot be imported ({error})"
        if found is None:
            break
        spec, is_package, num_found = found, found.submodule_search_locations is not None, num_found + 1
    if spec is None:
        return f"no module named {parts[0]}"
    name = parts[num_found]
    if not spec.origin:
        return f"no module named {'.'.join(parts[: num_found + 1])}"
    return None if _may_have(Path(spec.origin), name) else f"{spec.origin} has no {name}"


def _may_have(source: Path, name: str) -> bool:
    """Whether a module, which is not run, may define a name: its source has the word, or ways to hide one."""
    if source.suffix != ".py":
        return True
    text = source.read_text(encoding="utf-8", errors="replace")
    hides = r"import \*|\b__getattr__\b|\b__dict__\b|\b(globals|locals|vars|setattr|exec)\("
    return bool(re.search(hides, text) or re.search(rf"\b{re.escape(name)}\b", text))


def _registered_loops(config: DictConfig) -> list[str]:
    """Returns the loops that every agent loop worker knows: verl's, ours, and those of a manager of the user's."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    # What rollout_hooks.worker imports; that module itself would import vLLM (3 s).
    from rollout_hooks.loops import blackbox, compaction, memory, parallel_tools, subagents, tree_search  # noqa: F401

    manager = value_of(config, MANAGER_KEY)
    problem = _target_problem(manager)
    if problem:
        refuse_here(config, MANAGER_KEY, f"{problem}; {ON_PATH}", brings_code=True)
    elif manager != "rollout_hooks.worker.TreeAgentLoopManager":
        importlib.import_module(manager.rpartition(".")[0])
    return list(_agent_loop_registry)


def check_tool_files(config: DictConfig) -> None:
    """Files of tools that do not exist."""
    for name in ("tool_config_path", "function_tool_path"):
        key = f"{ROLLOUT}.multi_turn.{name}"
        if value_of(config, key):
            _config_file(config, key)


def _config_file(config: DictConfig, key: str) -> Path | None:
    """Returns the file that verl will read, or None if it is missing and was only warned of."""
    from verl.utils.import_utils import resolve_config_path

    name = value_of(config, key)
    try:
        path = Path(resolve_config_path(name))
    except FileNotFoundError:
        path = None
    if path is None or not path.is_file():
        refuse_here(config, key, missing(name, "file"))
        return None
    return path


def check_reward_code(config: DictConfig) -> None:
    """Reward functions and managers of the user's that do not exist, and managers that nobody registered."""
    _check_object(config, "reward.custom_reward_function.path", "reward.custom_reward_function.name")
    manager, module_key = config.reward.reward_manager, "reward.reward_manager.module.path"
    if manager.source not in ("register", "importlib"):
        refuse(config, "reward.reward_manager.source", "choose register (a name of verl's) or importlib (yours)")
    if manager.source == "importlib":
        if not value_of(config, module_key):
            refuse(config, module_key, "source=importlib reads a class from it; give a file")
        _check_object(config, module_key, "reward.reward_manager.name")
    elif manager.name != DEFAULT_REWARD_MANAGER:
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        if manager.name not in REWARD_MANAGER:
            known = ", ".join(sorted(REWARD_MANAGER))
            remedy = f"no such reward manager; choose one of {known}, or import yours (source=importlib, module.path)"
            refuse_here(config, "reward.reward_manager.name", remedy, brings_code=True)


def check_data_code(config: DictConfig) -> None:
    """A data set class of the user's that does not exist."""
    _check_object(config, "data.custom_cls.path", "data.custom_cls.name")


def check_legacy_reward_keys(config: DictConfig) -> None:
    """Keys of earlier releases, which verl 0.9.1 composes and its trainer does not read; unless they change nothing."""
    for group in LEGACY_GROUPS:
        for key in _set_keys(config.get(group) or {}, group):
            new = moved_to(key)
            if new is None:
                refuse(config, key, "verl 0.9.1 does not read this key, and has no other for it; remove it")
            elif value_of(config, key) != value_of(config, new):
                refuse(config, key, f"verl 0.9.1 does not read this key; set {new} instead")


def moved_to(key: str) -> str | None:
    """Returns the present name of a key of `LEGACY_GROUPS` (`reward_model.num_workers`), None if it has none."""
    for old, new in MOVED.items():
        if key == old or key.startswith(f"{old}."):
            return None if new is None else new + key.removeprefix(old)
    return f"reward.{key}"


def _set_keys(group: DictConfig, prefix: str) -> Iterator[str]:
    for name, value in group.items():
        key = f"{prefix}.{name}"
        if OmegaConf.is_dict(value):
            yield from _set_keys(value, key)
        elif value is not None:
            yield key


def _check_object(config: DictConfig, path_key: str, name_key: str) -> None:
    """Checks a name in a module that verl loads by its path (`load_extern_object`): of a file, or `pkg://`."""
    from verl.utils.import_utils import FILE_PATH_PREFIX, PKG_PATH_PREFIX

    path, name = value_of(config, path_key), value_of(config, name_key)
    if not path:
        return
    if not name:
        refuse(config, name_key, f"give the name of what shall be read from {path_key}={path}")
    if path.startswith(PKG_PATH_PREFIX):
        module = path.removeprefix(PKG_PATH_PREFIX).replace("/", ".")
        problem = _target_problem(f"{module}.{name}")
        if problem:
            refuse_here(config, path_key, f"{problem}; {ON_PATH}", brings_code=True)
        return
    file = Path(path.removeprefix(FILE_PATH_PREFIX))
    # Ray's processes look for a relative path in the working directory that they may be given.
    brings_code = not file.is_absolute()
    if not file.is_file():
        refuse_here(config, path_key, missing(str(file), "file"), brings_code=brings_code)
    elif not _may_have(file, name):
        remedy = f"{path_key}={path} has no such name; correct one of them"
        refuse_here(config, name_key, remedy, brings_code=brings_code)
