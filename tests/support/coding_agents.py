"""Coding agents as people run them, unchanged, against the gateway; only the engine behind it is scripted.

A row of `AGENTS` says how one is installed and started, and what its model answers, in the tools that it offers. The
agent reads two files, repairs one, runs the test, and lets two sub-agents review the files, where it has sub-agents.

What was sent is kept in `tests/unit/gateway/agents`, shortened (`Requests`): a fast test replays it without the agents.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uv
from gateway_cases import Served, StreamingEngine, served, text_of
from scripted_llm import END, decode

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.session_tree import SessionTree

BUG, REPAIRED = "return a - b", "return a + b"
FILES = {
    "calc.py": f"def add(a, b):\n    {BUG}\n",
    "test_calc.py": "from calc import add\n\nassert add(2, 3) == 5\nprint('calc is right')\n",
}
TASK = "test_calc.py fails. Repair calc.py, run the test, and let a sub-agent review each file."
REVIEWS = {name: f"Review {name}." for name in FILES}
VERDICT, ANSWER = "It is right.", "calc.py is repaired."
MAIN = "main"
"""The agent that has the task; its sub-agents are named by the files that they review."""

KEPT = Path(__file__).parents[1] / "unit" / "gateway" / "agents"
"""Where what the agents sent is kept."""

KEY = "GATEWAY_KEY"
"""Where the environment of an agent has the gateway's key."""

Turn = str | Callable[[str], str]
"""What the model says, or a function of the prompt that says it."""


