"""Refuses files, folders and agent loops that are not there, and inputs that are no text, before Ray starts.

Only what is on this machine is read: nothing is downloaded, paths with a scheme (`hdfs://`) are left alone, and no
module of a user's loop is run here. Where the run's processes may be on other machines, what is missing is a warning.
"""

import difflib
import glob
import importlib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_tree.refusals import MODELS, ROLLOUT, refuse, refuse_here, uses_critic, value_of

DATA_KEYS = ("data.train_files", "data.val_files")
LOOPS_KEY = f"{ROLLOUT}.agent.agent_loop_config_path"
DEFAULT_LOOP_KEY = f"{ROLLOUT}.agent.default_agent_loop"
MANAGER_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
LOOPS_FORMAT = "it must be a YAML list, each entry with `name` and `_target_` (docs/agent_loops.md)"


def check_data_files(config: DictConfig) -> None:
    """Files that do not exist; a dataset class of the user's own may name them as it likes."""
    if value_of(config, "data.custom_cls.path"):
        return
    for key in DATA_KEYS:
        names = _data_files(config, key)
        if not names:
            refuse(config, key, "names no file; give a parquet or JSON file, or a list of them")
        for name in names:
            if not _has_scheme(name) and not os.path.isfile(name) and not glob.glob(name):
                refuse_here(config, key, _missing(name, "file"))


def check_model_folders(config: DictConfig) -> None:
    """A folder without a model, a path that is no folder, or a hub's model that is not here while offline."""
    for model in _models_in_use(config):
        key = f"{model}.path"
        path = value_of(config, key)
        if not isinstance(path, str) or not path:
            refuse(config, key, "give the folder of a model, or its name on the hub (owner/model)")
        if _has_scheme(path):
            continue
        if path.endswith("/"):
            refuse(config, key, "verl takes no folder that ends in /; remove it")
        if os.path.isdir(path):
            has_config = value_of(config, f"{model}.hf_config_path") or os.path.isfile(f"{path}/config.json")
            if not has_config:
                refuse_here(config, key, "the folder has no config.json; give one that save_pretrained wrote")
        else:
            _check_hub_name(config, key, path)


def _check_hub_name(config: DictConfig, key: str, name: str) -> None:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        refuse_here(config, key, f"{_missing(name, 'folder')}, or a name on the hub (owner/model)")
        return
    if constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        missing = "no such folder, and HF_HUB_OFFLINE is set while the hub's cache lacks it"
        refuse_here(config, key, f"{missing}; correct the path, or download it first (hf download {name})")


def check_agent_loops(config: DictConfig) -> None:
    """The file of loops, the classes that it names, the loops of rows with `agent_name`, and that of the others."""
    entries = _read_loops(config)
    if entries is None:
        return
    for entry in entries:
        problem = _target_problem(entry["_target_"])
        if problem:
            where = f"_target_={entry['_target_']} of the loop {entry['name']}"
            remedy = "correct it, or add its folder to PYTHONPATH"
            refuse_here(config, LOOPS_KEY, f"{where}: {problem}; {remedy}", brings_code=True)
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
        for name in _data_files(config, key):
            path = Path(name)
            if path.suffix == ".parquet" and path.is_file() and "agent_name" in _column_names(path):
                column = pyarrow.parquet.read_table(path, columns=["agent_name"]).column(0)
                named |= {(key, each): None for each in column.unique().to_pylist()}
            else:
                has_unnamed = True
    default = [(DEFAULT_LOOP_KEY, value_of(config, DEFAULT_LOOP_KEY))] if has_unnamed else []
    return [*default, *named]


def _read_loops(config: DictConfig) -> list[dict[str, Any]] | None:
    """Returns the entries of the file of loops, none if none is set, None if it was only warned of."""
    import yaml
    from omegaconf import OmegaConf

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
    if not spec.origin or not spec.origin.endswith(".py"):
        return None if spec.origin else f"no module named {'.'.join(parts[: num_found + 1])}"
    source = Path(spec.origin).read_text(encoding="utf-8")
    may_hide_names = re.search(r"import \*|\b__getattr__\b|\bglobals\(", source)
    if may_hide_names or re.search(rf"\b{re.escape(name)}\b", source):
        return None
    return f"{spec.origin} has no {name}"


def _registered_loops(config: DictConfig) -> list[str]:
    """Returns the loops that every agent loop worker knows: verl's, ours, and those of a manager of the user's."""
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    # What rollout_hooks.worker imports; that module itself would import vLLM (3 s).
    from rollout_hooks import blackbox, compaction, memory, parallel_tools, subagents, tree_search  # noqa: F401

    manager = value_of(config, MANAGER_KEY)
    problem = _target_problem(manager)
    if problem:
        refuse_here(config, MANAGER_KEY, f"{problem}; correct it, or add its folder to PYTHONPATH", brings_code=True)
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
        refuse_here(config, key, _missing(name, "file"))
        return None
    return path


def check_dump_dir(config: DictConfig) -> None:
    """A folder of trees that cannot be made, or written to."""
    key = "tree.dump_dir"
    name = value_of(config, key)
    if name is None:
        return
    if _has_scheme(name):
        refuse(config, key, "trees are written to a local folder; give one, or null to store none")
    folder = Path(name).absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not existing.is_dir():
        refuse_here(config, key, f"{existing} is a file; give another folder, or null to store no trees")
    elif not os.access(existing, os.W_OK | os.X_OK):
        refuse_here(config, key, f"{existing} cannot be written to; give another folder, or null to store no trees")


def check_text_model(config: DictConfig) -> None:
    """A model with a vision or audio tower has inputs that token ids alone do not tell apart."""
    for model in _models_in_use(config):
        path = Path(value_of(config, f"{model}.path")) / "config.json"
        if not path.is_file():
            continue
        towers = [name for name in json.loads(path.read_text()) if name in ("vision_config", "audio_config")]
        if towers:
            refuse(config, f"{model}.path", f"multimodal model ({', '.join(towers)}); only text models are supported")


def check_text_rows(config: DictConfig) -> None:
    """Rows with images, videos or sounds have inputs that token ids alone do not tell apart."""
    for key in ("image_key", "video_key", "audio_key"):
        for path in _parquet_files(config):
            if config.data[key] in _column_names(path):
                refuse(config, f"data.{key}", f"{path} has such a column; only text rows are supported, drop it")


def _models_in_use(config: DictConfig) -> tuple[str, ...]:
    return MODELS[: 2 if uses_critic(config) else 1]


def _data_files(config: DictConfig, key: str) -> list[str]:
    files = value_of(config, key)
    return [files] if isinstance(files, str) else list(files or [])


def _parquet_files(config: DictConfig) -> Iterator[Path]:
    for key in DATA_KEYS:
        for path in map(Path, _data_files(config, key)):
            if path.suffix == ".parquet" and path.is_file():
                yield path


def _column_names(path: Path) -> list[str]:
    import pyarrow.parquet

    return pyarrow.parquet.read_schema(path).names


def _has_scheme(path: str) -> bool:
    return "://" in path


def _missing(path: str, kind: str) -> str:
    """Says that a path does not exist, where it was looked for, and that nobody expands a `~`."""
    expanded = os.path.expanduser(path)
    if expanded != path:
        return f"~ is not expanded; give {expanded}"
    where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
    return f"no such {kind}{where}: {path}; give one that exists"
