"""Random agents of four kinds, each a session of calls against the scripted engine."""

import asyncio
import json
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx
from byte_tokens import byte_level_tokenizer, encode, real_tokens
from fuzz_checks import OWN, check, check_text, decode, fingerprint
from fuzz_engine import ANSWERS, END, Engine, EngineLLM, Served, words
from gateway_cases import TOOLS
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.gateway import AsyncLLMEngine, ChatFormat, ClientEngine, Gateway, SessionSettings
from rollout_hooks.loops.branch import Branch, BranchSession

WIDE = RowLimits(100_000, 100_000, wants_log_probs=True)
SAMPLING = {"temperature": 1.0, "logprobs": True}


def new_tree(rng: random.Random) -> SessionTree:
    return SessionTree(decode=decode, max_replaced=rng.choice([64, 64, 8, 0]))


def draw_limits(rng: random.Random) -> RowLimits:
    return WIDE if rng.random() < 0.7 else RowLimits(rng.randint(4, 80), rng.randint(4, 160), wants_log_probs=True)


@dataclass(slots=True)
class Past:
    """A call as the agent knows it: what it gave, what it got, and the mask behind the prompt if it kept tokens."""

    given: list[int]
    prompt_len: int
    mask: list[int]
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class TextAgent:
    """Makes prompts out of earlier ones: exact tokens, or text that is tokenised anew."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.past: list[Past] = []

    def prompt(self) -> Past:
        rng = self.rng
        if not self.past or rng.random() < 0.05:
            return self._of_text(f"<|im_start|>system\nYou call tools.{END}\n" + self._turn().removeprefix(END))
        past = rng.choice(self.past[-5:])
        if not self.past[-1].output and rng.random() < 0.5:  # a call that failed is made again
            return Past(self.past[-1].given, self.past[-1].prompt_len, self.past[-1].mask)
        tokens, text = past.given + past.output, decode(past.given + past.output)
        kind = rng.choices(
            ["exact", "text", "retry", "rewind", "edit", "think", "written", "compact"], [5, 6, 4, 2, 1, 3, 4, 1]
        )[0]
        if kind == "retry":
            return Past(past.given, past.prompt_len, past.mask)
        if kind == "exact":
            turn = encode(self._turn(text)) if rng.random() < 0.9 else []
            mask = [*past.mask, *[1] * len(past.output), *[0] * len(turn)]
            return Past(tokens + turn, past.prompt_len, mask)
        if kind == "rewind":
            more = encode(self._turn()) if rng.random() < 0.5 else []
            return self._of_tokens(tokens[: rng.randint(1, len(tokens))] + more)
        if kind == "edit":
            text = text.replace(rng.choice(["plan", "ok", "tools", "the", "You"]), "a", 1)
        elif kind == "think":
            text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
        elif kind == "written":
            text = decode(past.given) + re.sub(r"<think>.*?</think>", "", rng.choice(ANSWERS), flags=re.DOTALL)
        elif kind == "compact":
            text = f"<|im_start|>user\nSo far: {decode(past.output)}{words(rng, 4)}"
        return self._of_text(text + self._turn(text))

    def keep(self, past: Past, served: Served) -> None:
        past.output, past.log_probs = list(served.output[: served.num_got]), served.log_probs[: served.num_got]
        self.past.append(past)

    def own_row(self, limits: RowLimits) -> AgentLoopOutput:
        """Return the last conversation as a loop's own row, cut by the loop, with a mask that is right or all ones."""
        past = self.past[-1]
        is_honest = self.rng.random() < 0.7
        response = (past.given + past.output)[past.prompt_len :][: limits.response_length]
        mask = [*past.mask, *[1] * len(past.output)][: limits.response_length]
        return AgentLoopOutput(
            prompt_ids=past.given[: past.prompt_len],
            response_ids=response,
            response_mask=mask if is_honest else [1] * len(response),
            extra_fields={OWN: is_honest},
            metrics=AgentLoopMetrics(),
        )

    def _turn(self, text: str = "") -> str:
        end = "" if text.endswith(END) else END
        return f"{end}\n<|im_start|>user\n{words(self.rng, 5)}{END}\n<|im_start|>assistant\n"

    def _of_text(self, text: str) -> Past:
        return self._of_tokens(encode(text))

    def _of_tokens(self, tokens: list[int]) -> Past:
        return Past(tokens, len(tokens), [])


