"""Sets what a training run sets in its processes (`verl_tree.launch.command.environment`).

- The module of the CPU platform, named to verl, which chooses its platform for good when used. verl imports the module
  when it is imported itself, so tests without verl wait for nothing.
- The level of the root logger, which vLLM 0.24 would raise to ERROR: tests read warnings.

A test that is a coroutine runs in an event loop of its own.

Tests with random input (`tests/support/fuzzing.py`) take 1,000 new inputs where asked for.

A YAML file is parsed once: parsing is half of the time of composing a configuration, which hundreds of tests do.

The garbage collector's threshold is that of `tests/support/sitecustomize.py`, for the reason given there.
"""

import asyncio
import gc
import inspect
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from omegaconf import OmegaConf

gc.set_threshold(20_000)
settings.register_profile("fuzz", max_examples=1000, deadline=None)
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_tree.cpu.platform")
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")

_parse, _parsed = OmegaConf.load, {}


def _load(file: Any) -> Any:
    path = file if isinstance(file, str | Path) else getattr(file, "name", None)
    if path is None:
        return _parse(file)
    text = Path(path).read_text(encoding="utf-8")
    if text not in _parsed:
        _parsed[text] = pickle.dumps(_parse(file))
    return pickle.loads(_parsed[text])


OmegaConf.load = staticmethod(_load)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine, which pytest itself would skip."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the inputs of all training runs of a file."""
    from tiny_run import make_inputs  # imports transformers, which most tests do without

    folder = tmp_path_factory.mktemp("runs")
    make_inputs(folder)
    return folder
