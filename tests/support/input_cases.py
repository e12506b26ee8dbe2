"""A valid configuration: the CPU profile with a model folder and data files that exist."""

import functools
import json
import pickle
import tempfile
from pathlib import Path

import omegaconf.base
import pyarrow
import pyarrow.parquet
import pytest
from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.checks import validate
from verl_tree.launch.command.composition import compose_config

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
"""Those of the composed model, whose memory is computed."""

FOLDER = tempfile.TemporaryDirectory()


def write_model(folder: Path, **settings: object) -> Path:
    """Make a model folder with a config.json, and a file where weights are looked for."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **settings}))
    (folder / "model.safetensors").touch()
    return folder


def write_rows(path: Path, *columns: str, num_rows: int = 1024) -> Path:
    """Make a parquet file of equal rows, as many as verl's default batch has, with messages where verl reads some."""
    messages = [{"role": "user", "content": "a"}]
    row = {column: messages if column in ("prompt", "messages") else "a" for column in ("prompt", *columns)}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row] * num_rows), path)
    return path


omegaconf.base.parse = functools.cache(omegaconf.base.parse)
"""Interpolations are parsed once: the same 130 are resolved for each of some hundred configurations."""


@functools.cache
def _composed(*engine: str) -> bytes:
    rows, model = write_rows(Path(FOLDER.name) / "rows.parquet"), write_model(Path(FOLDER.name) / "model", **SIZES)
    files = [f"data.train_files={rows}", f"data.val_files={rows}"]
    models = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
    config = compose_config(["profile=cpu", *files, *models, "actor_rollout_ref.rollout.n=4", *engine])
    OmegaConf.set_struct(config, False)
    return pickle.dumps(config)


def composed(*engine: str) -> DictConfig:
    """Return a copy of the CPU configuration before its interpolations are resolved, of FSDP2 or another engine."""
    return pickle.loads(_composed(*engine))


def resolved(*overrides: str) -> DictConfig:
    """Return the CPU configuration with values replaced. To save time, Hydra composes it only once for an engine."""
    engine = [each for each in overrides if each.startswith("model_engine=")]
    config = composed(*engine)
    config.merge_with_dotlist([each.lstrip("+") for each in overrides if each not in engine])
    OmegaConf.resolve(config)
    return config


def refusal(*overrides: str) -> str:
    """Return why the configuration with these values is refused."""
    with pytest.raises(ValueError, match="=") as error:
        validate(resolved(*overrides))
    return str(error.value)


@functools.cache
def _composed_sft() -> bytes:
    rows = write_rows(Path(FOLDER.name) / "sft.parquet", "messages")
    model = write_model(Path(FOLDER.name) / "model", **SIZES)
    config = compose_config(
        ["trainer.device=cpu", f"data.train_files={rows}", f"model.path={model}"], default_name="tree_sft"
    )
    OmegaConf.set_struct(config, False)
    return pickle.dumps(config)


def resolved_sft(*overrides: str) -> DictConfig:
    """Return a valid configuration of fine-tuning with values replaced."""
    config: DictConfig = pickle.loads(_composed_sft())
    config.merge_with_dotlist(list(overrides))
    OmegaConf.resolve(config)
    return config
