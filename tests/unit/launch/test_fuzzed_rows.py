"""Random rows and files: a data file is accepted, or refused with its option, its name, the row and the remedy."""

import functools
import io
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fuzzing import fuzzed
from hypothesis import example, given
from hypothesis import strategies as st
from input_cases import refusal, resolved
from omegaconf import DictConfig

pytest.importorskip("verl")

from verl_tree.launch.checks import code, inputs, objects, prompts, validate
from verl_tree.launch.checks.prompts import message_problem

GOOD = [{"role": "user", "content": "a"}]
CONTENT = st.one_of(
    st.text(max_size=3), st.none(), st.just([{"type": "text", "text": "a"}]), st.just(["a"]), st.just(1)
)
MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.one_of(st.just("user"), st.none(), st.just(1)), "content": CONTENT}
)
PROMPT = st.one_of(st.just(GOOD), st.lists(MESSAGE, max_size=3), st.none(), st.text(max_size=3), st.integers(0, 2))
AGENT = st.one_of(
    st.just("tool_agent"), st.none(), st.text(max_size=3), st.integers(0, 2), st.lists(st.just("tool_agent"))
)


@functools.cache
def config() -> DictConfig:
    return resolved()


def findings(file: Path) -> list[str]:
    """Return why a file of rows is refused."""
    config().data.train_files = config().data.val_files = str(file)
    checks = (*inputs.CHECKS, *prompts.CHECKS, *code.CHECKS, *objects.CHECKS)
    return [each.message for check in checks for each in check(config())]


def template(messages: list[dict[str, Any]]) -> str:
    """Do with messages what chat templates do."""
    parts = [(each["role"], each["content"] or "") for each in messages]
    texts = [
        (role, content if isinstance(content, str) else "".join(p["text"] for p in content)) for role, content in parts
    ]
    return "".join(f"<{role}>".upper() + content for role, content in texts)


@fuzzed(40)
@given(st.dictionaries(st.sampled_from(["prompt", "agent_name", "images"]), st.lists(AGENT | PROMPT, max_size=3)))
@example({"prompt": [GOOD, "a"][:1], "agent_name": [["tool_agent"]]})
@example({"prompt": [None]})
@example({"prompt": []})
@example({"agent_name": ["tool_agent"]})
@example({"agent_name": [None]})
def test_a_table_is_accepted_or_refused(columns: dict[str, list]) -> None:
    num_rows = min(map(len, columns.values()), default=0)
    try:
        table = pa.table({name: values[:num_rows] for name, values in columns.items()})
        pq.write_table(table, io.BytesIO())
    except (pa.ArrowException, TypeError):
        return  # no file can have these values in one column
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        pq.write_table(table, file)
        found = findings(file)
    for message in found:
        assert message.startswith(("data.", "actor_rollout_ref."))
        assert "=" in message.partition(": ")[0]
        assert ";" in message, "the remedy"
    if not found:
        assert num_rows
        assert all(template(each) for each in table.column("prompt").to_pylist())


@fuzzed(15)
@given(st.binary(max_size=40) | st.just(b"PAR1" * 5))
@example(b"")
def test_a_damaged_file_is_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.parquet"
        file.write_bytes(content)
        messages = findings(file)
    assert [message.partition("=")[0] for message in messages] == ["data.train_files", "data.val_files"]
    assert all("cannot be read as parquet" in message and "give another file" in message for message in messages)


@fuzzed(40)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda each: (
            st.lists(each) | st.dictionaries(st.text(max_size=2) | st.sampled_from(["role", "content", "text"]), each)
        ),
    )
    | st.lists(MESSAGE)
)
def test_messages_that_are_accepted_can_be_rendered(value: object) -> None:
    if message_problem(value) is None:
        assert isinstance(value, list)
        for message in value:
            assert isinstance(message["role"], str)
            assert isinstance(message["content"], str | None) or all(
                isinstance(part, dict) for part in message["content"]
            )


def write(path: Path, **columns: list) -> str:
    pq.write_table(pa.table(columns), path)
    return f"data.train_files={path}"


def test_rows_without_a_prompt_are_refused_with_their_number(tmp_path: Path) -> None:
    rows = tmp_path / "rows.parquet"
    messages = "a list of messages, each with `role` and `content`"
    cases = {
        "has no column 'prompt' but question; rename one, or name it in data.prompt_key": {"question": [GOOD]},
        "has no rows; give another file": {"prompt": pa.array([], pa.list_(pa.string()))},
        f"row 1, column prompt: None is no conversation; give {messages}": {"prompt": [GOOD, None]},
        f"row 1, column prompt: [] is no conversation; give {messages}": {"prompt": [GOOD, []]},
        f"row 0, column prompt: 'why?' is no conversation; give {messages}": {"prompt": ["why?"]},
        "row 0, column prompt: message 1, {'role': None, 'content': 'a'}, has no role or no content": {
            "prompt": [[*GOOD, {"role": None, "content": "a"}]]
        },
        "row 0, column prompt: the content of message 0, 7, is neither text nor a list of parts": {
            "prompt": [[{"role": "user", "content": 7}]]
        },
    }
    for problem, columns in cases.items():
        message = refusal(write(rows, **columns))
        assert message.startswith(f"data.train_files={rows}: {rows}")
        assert problem in message


def test_rows_of_other_kinds_pass_where_code_of_the_users_reads_them(tmp_path: Path) -> None:
    text = write(tmp_path / "text.parquet", prompt=["why?"])
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: mine\n  _target_: rollout_hooks.loops.memory.MemoryAgentLoop\n")
    validate(resolved(text, "data.train_batch_size=1", f"{code.LOOPS_KEY}={loops}"))
    source = tmp_path / "mine.py"
    source.write_text("class Rows: ...")
    other = write(tmp_path / "other.parquet", question=["why?"])
    validate(resolved(other, f"data.custom_cls.path={source}", "data.custom_cls.name=Rows"))
    validate(
        resolved(
            write(tmp_path / "q.parquet", question=[GOOD]),
            "data.prompt_key=question",
            "data.train_batch_size=1",
            f"data.val_files={tmp_path}/q.parquet",
        )
    )


def test_a_name_of_a_loop_is_a_text(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "rows.parquet", prompt=[GOOD], agent_name=[["tool_agent"]]))
    assert "the column agent_name has \"['tool_agent']\": no such agent loop" in message
