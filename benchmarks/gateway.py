"""Measures how many sessions one gateway serves at once: calls a second, delays, processor time and memory. JSON.

The gateway is a process on one core, as in an agent loop worker. Tokenizer, chat format, tool parser and recorder are
real. verl's client is a replay that takes as long as a vLLM server that gives each session 40 tokens a second. The
agents are a process on another core, which sends what the `openai` client sends, but through aiohttp, which takes less
time. An agent makes four calls. The first has 1,000 tokens, and each next one 1,000 more: 200 of thought and tool call,
800 of result, which comes after `tool_s` seconds on average. Agents begin within one such round, in the case "at once"
in one moment. An agent before them warms everything up. A call that is refused with 429 is sent again, no other one is.

    overhead  what a call takes beyond the engine's time
    lost      calls without the right answer, and sessions whose leaf is not, token for token, what was sent and sampled

    PYTHONPATH=. python benchmarks/gateway.py --out docs/benchmarks/data/gateway.json
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
from capture import ROOT, train_tokenizer
from harness import environment, new_parser, peak_bytes, print_table, write_json
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from typing_extensions import override
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from recipes.demo.tokenizer import CHAT_TEMPLATE, END_OF_TURN
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import ChatFormat, ClientEngine, Gateway, GatewayLimits, SessionSettings, serve

NUM_TURNS, TASK_LEN, ANSWER_LEN, RESULT_LEN = 4, 1000, 200, 800
NUM_TEXTS = 64  # of a kind; agents and turns take them in turn
SHELL = {"name": "shell", "description": "Run a command.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": SHELL}]
SETTINGS = SessionSettings(sampling={"temperature": 1.0, "logprobs": True}, context_len=2**15)
WARM_UP = -1  # the agent whose engine and tools take no time


@dataclass(frozen=True, slots=True)
class Case:
    sessions: int
    tool_s: float = 5.0
    tokens_per_s: float = 40.0
    cores: int = 1  # of the gateway; the agents have the second one
    max_calls: int = 2**20  # as in the loop `blackbox`
    at_once: bool = False


CASES = [Case(each) for each in (10, 100, 500, 1000, 1500, 2500, 5000)]
CASES += [Case(5000, at_once=True), Case(5000, cores=2), Case(5000, tool_s=55.0)]
CASES += [Case(2500, max_calls=GatewayLimits().max_calls)]


class Script:
    """What agents send and what the engine answers, and how long it and the tools take in a case."""

    case: Case

    def __init__(self) -> None:
        tokens = train_tokenizer()
        tokens.add_special_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", END_OF_TURN)])
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=END_OF_TURN)
        self.tokenizer.chat_template = CHAT_TEMPLATE
        words = re.findall(r"\w+[,.]?", " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))))
        words_per_token = len(words) / len(self.tokenizer.encode(" ".join(words)))
        draw = random.Random(0).randrange

        def texts(length: int) -> list[str]:
            num = round(length * words_per_token)
            return [" ".join(words[(start := draw(len(words) - num)) : start + num]) for _ in range(NUM_TEXTS)]

        self.tasks, self.results, self.thoughts = texts(TASK_LEN), texts(RESULT_LEN), texts(ANSWER_LEN // 2)
        calls = [json.dumps({"name": "shell", "arguments": {"command": each}}) for each in texts(ANSWER_LEN // 2)]
        pairs = zip(self.thoughts, calls, strict=True)
        self.answers = [f"{thought}\n<tool_call>\n{call}\n</tool_call>" for thought, call in pairs]
        self.answer_ids = [self.tokenizer.encode(each + END_OF_TURN) for each in self.answers]

    def task(self, agent: int) -> dict[str, Any]:
        return {"role": "user", "content": f"Task {agent}: {self.tasks[agent % NUM_TEXTS]}"}

    def answer(self, agent: int, turn: int) -> int:
        """Return the index of the answer to a call."""
        return (7 * agent + 13 * turn) % NUM_TEXTS

    def result(self, agent: int, turn: int) -> dict[str, Any]:
        return {"role": "tool", "content": self.results[(11 * agent + 5 * turn) % NUM_TEXTS]}

    def seconds(self, agent: int, turn: int) -> tuple[float, float]:
        """Return how long the engine takes for a call, and the tool after it."""
        drawn, scale = random.Random(f"{agent} {turn}"), agent != WARM_UP
        engine_s = ANSWER_LEN / self.case.tokens_per_s * drawn.uniform(0.5, 1.5)
        return scale * engine_s, scale * self.case.tool_s * drawn.uniform(0.5, 1.5)


class Replay(LLMServerClient):
    """Answers the calls of one agent, which come one after the other."""

    def __init__(self, script: Script, agent: int) -> None:
        super().__init__(config=None)
        self._script, self._agent, self._turn = script, agent, -1

    @override
    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        self._turn += 1
        token_ids = self._script.answer_ids[self._script.answer(self._agent, self._turn)]
        await asyncio.sleep(self._script.seconds(self._agent, self._turn)[0])
        log_probs = [-0.5] * len(token_ids)
        return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason="completed", extra_fields={})


def own_bytes() -> int:
    """Return the resident memory of this process without that of files."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


