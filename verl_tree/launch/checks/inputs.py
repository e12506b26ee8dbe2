"""Checks that files and folders exist and that inputs are text, or images that the model's type is served with.

Nothing is downloaded, and paths with a scheme (`hdfs://`) are not checked. What is missing is only a warning where the
training run's processes may be on other machines.
"""

import glob
import json
import os
import tempfile
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl_tree.families import IMAGE_TYPES, RECURRENT_TYPES
from verl_tree.launch.checks.features import reads_images
from verl_tree.launch.checks.refusals import (
    DATA_KEYS,
    MODELS,
    Check,
    Findings,
    columns,
    data_files,
    has_scheme,
    missing,
    model_settings,
    models_of,
    refusal,
    refusal_here,
    refusal_to_run,
    value_of,
)

WEIGHTS = (".safetensors", ".bin", ".index.json")
"""How the names of files end that transformers loads weights from, or that name such files."""

TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates", "tekken.json")
"""Files that have chat templates, beside tokenizer_config.json; a tokenizer of Mistral's knows its own."""


def check_data_files(config: DictConfig) -> Findings:
    """Find data files that do not exist. For a data set class of the user's a name may mean anything."""
    if value_of(config, "data.custom_cls.path"):
        return
    for key in DATA_KEYS:
        names, given = data_files(config, key), value_of(config, key)
        if not names or (isinstance(given, ListConfig) and len(names) < len(given)):
            yield refusal(config, key, "names no file; give a parquet or JSON file, or a list of them")
        for name in names:
            if not has_scheme(name) and not os.path.isfile(name) and not glob.glob(name):
                yield refusal_here(config, key, missing(name, "file"))


def check_text_rows(config: DictConfig) -> Findings:
    """Find rows with videos or sounds, and with images for a model whose images are not served.

    Two such rows may differ and yet have the same token ids.
    """
    keys = ("video_key", "audio_key") if reads_images(config) else ("image_key", "video_key", "audio_key")
    for name in (name for key in DATA_KEYS for name in data_files(config, key)):
        for key in keys:
            if config.data[key] in columns(name):
                remedy = f"{name} has such a column; only text rows are supported"
                yield refusal(config, f"data.{key}", f"{remedy}, and images of {', '.join(IMAGE_TYPES)}; drop it")


def check_models(config: DictConfig) -> Findings:
    """Find models that do not exist or that take more than text."""
    for model in models_of(config):
        key = f"{model}.path"
        yield from check_model(config, key, has_config=bool(value_of(config, f"{model}.hf_config_path")))
        yield from _check_towers(config, key)


def check_model(config: DictConfig, key: str, *, has_config: bool = False) -> Findings:
    """Find that the model of a key does not exist; `has_config` says that its config.json is elsewhere."""
    path = value_of(config, key)
    if not isinstance(path, str) or not path:
        yield refusal(config, key, "give the folder of a model, or its name on the hub (owner/model)")
    elif has_scheme(path):
        return
    elif path.endswith("/"):
        yield refusal(config, key, "verl takes no folder that ends in /; remove it")
    elif os.path.isdir(path):
        if not os.path.isfile(f"{path}/config.json") and not has_config:
            yield refusal_here(config, key, "the folder has no config.json; give one that save_pretrained wrote")
        if not any(name.endswith(WEIGHTS) for name in os.listdir(path)):
            remedy = "the folder has no weights (*.safetensors or *.bin); give one that save_pretrained wrote"
            yield refusal_to_run(config, key, remedy)
    else:
        yield from _check_hub_name(config, key, path)


def _check_towers(config: DictConfig, key: str) -> Findings:
    """Find a model that takes more than text: its inputs may differ and yet have the same token ids."""
    settings, is_policy = model_settings(value_of(config, key)), key == f"{MODELS[0]}.path"
    towers = [name for name in settings if name in ("vision_config", "audio_config")]
    # Every published checkpoint of Qwen3.5 has a vision tower. Rows with images are refused by themselves.
    if towers and settings.get("model_type") not in (*RECURRENT_TYPES, *(IMAGE_TYPES if is_policy else ())):
        others = "" if key == "model.path" else f", or a policy of the type {' or '.join(IMAGE_TYPES)}"
        yield refusal(config, key, f"multimodal model ({', '.join(towers)}); give a text model{others}")


def check_chat_template(config: DictConfig) -> Findings:
    """Find a tokenizer without a chat template, which verl's agent loops ask for; of a folder only."""
    model = MODELS[0]
    key = f"{model}.tokenizer_path" if value_of(config, f"{model}.tokenizer_path") else f"{model}.path"
    path = value_of(config, key)
    if value_of(config, f"{model}.custom_chat_template") or not isinstance(path, str):
        return
    folder = Path(path)
    file = folder / "tokenizer_config.json"
    if not file.is_file() or any((folder / name).exists() for name in TEMPLATES):
        return
    if not json.loads(file.read_text()).get("chat_template"):
        remedy = f"its tokenizer has no chat template; give {model}.custom_chat_template, or add chat_template.jinja"
        yield refusal_here(config, key, remedy)


def _check_hub_name(config: DictConfig, key: str, name: str) -> Findings:
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        yield refusal_here(config, key, f"{missing(name, 'folder')}, or a name on the hub (owner/model)")
        return
    if constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(name, "config.json"), str):
        problem = "no such folder, and HF_HUB_OFFLINE is set while the hub's cache lacks it"
        yield refusal_here(config, key, f"{problem}; correct the path, or download it first (hf download {name})")


def check_folders(config: DictConfig) -> Findings:
    """Find folders that the run writes to and that cannot be made or written to."""
    for key, instead in {"tree.dump_dir": ", or null to store no trees", "trainer.default_local_dir": ""}.items():
        name = value_of(config, key)
        if not isinstance(name, str):
            continue
        if has_scheme(name):
            yield refusal(config, key, f"this must be a local folder; give one{instead}")
            continue
        folder = Path(name).absolute()
        existing = next(each for each in (folder, *folder.parents) if each.exists())
        if not existing.is_dir():
            yield refusal_here(config, key, f"{existing} is a file; give another folder{instead}")
        elif (problem := _cannot_write(existing)) is not None:
            yield refusal_here(
                config, key, f"{existing} cannot be written to ({problem}); give another folder{instead}"
            )


def _cannot_write(folder: Path) -> str | None:
    """Return why nothing can be made in a folder, or None. Only a try tells: root may write anywhere but in /proc."""
    try:
        with tempfile.TemporaryDirectory(dir=folder):
            return None
    except OSError as error:
        return error.strerror


CHECKS: tuple[Check, ...] = (
    check_data_files,
    check_text_rows,
    check_models,
    check_chat_template,
    check_folders,
)
