"""Refuses files and folders that are not there, and inputs that are no text, before Ray starts.

Only what is on this machine is read: nothing is downloaded, paths with a scheme (`hdfs://`) are left alone. Where the
run's processes may be on other machines, what is missing is a warning.
"""

import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from verl_tree.launch.validation.refusals import (
    DATA_KEYS,
    MODELS,
    column_names,
    data_files,
    has_scheme,
    missing,
    refuse,
    refuse_here,
    uses_critic,
    value_of,
)


def check_data_files(config: DictConfig) -> None:
    """Files that do not exist; a dataset class of the user's own may name them as it likes."""
    if value_of(config, "data.custom_cls.path"):
        return
    for key in DATA_KEYS:
        names = data_files(config, key)
        if not names:
            refuse(config, key, "names no file; give a parquet or JSON file, or a list of them")
        for name in names:
            if not has_scheme(name) and not os.path.isfile(name) and not glob.glob(name):
                refuse_here(config, key, missing(name, "file"))


def check_model_folders(config: DictConfig) -> None:
    """A folder without a model, a path that is no folder, or a hub's model that is not here while offline."""
    for model in _models_in_use(config):
        key = f"{model}.path"
        path = value_of(config, key)
        if not isinstance(path, str) or not path:
            refuse(config, key, "give the folder of a model, or its name on the hub (owner/model)")
        if has_scheme(path):
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
        refuse_here(config, key, f"{missing(name, 'folder')}, or a name on the hub (owner/model)")
        return
    if constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        problem = "no such folder, and HF_HUB_OFFLINE is set while the hub's cache lacks it"
        refuse_here(config, key, f"{problem}; correct the path, or download it first (hf download {name})")


def check_dump_dir(config: DictConfig) -> None:
    """A folder of trees that cannot be made, or written to."""
    key = "tree.dump_dir"
    name = value_of(config, key)
    if name is None:
        return
    if has_scheme(name):
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
            if config.data[key] in column_names(path):
                refuse(config, f"data.{key}", f"{path} has such a column; only text rows are supported, drop it")


def _models_in_use(config: DictConfig) -> tuple[str, ...]:
    return MODELS[: 2 if uses_critic(config) else 1]


def _parquet_files(config: DictConfig) -> Iterator[Path]:
    for key in DATA_KEYS:
        for path in map(Path, data_files(config, key)):
            if path.suffix == ".parquet" and path.is_file():
                yield path