def call(name: str, **arguments: object) -> str:
    """Return a tool call as Qwen's models write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thinking(*calls: str) -> str:
    """Return calls behind a thought and a word, with the blank lines that models write."""
    return "\n".join(["<think>\nI read them first.\n</think>\n\nLet me see.\n", *calls])


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """How an agent is installed and started, and what its model says.

    `package` is one of npm or of PyPI with all that has to be fixed, `program` the path to the program in the folder of
    the package, `arguments` those of a run at the base URL of a session, `environment` what else it is told. `turns`
    are those of the agent, `review` those of a sub-agent that reviews a file; None if there are no sub-agents.
    """

    package: str
    program: str
    path: str
    arguments: Callable[[str], list[str]]
    environment: Callable[[str], Mapping[str, str]]
    turns: Sequence[Turn]
    review: Callable[[str], Sequence[Turn]] | None

    @property
    def names(self) -> tuple[str, ...]:
        """The agent and its sub-agents."""
        return (MAIN, *([] if self.review is None else FILES))

    def reply(self, prompt: str) -> str:
        """Return the turn that comes next in a conversation."""
        who, since = _speaker(prompt)
        turns = self.turns if who == MAIN or self.review is None else self.review(who)
        turn = turns[since.count("<|im_start|>assistant\n") - 1]
        return turn if isinstance(turn, str) else turn(prompt)


def _speaker(prompt: str) -> tuple[str, str]:
    """Return who is asked, and the conversation since it was given its task."""
    for name, asked in REVIEWS.items():
        _, found, since = prompt.rpartition(f"<|im_start|>user\n{asked}{END}")
        if found:
            return name, since
    assert TASK in prompt
    return MAIN, prompt.partition(TASK)[2]


def _codex(url: str) -> list[str]:
    provider = f'model_providers.gateway={{name="gateway", base_url="{url}", wire_api="responses", env_key="{KEY}"}}'
    config = ["-c", 'model_provider="gateway"', "-c", provider, "-c", "features.view_image=false"]
    return [
        "exec",
        "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox",
        "-m",
        "policy",
        *config,
        TASK,
    ]


def _codex_waits(prompt: str) -> str:
    # One call each: it waits for the first of its targets.
    agents = re.findall(r'"agent_id":"([^"]+)"', prompt)
    return "\n".join(call("multi_agent_v1.wait_agent", targets=[each], timeout_ms=60000) for each in agents)


def _codex_runs(*commands: str) -> list[str]:
    return [call("exec_command", cmd=command) for command in commands]


def _opencode(package: str) -> Callable[[str], Mapping[str, str]]:
    def environment(url: str) -> Mapping[str, str]:
        options = {"baseURL": url, "apiKey": f"{{env:{KEY}}}"}
        config = {
            "provider": {"gateway": {"npm": package, "options": options, "models": {"policy": {}}}},
            "permission": {"*": "allow"},
            "agent": {"title": {"disable": True}},
            "autoupdate": False,
        }
        return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}

    return environment


_OPENCODE = {
    "package": "npm:opencode-ai@1.18.33",
    "program": "node_modules/.bin/opencode",
    "arguments": lambda _: ["run", "-m", "gateway/policy", TASK],
    "turns": (
        thinking(*(call("read", filePath=name) for name in FILES)),
        "\n\n" + call("edit", filePath="calc.py", oldString=BUG, newString=REPAIRED),
        "Now the test.\n" + call("bash", command="python3 test_calc.py", timeout=60000.0, description="Runs the test"),
        "\n".join(
            call("task", description=f"Reviews {name}", prompt=asked, subagent_type="general")
            for name, asked in REVIEWS.items()
        ),
        ANSWER,
    ),
    "review": lambda name: (call("read", filePath=name), VERDICT),
}

AGENTS = {
    "codex": CodingAgent(
        package="npm:@openai/codex@0.169.0",
        program="node_modules/.bin/codex",
        path="/responses",
        arguments=_codex,
        environment=lambda _: {},
        turns=(
            thinking(*_codex_runs("cat calc.py", "cat test_calc.py")),
            "\n\n" + _codex_runs(f"sed -i 's/{BUG}/{REPAIRED}/' calc.py")[0],
            "Now the test.\n" + _codex_runs("python3 test_calc.py")[0],
            "\n".join(call("multi_agent_v1.spawn_agent", message=asked) for asked in REVIEWS.values()),
            _codex_waits,
            ANSWER,
        ),
        review=lambda name: (*_codex_runs(f"cat {name}"), VERDICT),
    ),
    "opencode_chat": CodingAgent(
        path="/chat/completions", environment=_opencode("@ai-sdk/openai-compatible"), **_OPENCODE
    ),
    "opencode_messages": CodingAgent(path="/messages", environment=_opencode("@ai-sdk/anthropic"), **_OPENCODE),
    "mini_swe_agent": CodingAgent(
        package="pypi:mini-swe-agent==2.4.6 litellm==1.110.2",
        program="bin/mini",
        path="/chat/completions",
        arguments=lambda _: ["-m", "openai/policy", "-t", TASK, "-y", "--exit-immediately", "-o", "trajectory.json"],
        environment=lambda url: {
            "OPENAI_BASE_URL": url,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        turns=(
            thinking(*(call("bash", command=f"cat {name}") for name in FILES)),
            "\n\n" + call("bash", command=f"sed -i 's/{BUG}/{REPAIRED}/' calc.py"),
            "Now the test.\n" + call("bash", command="python3 test_calc.py"),
            call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {ANSWER}"),
        ),
        review=None,
    ),
}


def as_lines(requests: Iterable[Mapping[str, Any]]) -> str:
    """Return requests as the JSON of a file, a line each."""
    return "[\n" + ",\n".join(map(json.dumps, requests)) + "\n]\n"


def install(package: str, folder: Path) -> None:
    """Install a package into a folder. Raise CalledProcessError if no registry has it."""
    registry, _, wanted = package.partition(":")
    if registry == "npm":
        commands = [["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", wanted]]
    else:
        python = folder / "bin" / "python"
        commands = [
            [uv.find_uv_bin(), "venv", "--quiet", "--python", sys.executable, folder],
            [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", python, *wanted.split()],
        ]
    for command in commands:
        subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass(frozen=True, slots=True)
class AgentRun:
    """What a run of an agent left: what it printed, its tree, and what it sent."""

    printed: str
    tree: SessionTree
    sent: list[dict[str, Any]]


async def run_agent(agent: CodingAgent, *, program: Path, folder: Path, timeout_s: float = 400) -> AgentRun:
    """Run an agent in a folder, with a home of its own. Raise AssertionError if it fails or takes longer."""
    work, home = folder / "work", folder / "home"
    for each in (work, home):
        each.mkdir()
    for name, text in FILES.items():
        (work / name).write_text(text)
    engine, asked = StreamingEngine(agent.reply), []
    async with served() as server:
        server.gateway.app.add_middleware(_Recorder, asked=asked)
        session = server.open("s", engine)
        url, key = server.address.session_url("s"), server.address.api_key
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), KEY: key, "OPENAI_API_KEY": key}
        process = await asyncio.create_subprocess_exec(
            program,
            *agent.arguments(url),
            cwd=work,
            env={**environment, **agent.environment(url)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            printed, log = await asyncio.wait_for(process.communicate(), timeout_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, f"{printed.decode()[-2000:]}\n{log.decode()[-4000:]}"
        assert [each for each in asked if each.status != 200] == []
        calls = {response: engine.log[index] for response, (index,) in session.calls_of_response.items()}
    sent = [each.as_sent(calls, folder=str(folder)) for each in asked]
    return AgentRun(printed.decode(), engine.tree, sent)


_CALL_ID = re.compile(r"call_[0-9a-f]{24}")
_RESPONSE_ID = re.compile(r'"id": ?"((?:chatcmpl-|resp_|msg_)[0-9a-f]+)"')


class _Asked:
    """One request as it came, and its answer."""

    def __init__(self, scope: Mapping[str, Any]) -> None:
        self.path = scope["path"].partition("/v1")[2]
        self.status = 0
        self.body, self.answer = bytearray(), bytearray()

    def __repr__(self) -> str:
        return f"{self.path}: {self.status} {bytes(self.answer[:2000])!r}"

    def as_sent(self, calls: Mapping[str, tuple[list[int], list[int]]], *, folder: str) -> dict[str, Any]:
        """Return it with who asked, what the model said, and the ids of its tool calls; `calls` are of responses."""
        answer = self.answer.decode()
        found = _RESPONSE_ID.search(answer)
        assert found is not None
        prompt, sampled = map(decode, calls[found[1]])
        return {
            "by": _speaker(prompt)[0],
            "path": self.path,
            "reply": sampled.removesuffix(END),
            "calls": list(dict.fromkeys(_CALL_ID.findall(answer))),
            "body": json.loads(self.body.decode().replace(folder, "")),
        }


class _Recorder:
    """Keeps what was asked and what was answered, and changes nothing."""

    def __init__(self, app: Any, *, asked: list[_Asked]) -> None:
        self._app, self._asked = app, asked

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        each = _Asked(scope)
        self._asked.append(each)

        async def received() -> Any:
            message = await receive()
            each.body += message.get("body", b"")
            return message

        async def sent(message: Any) -> None:
            each.status = message.get("status", each.status)
            each.answer += message.get("body", b"")
            await send(message)

        await self._app(scope, received, sent)


_MAX_LEN = 200


def shortened(sent: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests of a run for a file: long texts cut, ids of calls numbered, and what repeats left out.

    A request with `like` has the body of that earlier one, but for the fields in its own `body`, and with what is in
    `added` behind the lists of these names.
    """
    ids = dict.fromkeys(each for request in sent for each in request["calls"])
    named = {each: f"call#{number:02}" for number, each in enumerate(ids)}
    result: list[dict[str, Any]] = []
    bodies: list[dict[str, Any]] = []
    for request in sent:
        body = json.loads(_CALL_ID.sub(lambda found: named[found[0]], json.dumps(_cut(request["body"]))))
        short = {**request, "calls": [named[each] for each in request["calls"]], "body": body}
        alike = [n for n, each in enumerate(bodies) if list(each) == list(body) and each["tools"] == body["tools"]]
        if alike:
            like = max(alike, key=lambda n: (sent[n]["by"] == request["by"], n))
            before = bodies[like]
            new = {name: value for name, value in body.items() if value != before[name]}
            longer = [name for name, value in new.items() if _begins(value, before[name])]
            added = {name: new.pop(name)[len(before[name]) :] for name in longer}
            short |= {"like": like, "body": new, "added": added}
        bodies.append(body)
        result.append(short)
    return result


