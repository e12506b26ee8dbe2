"""LLM clients that need no cluster: answers from a file, or of an OpenAI-compatible server that returns token ids."""

import asyncio
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase
from typing_extensions import override
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

SEPARATOR = "---"
"""The line between two answers of a file."""

TIMEOUT_S = 600.0


def read_answers(text: str) -> list[str]:
    """Return the answers of a file, each up to a line `---`.

    Raises:
        ValueError: There is none.
    """
    answers = [answer.strip("\n") for answer in f"\n{text}\n".split(f"\n{SEPARATOR}\n")]
    if not any(answers):
        raise ValueError(f"the file has no answer: write one for each call, with a line {SEPARATOR} between them")
    return answers


class ScriptedAnswers(LLMServerClient):
    """A client that gives its answers in the order of the calls, and begins anew behind the last one.

    The log-prob of every token is 0.0.
    """

    def __init__(self, config: DictConfig, *, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(config=config)
        self._answers = itertools.cycle(answers)
        self._tokenizer = tokenizer

    @override
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Return the next answer and the end of a turn, cut to the room that is left."""
        text = next(self._answers)
        await asyncio.sleep(0)  # concurrent branches take turns, as they do with a server
        token_ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        token_ids = token_ids[: _room(self.config, prompt_ids, sampling_params)]
        return TokenOutput(token_ids=token_ids, log_probs=[0.0] * len(token_ids), stop_reason="completed")


class ServedAnswers(LLMServerClient):
    """A client of a vLLM server's `/v1/completions`, the one API that takes a prompt as tokens and returns tokens.

    `url` ends with `/v1`. The served model must be the one whose tokenizer makes the prompts.
    """

    def __init__(self, config: DictConfig, *, url: str) -> None:
        super().__init__(config=config)
        self._url = url.rstrip("/")
        self._model = self._ask("models", None)["data"][0]["id"]

    @override
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        """Let the server go on from a prompt of text.

        Raises:
            ValueError: The prompt has images, which that API does not take.
            ConnectionError: The server refused the call, or returns no token ids.
        """
        if others.get("image_data"):
            raise ValueError("a call with images: /v1/completions takes text only; try it with --answers")
        request = {
            **sampling_params,
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": _room(self.config, prompt_ids, sampling_params),
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await asyncio.to_thread(self._ask, "completions", request)
        (choice,) = answer["choices"]
        if choice.get("token_ids") is None:
            raise ConnectionError(f"{self._url} returned no token_ids: serve the model with vLLM")
        return TokenOutput(
            token_ids=choice["token_ids"], log_probs=choice["logprobs"]["token_logprobs"], stop_reason="completed"
        )

    def _ask(self, path: str, request: dict[str, Any] | None) -> dict[str, Any]:
        # Structured outputs are an object of vLLM's.
        body = None if request is None else json.dumps(request, default=asdict).encode()
        asked = urllib.request.Request(f"{self._url}/{path}", data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise ConnectionError(f"{asked.full_url} answered {error.code}: {said}") from None
        except urllib.error.URLError as error:
            raise ConnectionError(f"{asked.full_url}: {error.reason}; give the address of a running server") from None


def _room(config: DictConfig, prompt_ids: Sequence[int], sampling_params: dict[str, Any]) -> int:
    """Return the most tokens that a call may give, as verl's server bounds it."""
    rollout = config.actor_rollout_ref.rollout
    room = min(rollout.response_length, rollout.prompt_length + rollout.response_length - len(prompt_ids))
    return max(1, sampling_params.get("max_tokens", room))
