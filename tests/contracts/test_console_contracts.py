"""How Ray and verl print what the other processes write: what `verl_tree.launch.run.lines` reads."""

import asyncio
import io
import logging
from contextlib import redirect_stderr, redirect_stdout

import pytest
from ray._private.ray_constants import LOGGER_FORMAT
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.worker import print_to_stdstream
from scripted_llm import tokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.logging_utils import configure_verl_logging
from verl.utils.tokenizer.continuous_token_wiring import infer_continuous_token_model_family

from verl_tree.launch.command.environment import JOB_VARIABLE
from verl_tree.launch.run.lines import LineFilter, split_process, without_colours


@pytest.mark.parametrize("is_err", [False, True])
def test_ray_prints_to_the_streams_of_the_moment_with_the_name_in_front(is_err: bool) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    here = {"ip": "10.0.0.1", "localhost": "10.0.0.1", "is_err": is_err, "job": "1"}
    with redirect_stdout(stdout), redirect_stderr(stderr):
        for whose in (
            {"pid": 12, "actor_name": "WorkerDict", "lines": ["a text", "  and more"]},
            {"pid": 13, "actor_name": "WorkerDict", "lines": ["elsewhere"], "ip": "10.0.0.2"},
            {"pid": 14, "lines": ["unnamed"]},
            {"pid": "raylet", "lines": ["killed by the node"]},
        ):
            print_to_stdstream({**here, **whose}, ignore_prefix=False)
    printed, other = (stderr, stdout) if is_err else (stdout, stderr)
    assert [split_process(without_colours(line)) for line in printed.getvalue().splitlines()] == [
        ("WorkerDict", "a text"),
        ("WorkerDict", "  and more"),
        ("WorkerDict", "elsewhere"),
        ("?", "unnamed"),
        ("", "(raylet) killed by the node"),
    ]
    assert other.getvalue() == ""


@pytest.fixture
def verls_line(monkeypatch: pytest.MonkeyPatch) -> logging.Formatter:
    """Return verl's format of a line in a task runner, and restore its logger."""
    logger = logging.getLogger("verl")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, vars(logger)[name])
    configure_verl_logging()
    formatter = logger.handlers[0].formatter
    assert formatter is not None
    return formatter


def test_levels_are_read_from_the_lines_of_verl_and_ray(verls_line: logging.Formatter) -> None:
    for formatter in (verls_line, logging.Formatter(LOGGER_FORMAT)):
        levels = {}
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            record = logging.LogRecord("verl", level, "file.py", 3, "a text", None, None)
            levels[level] = LineFilter().shows(formatter.format(record))
        assert levels == {logging.INFO: False, logging.WARNING: True, logging.ERROR: True}


def test_a_tool_call_that_cannot_be_read_is_one_line_for_the_log(
    verls_line: logging.Formatter, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("verl").addHandler(caplog.handler)
    parser = ToolParser.get_tool_parser("hermes", tokenizer())
    text = "<tool_call>not JSON</tool_call>"
    asyncio.run(parser.extract_tool_calls(tokenizer().encode(text)))
    (line,) = (verls_line.format(record) for record in caplog.records)
    assert line.startswith("ERROR:")
    assert not LineFilter().shows(line)


def test_a_model_type_that_verl_has_no_rules_for_is_a_line_for_the_log(
    verls_line: logging.Formatter, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("verl").addHandler(caplog.handler)
    infer_continuous_token_model_family(hf_model_type="llama")
    (line,) = (verls_line.format(record) for record in caplog.records)
    assert line.startswith("WARNING:")
    assert not LineFilter().shows(line)


def test_the_command_of_a_job_is_told_of_its_environment() -> None:
    assert RAY_JOB_CONFIG_JSON_ENV_VAR == JOB_VARIABLE