def bodies_of(requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the whole bodies of shortened requests."""
    bodies: list[dict[str, Any]] = []
    for request in requests:
        before = bodies[request["like"]] if "like" in request else {}
        longer = {name: before[name] + more for name, more in request.get("added", {}).items()}
        bodies.append({**before, **request["body"], **longer})
    return bodies


def _begins(value: Any, beginning: Any) -> bool:
    return isinstance(value, list) and value[: len(beginning)] == beginning


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MAX_LEN else value[:_MAX_LEN] + "..."
    if isinstance(value, list):
        return [_cut(each) for each in value]
    if isinstance(value, dict):
        # Of tools and of their parameters.
        is_told = "parameters" in value or "input_schema" in value or "type" in value
        return {name: _cut(each) for name, each in value.items() if not (name == "description" and is_told)}
    return value


async def replay(server: Served, requests: Sequence[Mapping[str, Any]]) -> SessionTree:
    """Send the requests of a file one after another, with the ids that the gateway gives now; return the tree."""
    replies = iter([request["reply"] for request in requests])
    engine = StreamingEngine(lambda _: next(replies))
    server.open("s", engine)
    url, headers = server.address.session_url("s"), {"Authorization": f"Bearer {server.address.api_key}"}
    ids: dict[str, str] = {}
    for request, body in zip(requests, bodies_of(requests), strict=True):
        content = json.dumps(body)
        for named, given in ids.items():
            content = content.replace(named, given)
        answer = await server.http.post(url + request["path"], content=content, headers=headers)
        assert answer.status_code == 200, answer.text
        ids |= zip(request["calls"], dict.fromkeys(_CALL_ID.findall(answer.text)), strict=True)
    return engine.tree


def check_tree(agent: CodingAgent, tree: SessionTree, *, sent: Sequence[Mapping[str, Any]]) -> None:
    """Assert that each agent is one leaf with all that was sampled for it, and that sub-agents share what is before."""
    said: dict[str, list[str]] = {name: [] for name in agent.names}
    for request in sent:
        said[request["by"]].append(request["reply"] + END)
    reviews = {} if agent.review is None else {name: len(agent.review(name)) for name in FILES}
    assert {name: len(turns) for name, turns in said.items()} == {MAIN: len(agent.turns), **reviews}
    leaves = {decode(leaf.token_ids[leaf.is_generated].tolist()): text_of(leaf) for leaf in tree.leaves()}
    assert set(leaves) == {"".join(turns) for turns in said.values()}
    assert {call.left_out for call in tree.calls} == {None}
    kinds = Counter(call.kind for call in tree.calls)
    assert kinds.pop(CallKind.CONTINUATION) == len(tree.calls) - len(said)
    # The scripted chat template begins all prompts alike, with the tools.
    assert kinds == Counter([CallKind.ROOT, *[CallKind.REWRITE] * len(reviews)])
    if reviews:
        first, second = (leaves["".join(said[name])] for name in FILES)
        num_shared = next(n for n, pair in enumerate(zip(first, second, strict=False)) if len(set(pair)) == 2)
        assert first[:num_shared].endswith("<|im_start|>user\nReview ")