async def tokens(seed: str, *, schedule: int = 0, num_rounds: int | None = None) -> tuple[Counter, list[tuple]]:
    """Run a token loop on `RecordingClient`; half of the sessions wait for each round of calls, so that they repeat."""
    rng = random.Random(seed)
    waits = rng.random() < 0.5
    # Then all calls of a round have begun before one ends.
    engine = Engine(seed, schedule=schedule, least_steps=int(waits))
    agent, limits = TextAgent(rng), draw_limits(rng)
    client = RecordingClient(engine.client, tree=new_tree(rng))
    running: list[asyncio.Task] = []
    texts: list[str] = []

    async def ask(past: Past) -> None:
        number = len(engine.served)
        texts.append(decode(past.given))
        with suppress(RuntimeError):
            await client.generate("r", prompt_ids=list(past.given), sampling_params={})
        agent_keeps.append((number, past))

    for _ in range(num_rounds or rng.randint(2, 8)):
        agent_keeps: list[tuple[int, Past]] = []
        running += [asyncio.create_task(ask(agent.prompt())) for _ in range(rng.choice([1, 1, 2, 3]))]
        if not waits:
            for _ in range(rng.randint(1, 4)):
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                rng.choice(running).cancel()
            running = [task for task in running if not task.done()] if rng.random() < 0.7 else running
        else:
            await asyncio.gather(*running, return_exceptions=True)
        for number, past in sorted(agent_keeps, key=lambda pair: pair[0]):
            agent.keep(past, engine.served[number])
    await asyncio.gather(*running, return_exceptions=True)
    # A row without a response has all of its prompt within the limits, or the loop has broken verl's contract.
    may_own = bool(agent.past) and (limits is WIDE or bool(agent.past[-1].output))
    outputs = [agent.own_row(limits)] if may_own and rng.random() < 0.4 else []
    check_text(engine, texts)
    counts = check(engine, client.tree, outputs, limits=limits, names_leaves=False)
    if not schedule and waits:
        _, other = await tokens(seed, schedule=1, num_rounds=num_rounds)
        assert fingerprint(client.tree, outputs, limits=limits) == other, "rows depend on which call ended first"
    return counts, fingerprint(client.tree, outputs, limits=limits)