async def serve_sessions(pipe: Connection, script: Script) -> dict[str, Any]:
    builder = create_continuous_token_builder(script.tokenizer, hf_model_type="qwen3")
    gateway, engines = Gateway(limits=GatewayLimits(max_calls=script.case.max_calls)), {}

    def open_session(agent: int) -> None:
        engines[agent] = ClientEngine(
            RecordingClient(Replay(script, agent), tree=SessionTree(decode=script.tokenizer.decode))
        )
        parser = ToolParser.get_tool_parser("hermes", script.tokenizer)
        chat_format = ChatFormat(script.tokenizer, render=builder.build_initial_tokens, tool_parser=parser)
        gateway.open_session(str(agent), engines[agent], chat_format=chat_format, settings=SETTINGS)

    async with serve(gateway) as address:
        open_session(WARM_UP)
        pipe.send((address.url, address.api_key))
        await asyncio.to_thread(pipe.recv)
        empty_bytes = own_bytes()
        for agent in range(script.case.sessions):
            open_session(agent)
        pipe.send("opened")
        cpu_s, loop_cpu_s = time.process_time(), time.thread_time()
        await asyncio.to_thread(pipe.recv)
        cpu_s, loop_cpu_s = time.process_time() - cpu_s, time.thread_time() - loop_cpu_s
        grown_bytes, peak = own_bytes() - empty_bytes, peak_bytes()
        await asyncio.gather(*(gateway.close_session(str(agent)) for agent in engines))
    num_wrong = 0
    for agent, engine in engines.items():
        picked = [script.answer(agent, turn) for turn in range(NUM_TURNS)]
        messages = [script.task(agent)]
        for turn, each in enumerate(picked[:-1]):
            messages += [{"role": "assistant", "content": script.answers[each]}, script.result(agent, turn)]
        prompt = builder.build_initial_tokens(messages, tools=TOOLS)
        sampled = [token for each in picked for token in script.answer_ids[each]]
        found = [(leaf.token_ids.tolist(), leaf.token_ids[leaf.is_generated].tolist()) for leaf in engine.tree.leaves()]
        num_wrong += found != [(prompt + script.answer_ids[picked[-1]], sampled)]
    return {
        "cpu_s": cpu_s,
        "event_loop_cpu_s": loop_cpu_s,
        "wrong_leaves": num_wrong,
        "peak_mib": round(peak / 2**20),
        "kib_per_session": round(grown_bytes / 2**10 / script.case.sessions),
    }


def gateway_process(pipe: Connection, script: Script) -> None:
    os.sched_setaffinity(0, range(script.case.cores))
    pipe.send(asyncio.run(serve_sessions(pipe, script)))


