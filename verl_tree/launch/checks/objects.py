"""Checks that the engine and the user's functions and classes exist, which verl looks for late."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    Check,
    Findings,
    missing,
    refusal,
    refusal_here,
    refusal_to_run,
    value_of,
)
from verl_tree.launch.checks.source import (
    NotInSourceError,
    Source,
    look_up,
    module_problem,
    read_source,
    source_of,
    way_to,
)
from verl_tree.launch.command.composition import model_engine


def check_engine(config: DictConfig) -> Findings:
    """Find an engine whose package is not installed; verl says so when the workers build their engines."""
    engine = model_engine(config)
    if engine.package is not None and find_spec(engine.package) is None:
        remedy = f"{engine.title} is not installed, or not on PYTHONPATH (docs/engines.md)"
        yield refusal_to_run(config, "model_engine", remedy)


def check_data_code(config: DictConfig) -> Findings:
    """Find a data set class that does not exist."""
    return _check_object(config, "data.custom_cls.path", "data.custom_cls.name")


def check_reward_code(config: DictConfig) -> Findings:
    """Find reward functions and managers that do not exist, and managers that nobody registered."""
    yield from _check_object(config, "reward.custom_reward_function.path", "reward.custom_reward_function.name")
    manager, module_key = config.reward.reward_manager, "reward.reward_manager.module.path"
    if manager.source == "importlib":
        if not value_of(config, module_key):
            yield refusal(config, module_key, "source=importlib reads a class from it; give a file")
        yield from _check_object(config, module_key, "reward.reward_manager.name")
    # The default exists. Looking up another name takes an import that the driver does not need otherwise.
    elif manager.source == "register" and manager.name != "naive":
        from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER

        if manager.name not in REWARD_MANAGER:
            known = ", ".join(sorted(REWARD_MANAGER))
            remedy = f"no such reward manager; choose one of {known}, or import yours (source=importlib, module.path)"
            yield refusal_here(config, "reward.reward_manager.name", remedy, brings_code=True)


def _check_object(config: DictConfig, path_key: str, name_key: str) -> Findings:
    """Check an object that verl loads from a file or a `pkg://` module (`load_extern_object`)."""
    from verl.utils.import_utils import FILE_PATH_PREFIX, PKG_PATH_PREFIX

    path, name = value_of(config, path_key), value_of(config, name_key)
    if not path:
        return
    if not isinstance(path, str):
        yield refusal(config, path_key, "give the path of a file, or pkg:// and a module")
        return
    if not name:
        yield refusal(config, name_key, f"give the name of what shall be read from {path_key}={path}")
    if path.startswith(PKG_PATH_PREFIX):
        module = path.removeprefix(PKG_PATH_PREFIX).replace("/", ".")
        if problem := module_problem(f"{module}.{name}"):
            yield refusal_here(config, path_key, f"{problem}; {way_to(module)}", brings_code=True)
        elif name:
            yield from _check_name(config, name_key, lambda: source_of(module))
        return
    file = Path(path.removeprefix(FILE_PATH_PREFIX))
    if not file.is_file():
        # A relative path may exist in the working directory that Ray gives its processes.
        yield refusal_here(config, path_key, missing(str(file), "file"), brings_code=not file.is_absolute())
    elif name:
        yield from _check_name(config, name_key, lambda: read_source(file))


def _check_name(config: DictConfig, name_key: str, read: Callable[[], Source | None]) -> Findings:
    """Find an object that its file does not have, or a file that is not valid Python."""
    try:
        look_up(read(), value_of(config, name_key))
    except NotInSourceError as error:
        yield refusal_here(config, name_key, str(error), brings_code=True)


CHECKS: tuple[Check, ...] = (check_data_code, check_reward_code, check_engine)