async def branch(seed: str) -> Counter:
    """Run a loop of branches: fork, rewind, restart, fail, rewards, text that the model also says."""
    rng = random.Random(seed)
    engine, limit = Engine(seed), rng.choice([400, 400, 60])
    client = RecordingClient(engine.client, tree=new_tree(rng))
    prompts = [encode(f"<|im_start|>user\n{words(rng, 5)}{END}\n<|im_start|>assistant\n") for _ in range(2)]
    session = BranchSession(
        client, prompt_ids=prompts[0], sampling_params=SAMPLING, response_length=limit, prompt_length=1000
    )

    def open_branches() -> list[Branch]:
        return [each for each in session.branches if not each.is_finished and each.failure is None]

    def change(each: Branch) -> None:
        kind = rng.choices(
            ["observe", "answer", "fork", "rewind", "restart", "fail", "finish"], [5, 3, 4, 2, 1, 0.3, 1]
        )[0]
        if kind == "observe":
            each.observe(encode(f"{END}\n<|im_start|>user\n{words(rng, 4)}{END}\n<|im_start|>assistant\n"))
        elif kind == "answer":
            outputs = [served.output[: served.num_got] for served in engine.served]
            each.observe(rng.choice([*outputs, encode(rng.choice(ANSWERS) + END)]))
        elif kind == "fork" and len(session.branches) < 8:
            each.fork(rng.randint(1, 2))
        elif kind == "rewind":
            each.rewind(rng.randint(1, each.position), keep_rewards=rng.random() < 0.5)
        elif kind == "restart":
            each.restart(prompts[1])
        elif kind == "fail":
            each.fail("left")
        elif kind == "finish" and any(each.response_mask):
            each.finish(rng.random())

    async def run(each: Branch) -> None:
        for _ in range(rng.randint(1, 3)):
            if each.is_finished or each.failure is not None:
                return
            await each.generate()
            if each.failure is None and any(each.response_mask) and rng.random() < 0.3:
                each.add_reward(0.5)
            if each.failure is None and rng.random() < 0.7:
                change(each)

    for _ in range(rng.randint(1, 5)):
        chosen = open_branches()
        await asyncio.gather(*(run(each) for each in rng.sample(chosen, min(3, len(chosen)))))
        for each in open_branches():
            if rng.random() < 0.5:
                change(each)
    for each in open_branches():
        if rng.random() < 0.8 and any(each.response_mask):
            each.finish(rng.random())
    outputs = session.outputs()
    for output in outputs:
        output.extra_fields[OWN] = True
    return check(engine, client.tree, outputs, limits=RowLimits(1000, limit, True), names_leaves=bool(outputs))


def chat_format() -> ChatFormat:
    return _chat_format(byte_level_tokenizer())


@cache
def _chat_format(tokenizer: PreTrainedTokenizerFast) -> ChatFormat:
    render = create_continuous_token_builder(tokenizer, hf_model_type="qwen3").build_initial_tokens
    return ChatFormat(tokenizer, render=render, tool_parser=ToolParser.get_tool_parser("hermes", tokenizer))


class LoggedFormat:
    """A chat format that keeps the texts of the prompts that it has rendered."""

    def __init__(self) -> None:
        self.texts: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(chat_format(), name)

    def prompt_ids(self, *args: Any) -> list[int]:
        token_ids = chat_format().prompt_ids(*args)
        self.texts.add(decode(token_ids))
        return token_ids


class ChatAgent:
    """Talks to the gateway by both of its protocols; a history is a list of the protocol's own messages."""

    def __init__(self, rng: random.Random, post: Any, *, is_responses: bool) -> None:
        self.rng, self.post, self.is_responses = rng, post, is_responses
        self.histories: list[list[dict]] = []
        self.ids: list[str] = []

    def history(self) -> list[dict]:
        rng = self.rng
        if not self.histories or rng.random() < 0.1:
            return [{"role": "system", "content": "You call tools."}, self._user()]
        history = json.loads(json.dumps(rng.choice(self.histories[-4:])))
        plain = [message for message in history if message.get("role") == "assistant" and message.get("content")]
        kind = rng.choices(["go on", "retry", "cut", "edit", "think", "written", "compact"], [6, 2, 1, 1, 2, 2, 1])[0]
        if kind == "retry" and history[-1].get("role") == "assistant":
            return history[:-1]
        if kind == "cut":
            del history[rng.randint(1, len(history)) :]
        elif kind == "edit" and plain:
            rng.choice(plain)["content"] += " a"
        elif kind == "think":
            for message in plain:
                message["content"] = re.sub(r"<think>.*?</think>", "", message["content"], flags=re.DOTALL)
        elif kind == "written":
            history += [self._user(), {"role": "assistant", "content": rng.choice([*ANSWERS[:2], "12} ok"])}]
        elif kind == "compact":
            return [history[0], {"role": "user", "content": f"So far: {words(rng, 4)}"}]
        return [*history, *self._results(history[-1]), self._user()]

    async def turn(self) -> None:
        rng, history = self.rng, self.history()
        body: dict[str, Any] = {"model": "policy", "stream": rng.random() < 0.4}
        if rng.random() < 0.2:
            body["max_output_tokens" if self.is_responses else "max_tokens"] = rng.randint(1, 12)
        if self.is_responses:
            body["input"] = history
            if self.ids and rng.random() < 0.4:
                body |= {"previous_response_id": rng.choice(self.ids[-3:]), "input": [self._user()]}
            if rng.random() < 0.3:
                body["tools"] = [{"type": "function", **TOOLS[0]["function"]}]
            answer, path = await self.post(body, "responses"), "output"
            if answer is not None:
                self.ids.append(answer["id"])
                said = [_message_of(item) for item in answer[path]]
                self.histories.append([*history, *said])
            return
        body |= {"messages": history, "n": 1 if body["stream"] else rng.choice([1, 1, 2, 3])}
        if rng.random() < 0.2:
            body["stop"] = rng.choice([["ok"], "tools", ["the", "plan"]])
        if rng.random() < 0.4:
            body["tools"] = TOOLS
        answer = await self.post(body, "chat/completions")
        for choice in answer["choices"] if answer is not None else ():
            self.histories.append([*history, choice["message"]])

    def _user(self) -> dict:
        return {"role": "user", "content": words(self.rng, 5)}

    def _results(self, message: dict) -> list[dict]:
        """Return a result for each tool call of a message."""
        if message.get("type") == "function_call":
            return [{"type": "function_call_output", "call_id": message["call_id"], "output": "6"}]
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": "6"} for call in message.get("tool_calls") or ()
        ]


