"""A scripted engine that keeps its own record of what it served. It knows nothing of trees.

What it answers to its n-th call follows from the seed and n alone, how long it takes also from `schedule`. Every
log-prob is another number, so a row's log-prob tells which call sampled the token, and where.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from byte_tokens import WORDS, byte_level_tokenizer, sampled
from scripted_llm import call_text
from typing_extensions import override
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

END = "<|im_end|>"
ANSWERS = ["ok", "the tools", "<think>plan, plan,</think>ok", "<think>the model calls</think>the tools", "12} ok"]
"""Answers that come again and again; agents write some of them into their histories."""
_STEP = 1 / 4096


def words(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


@dataclass(slots=True)
class Served:
    """One call: what it was sent, what it sampled, how much of that its caller got, and how and when it ended."""

    sent: list[int]
    output: list[int]
    log_probs: list[float]
    versions: tuple[int, int] | None  # of the weights; vLLM's own engine tells none
    begun: int
    ended: int | None = None
    end: str = "running"
    num_got: int = 0
    is_abandoned: bool = False  # its caller got an error, or was cancelled while it waited

    @property
    def path(self) -> list[int]:
        """Tokens that were sent and got."""
        return self.sent + self.output[: self.num_got]


class Engine:
    """The engine of one session. A call takes at least `least_steps` turns of the event loop."""

    def __init__(self, seed: str, *, schedule: int = 0, least_steps: int = 0, calls_tools: bool = False) -> None:
        self.served: list[Served] = []
        self._seed, self._schedule, self._least_steps = seed, schedule, least_steps
        self._calls_tools = calls_tools
        self._num_events = 0

    @property
    def client(self) -> "EngineClient":
        return EngineClient(self)

    def call_of(self, log_prob: float) -> tuple[int, int]:
        """Return the call and the place in its output of the token with this log-prob."""
        number, place = divmod(round(-log_prob / _STEP), 4096)
        return number - 1, place

    def begin(
        self, sent: list[int], *, max_tokens: int | None = None, tells_versions: bool = True
    ) -> tuple[Served, int, str]:
        """Begin a call; return it, the steps that it takes, and how it will end."""
        number = len(self.served)
        rng = random.Random(f"{self._seed}-{number}")
        output = self._output(rng)[:max_tokens]
        end = rng.choices(["completed", "failed", "aborted"], weights=[90, 5, 5])[0]
        if end == "aborted":
            output = output[: rng.randint(0, len(output))]
        log_probs = [-(number + 1) - place * _STEP for place in range(len(output))]
        versions = (first := rng.randint(0, 9), first + 1) if tells_versions else None
        self.served.append(Served(sent, output, log_probs, versions, begun=self._tick()))
        steps = random.Random(f"{self._seed}-{number}-{self._schedule}").choice([0, 0, 1, 2, 4, 9])
        return self.served[-1], self._least_steps + steps, end

    def end(self, served: Served, end: str, num_got: int) -> None:
        if served.ended is None:
            served.end, served.num_got, served.ended = end, num_got, self._tick()

    def _tick(self) -> int:
        self._num_events += 1
        return self._num_events

    def _output(self, rng: random.Random) -> list[int]:
        kind = rng.random()
        if kind < 0.2 and self.served:
            return list(rng.choice(self.served).output)
        if kind < 0.23:
            return []
        text = rng.choice(ANSWERS) if kind < 0.6 else f"<think>{words(rng, 4)}</think>{words(rng, 6)}"
        if self._calls_tools and rng.random() < 0.4:
            text += "".join(call_text(rng.randint(1, 3)) for _ in range(rng.randint(1, 2)))
        tokens = sampled(text + END, rng, share=rng.choice([0, 0, 0.2, 0.5]))
        if rng.random() < 0.1:
            tokens[rng.randrange(len(tokens))] = rng.randrange(byte_level_tokenizer().vocab_size)
        # A length stop may cut a character.
        return tokens[: rng.randint(1, len(tokens))] if rng.random() < 0.1 else tokens


class EngineClient(LLMServerClient):
    """The engine as verl's client."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(config=None)
        self._engine = engine

    @override
    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs) -> TokenOutput:
        served, steps, end = self._engine.begin(list(prompt_ids), max_tokens=sampling_params.get("max_tokens"))
        try:
            for _ in range(steps):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self._engine.end(served, "cancelled", 0)
            raise
        if end == "failed":
            self._engine.end(served, end, 0)
            raise RuntimeError(f"no answer: {words(random.Random(steps), 3)}")
        self._engine.end(served, end, len(served.output))
        return TokenOutput(
            token_ids=list(served.output),
            log_probs=list(served.log_probs),
            stop_reason=end,
            extra_fields=dict(zip(("min_global_steps", "max_global_steps"), served.versions or (), strict=False)),
        )


class EngineLLM:
    """The engine as vLLM's `AsyncLLM`; `output` makes vLLM's `RequestOutput`s."""

    def __init__(self, engine: Engine, *, output: Callable) -> None:
        self._engine, self._output = engine, output

    async def generate(self, prompt, sampling_params, request_id, **_):
        sent, kind = list(prompt["prompt_token_ids"]), sampling_params.output_kind.name
        calls = [
            self._engine.begin(sent, max_tokens=sampling_params.max_tokens, tells_versions=False)
            for _ in range(sampling_params.n)
        ]
        # A request fails or is aborted whole.
        end, seen = calls[0][2], [0] * len(calls)
        chunk = 1 + calls[0][1]
        is_abandoned = True
        try:
            for to in range(chunk, max(len(served.output) for served, _, _ in calls) + 2 * chunk, chunk):
                for _ in range(calls[0][1]):
                    await asyncio.sleep(0)
                if end == "failed" and to > 2 * chunk:
                    raise RuntimeError("engine is gone")
                for index, (served, _, _) in enumerate(calls):
                    is_last = to >= len(served.output)
                    if served.ended or (kind == "FINAL_ONLY" and not is_last):
                        continue
                    first = seen[index] if kind == "DELTA" else 0
                    seen[index] = min(to, len(served.output))
                    if is_last:
                        self._engine.end(served, end if end == "aborted" else "completed", seen[index])
                    reason = {"aborted": "abort"}.get(end, "stop") if is_last else None
                    yield self._output(request_id, sent, index, served, slice(first, seen[index]), reason)
            is_abandoned = False
        except GeneratorExit:
            is_abandoned = False
            raise
        finally:
            for (served, _, _), num_got in zip(calls, seen, strict=True):
                served.is_abandoned = is_abandoned
                self._engine.end(served, "aborted" if num_got else "failed", num_got)
