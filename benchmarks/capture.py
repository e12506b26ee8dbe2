"""Measures what capture costs while many sessions generate at once: processor time, memory, and long sessions. JSON.

The engine is a replay: every session has its outputs drawn beforehand and waits as long as a server would take that
gives each session `--tokens-per-s` tokens a second (40: a vLLM server with 256 sessions on it). All sessions share one
event loop, which verl would spread over `rollout.agent.num_workers` processes. A case runs twice, with the recorder and
without: how much longer a session then takes is the overhead, and the difference of the processor time is what capture
costs. The cases run at the same time, each in a process of its own: most of the time they wait, so processor time
includes that of cold caches.

    clean       every prompt continues the recorded tokens
    drift       the agent keeps text: 1 % of the sampled tokens come back cut into others, in every later prompt
    thinking    the first half of every earlier output is dropped from the prompt: each call is a fork or a rewrite

    python benchmarks/capture.py --out docs/benchmarks/data/capture.json
"""

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness import environment, new_parser, write_json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typing_extensions import override
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.session_tree import SessionTree

CASES = ("clean", "drift", "thinking")
DRIFTED_SHARE = 0.01
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a session, in turns and tokens."""

    num_turns: int
    prompt_len: int
    output_len: int
    observation_len: int


@dataclass(frozen=True, slots=True)
class Session:
    """What one session sends and gets: the tokens that the agent appends to its history after each output."""

    prompt: list[int]
    outputs: list[list[int]]
    observations: list[list[int]]
    kept: list[list[int]]
    """The outputs as they come back in later prompts."""

    def prompts(self, case: str) -> Callable[[int], list[int]]:
        """Return a function from a turn to its prompt; the history is one list that only grows."""
        history, lengths = list(self.prompt), [len(self.prompt)]
        for kept, observation in zip(self.kept, self.observations, strict=True):
            half = len(kept) // 2 if case == "thinking" else 0
            history += kept[half:] + observation
            lengths.append(len(history))
        return lambda turn: history[: lengths[turn]]


class ReplayClient(LLMServerClient):
    """Answers a session's calls with its outputs, after the time that they would take."""

    def __init__(self, outputs: list[list[int]], *, tokens_per_s: float) -> None:
        super().__init__(config=None)
        self._outputs = iter(outputs)
        self._tokens_per_s = tokens_per_s

    @override
    async def generate(self, request_id: str, **kwargs: Any) -> TokenOutput:
        token_ids = next(self._outputs)
        if self._tokens_per_s:
            await asyncio.sleep(len(token_ids) / self._tokens_per_s)
        log_probs = [-0.5] * len(token_ids)
        return TokenOutput(token_ids=token_ids, log_probs=log_probs, stop_reason="completed", extra_fields={})


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE of 8,192 tokens on this repository's documents."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    tokens.train([str(path) for path in sorted(ROOT.glob("**/*.md")) if ".venv" not in path.parts], trainer)
    return tokens