def _message_of(item: dict) -> dict:
    if item["type"] == "message":
        return {"role": "assistant", "content": item["content"][0]["text"] if item["content"] else ""}
    return {name: item[name] for name in ("type", "call_id", "name", "arguments")}


def _of_stream(text: str) -> dict | None:
    """Return the answer that a stream has told, or None if it ends with an error."""
    events = [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"
    ]
    if events[-1].get("type", "").startswith("response."):
        return None if events[-1]["type"] == "response.failed" else events[-1]["response"]
    if "error" in events[-1]:
        return None
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for choice in (choice for event in events for choice in event["choices"]):
        message["content"] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            call.pop("index")
            message.setdefault("tool_calls", []).append(call)
    return {"id": events[0]["id"], "choices": [{"message": message}]}


async def chat(seed: str) -> Counter:
    """Run clients of the gateway, on verl's client and on vLLM's engine, over ASGI."""
    rng = random.Random(seed)
    engine, tree, limits = Engine(seed, calls_tools=True), new_tree(rng), draw_limits(rng)
    if rng.random() < 0.5:
        session_engine = ClientEngine(RecordingClient(engine.client, tree=tree))
    else:
        session_engine = AsyncLLMEngine(recording_llm(engine, tree))
    gateway, form = Gateway(), LoggedFormat()
    session = gateway.open_session(
        "s", session_engine, chat_format=form, settings=SessionSettings(sampling={"logprobs": True, "max_tokens": 200})
    )
    headers = {"Authorization": f"Bearer {gateway.api_key}"}
    transport = httpx.ASGITransport(gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://g/sessions/s/v1/", headers=headers) as http:

        async def post(body: dict, path: str) -> dict | None:
            response = await http.post(path, json=body)
            # 502 and the like for a call that fails or is aborted; the agents ask nothing that is wrong.
            assert response.status_code == 200 or response.status_code >= 500, response.text
            if response.status_code != 200:
                return None
            answer = _of_stream(response.text) if body["stream"] else response.json()
            if answer is not None and not body.get("tools"):
                _check_answer(engine, session.calls_of_response.get(answer["id"], ()), body, answer)
            return answer

        agent = ChatAgent(rng, post, is_responses=rng.random() < 0.4)
        for _ in range(rng.randint(2, 6)):
            turns = [asyncio.create_task(agent.turn()) for _ in range(rng.choice([1, 1, 2]))]
            if rng.random() < 0.1:  # a client goes away
                await asyncio.sleep(0.001)
                turns[0].cancel()
            for error in await asyncio.gather(*turns, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error
        await gateway.close_session("s")
    gateway._threads.shutdown()
    for served in engine.served:
        assert decode(served.sent) in form.texts, "a healed prompt reads otherwise"
    return check(engine, tree, [], limits=limits, names_leaves=False)


def _check_answer(engine: Engine, calls: tuple[int, ...], body: dict, answer: dict) -> None:
    """Assert that a client got the text of its own calls."""
    if "choices" in answer:
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    else:
        texts = ["".join(part["text"] for item in answer["output"] for part in item["content"])]
    for call, text in zip(calls, texts, strict=True):
        whole = decode(engine.served[call].path[len(engine.served[call].sent) :])
        assert whole.startswith(text.rstrip("\ufffd")), "a client got the text of another call"
        assert body.get("stop") or whole.removesuffix(END).startswith(text) or text == whole


def recording_llm(engine: Engine, tree: SessionTree) -> Any:
    # Imports of vLLM take seconds.
    from vllm import RequestOutput
    from vllm.logprobs import Logprob
    from vllm.outputs import CompletionOutput

    from rollout_hooks.capture.async_llm import RecordingAsyncLLM

    def output(request_id: str, sent: list[int], index: int, served: Served, new: slice, reason: str | None) -> Any:
        pairs = zip(served.output[new], served.log_probs[new], strict=True)
        completion = CompletionOutput(
            index=index,
            text="",
            token_ids=served.output[new],
            cumulative_logprob=None,
            logprobs=[{token: Logprob(value)} for token, value in pairs],
            finish_reason=reason,
        )
        return RequestOutput(request_id, None, sent, None, [completion], finished=reason is not None)

    return RecordingAsyncLLM(EngineLLM(engine, output=output), new_tree=lambda: tree)


async def llm(seed: str) -> Counter:
    """Run a loop on `RecordingAsyncLLM`: all kinds of outputs, several samples, calls that are left."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    rng = random.Random(seed)
    engine, agent, limits, tree = Engine(seed), TextAgent(rng), draw_limits(rng), new_tree(rng)
    recording, texts = recording_llm(engine, tree), []

    async def ask(past: Past) -> None:
        params = SamplingParams(
            n=rng.choice([1, 1, 2, 3]), max_tokens=200, output_kind=rng.choice(list(RequestOutputKind))
        )
        num_before, leaves_after = len(engine.served), rng.choice([None, None, None, 1, 2])
        texts.extend([decode(past.given)] * params.n)
        outputs = recording.generate(list(past.given), params, f"r{num_before}")
        try:
            num = 0
            async for _ in outputs:
                num += 1
                if num == leaves_after:
                    break
        finally:
            await outputs.aclose()
            for number in range(num_before, min(num_before + params.n, len(engine.served))):
                served = engine.served[number]
                agent.keep(Past(past.given, past.prompt_len, past.mask), served)

    running: list[asyncio.Task] = []
    for _ in range(rng.randint(2, 7)):
        running += [asyncio.create_task(ask(agent.prompt())) for _ in range(rng.choice([1, 1, 2, 3]))]
        for _ in range(rng.randint(1, 40)):
            await asyncio.sleep(0)
        if rng.random() < 0.1:
            rng.choice(running).cancel()
    await asyncio.gather(*running, return_exceptions=True)
    check_text(engine, texts)
    return check(engine, tree, [], limits=limits, names_leaves=False)


async def _tokens(seed: str) -> Counter:
    return (await tokens(seed))[0]


DRIVERS = {"tokens": _tokens, "branch": branch, "chat": chat, "llm": llm}


def run_session(driver: str, number: int) -> Counter:
    """Run and check one session; one of seven has the tokens of a pretrained model."""
    with real_tokens(number % 7 == 4):
        return asyncio.run(DRIVERS[driver](f"{driver}-{number}"))