async def run_agent(script: Script, agent: int, *, url: str, headers: dict[str, str], calls: list[Any]) -> None:
    messages = [script.task(agent)]
    connector = aiohttp.TCPConnector(keepalive_timeout=5)  # as httpx
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(600)) as http:
        for turn in range(NUM_TURNS):
            engine_s, tool_s = script.seconds(agent, turn)
            body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
            started_s = time.perf_counter()
            for num_refused in itertools.count():  # noqa: B007  # kept of the last round
                async with http.post(f"{url}/sessions/{agent}/v1/chat/completions", data=body, headers=headers) as got:
                    answer = await got.json()
                if got.status != 429:
                    break
                await asyncio.sleep(random.uniform(0.5, 1))
            ended_s, message = time.perf_counter(), answer["choices"][0]["message"]
            if message["content"].strip() != script.thoughts[script.answer(agent, turn)]:
                raise ValueError(f"agent {agent} got the answer to another call")
            calls.append((ended_s, ended_s - started_s - engine_s, num_refused))
            messages += [message, {"tool_call_id": message["tool_calls"][0]["id"], **script.result(agent, turn)}]
            await asyncio.sleep(tool_s)


def measure(script: Script, case: Case) -> dict[str, Any]:
    script.case, context = case, multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=gateway_process, args=(theirs, script), daemon=True).start()
    theirs.close()
    url, key = pipe.recv()
    client = openai.AsyncOpenAI(api_key=key)
    headers = {**client.default_headers, **client.auth_headers, "x-stainless-retry-count": "0"}
    headers = {name: value for name, value in headers.items() if isinstance(value, str)}
    calls: list[tuple[float, float, int]] = []
    run = partial(run_agent, script, url=url, headers=headers)
    asyncio.run(run(WARM_UP, calls=[]))
    pipe.send("warm")
    pipe.recv()
    started_s, cpu_s = time.perf_counter(), time.process_time()

    async def begin(agent: int) -> None:
        await asyncio.sleep((not case.at_once) * sum(script.seconds(agent, NUM_TURNS)))
        await run(agent, calls=calls)

    async def run_all() -> list[BaseException | None]:
        return await asyncio.gather(*map(begin, range(case.sessions)), return_exceptions=True)

    errors = [repr(end) for end in asyncio.run(run_all()) if end is not None]
    seconds, agents_cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    print(*errors[:3], sep="\n")
    pipe.send("ended")
    served = pipe.recv()
    gateway_cpu_s, loop_cpu_s = served.pop("cpu_s"), served.pop("event_loop_cpu_s")
    ended_s, overheads_s, refused = np.array(calls).T
    # Agents begin and end one after the other, so the middle half counts.
    num_middle = np.sum(np.abs(ended_s - started_s - seconds / 2) < seconds / 4)
    return {
        **asdict(case),
        "calls": len(calls),
        "lost": NUM_TURNS * case.sessions - len(calls) + served.pop("wrong_leaves"),
        "refused_and_retried": int(refused.sum()),
        "seconds": round(seconds, 1),
        "calls_per_s": round(float(num_middle) / (seconds / 2), 1),
        "overhead_median_ms": round(1000 * float(np.median(overheads_s)), 1),
        "overhead_p99_ms": round(1000 * float(np.quantile(overheads_s, 0.99)), 1),
        "gateway_core": round(gateway_cpu_s / seconds, 2),
        "agents_core": round(agents_cpu_s / seconds, 2),
        "cpu_ms_per_call": round(1000 * gateway_cpu_s / len(calls), 2),
        "event_loop_ms_per_call": round(1000 * loop_cpu_s / len(calls), 2),
        **served,
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--most", type=int, default=5000, help="leave out cases with more sessions")
    parser.add_argument("--pace", type=float, default=1.0, help="so many times faster tools and engine, to try it")
    options = parser.parse_args()
    os.sched_setaffinity(0, {1})
    script, rows = Script(), []
    for case in CASES:
        if case.sessions <= options.most:
            faster = {"tool_s": case.tool_s / options.pace, "tokens_per_s": case.tokens_per_s * options.pace}
            rows.append(measure(script, replace(case, **faster)))
            print(rows[-1], flush=True)
    print_table(rows)
    write_json({**environment(options), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