def draw_session(tokenizer: Tokenizer, *, shape: Shape, case: str, rng: random.Random) -> Session:
    """Random tokens of the vocabulary; where they drift, the pieces of a token stand for it in the sampled output."""
    vocabulary = [token for token in range(tokenizer.get_vocab_size()) if len(tokenizer.id_to_token(token)) > 1]

    def draw(num_tokens: int) -> list[int]:
        return rng.choices(vocabulary, k=num_tokens)

    # Of unlike lengths, or all sessions would call at once.
    kept = [draw(rng.randint(shape.output_len * 3 // 4, shape.output_len * 5 // 4)) for _ in range(shape.num_turns)]
    outputs = kept
    if case == "drift":
        outputs = [[part for token in output for part in _pieces(tokenizer, token, rng)] for output in kept]
    observations = [draw(shape.observation_len) for _ in range(shape.num_turns)]
    return Session(draw(shape.prompt_len), outputs, observations, kept)


def _pieces(tokenizer: Tokenizer, token: int, rng: random.Random) -> list[int]:
    if rng.random() >= DRIFTED_SHARE:
        return [token]
    return [tokenizer.token_to_id(character) for character in tokenizer.id_to_token(token)]


async def run_session(session: Session, client: LLMServerClient, *, prompt_of: Callable[[int], list[int]]) -> float:
    """Play an agent, which sends the history, takes the output and answers it; return the seconds that it took."""
    started_s = time.perf_counter()
    for turn in range(len(session.outputs)):
        await client.generate("r", prompt_ids=prompt_of(turn), sampling_params={})
    return time.perf_counter() - started_s


def run_all(sessions: list[Session], clients: list[LLMServerClient], *, case: str) -> tuple[float, float, float]:
    """Seconds: processor time and wall time of all sessions together, and wall time of a session on average."""

    async def run() -> list[float]:
        pairs = zip(sessions, clients, strict=True)
        return await asyncio.gather(*(run_session(*pair, prompt_of=pair[0].prompts(case)) for pair in pairs))

    gc.collect()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    of_sessions_s = asyncio.run(run())
    return time.process_time() - cpu_s, time.perf_counter() - wall_s, float(np.mean(of_sessions_s))


def measure_case(case: str, *, shape: Shape, num_sessions: int, tokens_per_s: float, tokenizer: Tokenizer) -> dict:
    """One case: with and without the recorder."""
    rng = random.Random(0)
    sessions = [draw_session(tokenizer, shape=shape, case=case, rng=rng) for _ in range(num_sessions)]

    def replays() -> list[ReplayClient]:
        return [ReplayClient(session.outputs, tokens_per_s=tokens_per_s) for session in sessions]

    bare_cpu_s, _, bare_session_s = run_all(sessions, replays(), case=case)
    clients = [RecordingClient(replay, tree=SessionTree(decode=tokenizer.decode)) for replay in replays()]
    cpu_s, generation_s, session_s = run_all(sessions, clients, case=case)
    calls = [call for client in clients for call in client.tree.calls]
    kinds: dict[str, int] = {}
    for call in calls:
        kinds[call.kind.value] = kinds.get(call.kind.value, 0) + 1
    return {
        "case": case,
        "num_calls": len(calls),
        "num_prompt_tokens": sum(call.num_prompt for call in calls),
        "num_splices": sum(call.num_splices for call in calls),
        "kinds": kinds,
        "generation_s": round(generation_s, 2),
        "session_s_without_capture": round(bare_session_s, 4),
        "session_s_with_capture": round(session_s, 4),
        "overhead_of_generation": round(session_s / bare_session_s - 1, 6),
        "cpu_s_without_capture": round(bare_cpu_s, 3),
        "cpu_s_with_capture": round(cpu_s, 3),
        "capture_us_per_call": round(1e6 * (cpu_s - bare_cpu_s) / len(calls), 1),
        "capture_share_of_a_core": round((cpu_s - bare_cpu_s) / generation_s, 5),
    }


def measure_memory(case: str, *, shape: Shape, tokenizer: Tokenizer) -> dict:
    """Return the bytes that the recorder holds at the end of one session, per token of its tree."""
    session = draw_session(tokenizer, shape=shape, case=case, rng=random.Random(1))
    client = RecordingClient(ReplayClient(session.outputs, tokens_per_s=0), tree=SessionTree(decode=tokenizer.decode))
    prompt_of = session.prompts(case)
    gc.collect()
    tracemalloc.start()
    asyncio.run(run_session(session, client, prompt_of=prompt_of))
    gc.collect()
    held_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tokens = sum(call.num_prompt + call.num_output for call in client.tree.calls)
    num_tree_tokens = client.tree.num_tokens
    return {
        "case": case,
        "num_turns": shape.num_turns,
        "num_tree_tokens": num_tree_tokens,
        "num_tokens_of_all_calls": tokens,
        "held_bytes": held_bytes,
        "bytes_per_tree_token": round(held_bytes / num_tree_tokens, 1),
    }


def measure_long_session(case: str, *, num_turns: int, tokenizer: Tokenizer) -> dict:
    """Processor time in the recorder over one long session of 200 tokens a turn, by quarters of its turns."""
    shape = Shape(num_turns=num_turns, prompt_len=200, output_len=150, observation_len=50)
    session = draw_session(tokenizer, shape=shape, case=case, rng=random.Random(2))
    tree, prompt_of = SessionTree(decode=tokenizer.decode), session.prompts(case)
    spent_s: list[float] = []
    for turn, output in enumerate(session.outputs):
        prompt = prompt_of(turn)
        start_s = time.process_time()
        tree.complete(tree.begin(tree.realign(prompt)), output, log_probs=[-0.5] * len(output))
        spent_s.append(time.process_time() - start_s)
    start_s = time.process_time()
    tree.locate(prompt_of(num_turns - 1))
    located_s = time.process_time() - start_s
    quarters = np.array_split(np.array(spent_s), 4)
    return {
        "case": case,
        "num_turns": num_turns,
        "last_prompt_len": len(prompt_of(num_turns - 1)),
        "capture_s": round(sum(spent_s), 3),
        "ms_per_call_by_quarter": [round(1e3 * float(quarter.mean()), 3) for quarter in quarters],
        "locate_last_prompt_ms": round(1e3 * located_s, 3),
    }


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--num-sessions", type=int, default=256)
    parser.add_argument("--num-turns", type=int, default=12)
    parser.add_argument("--tokens-per-s", type=float, default=40.0)
    parser.add_argument("--long-turns", type=int, default=1000)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    tokenizer = train_tokenizer()
    shape = Shape(arguments.num_turns, prompt_len=1024, output_len=200, observation_len=150)
    result: dict[str, Any] = {
        "environment": environment(arguments),
        "num_sessions": arguments.num_sessions,
        "tokens_per_s_of_a_session": arguments.tokens_per_s,
        "session": asdict(shape),
        "concurrent": [],
        "memory": [],
        "long": [],
    }
    measure = partial(
        measure_case,
        shape=shape,
        num_sessions=arguments.num_sessions,
        tokens_per_s=arguments.tokens_per_s,
        tokenizer=tokenizer,
    )
    with ProcessPoolExecutor(len(arguments.cases), mp_context=multiprocessing.get_context("spawn")) as processes:
        rows = list(processes.map(measure, arguments.cases))
    for case, row in zip(arguments.cases, rows, strict=True):
        memory = [measure_memory(case, shape=_longer(shape, factor), tokenizer=tokenizer) for factor in (1, 4, 16)]
        long = measure_long_session(case, num_turns=arguments.long_turns, tokenizer=tokenizer)
        result["concurrent"].append(row)
        result["memory"] += memory
        result["long"].append(long)
        for values in (row, *memory, long):
            print(json.dumps(values))
    write_json(result, arguments.out)


def _longer(shape: Shape, factor: int) -> Shape:
    return Shape(factor * shape.num_turns, shape.prompt_len, shape.output_len, shape.observation_len)


if __name__ == "__main__":
    main()
