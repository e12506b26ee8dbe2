"""The engine as the gateway sees it, tokens in and recorded tokens out; and the two engines that it comes with.

A `SessionEngine` belongs to one session and records its calls in the session's tree, so the gateway itself records
nothing and decides nothing about tokens. `ClientEngine` is verl's client; it hands a turn over whole. `AsyncLLMEngine`
is vLLM in this process; it hands tokens over as they come.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from typing_extensions import override

from rollout_hooks.capture.async_llm import RecordingAsyncLLM
from rollout_hooks.capture.recording import ABORTED, RecordingClient
from rollout_hooks.capture.session_tree import SessionTree


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some tokens of a call.

    Attributes:
        call: Index of the call in the session's tree.
        token_ids: The next generated tokens; may be empty.
        log_probs: One per token, or None if the engine gave none.
        is_aborted: Whether the engine gave the call up after these tokens.
    """

    call: int
    token_ids: list[int]
    log_probs: list[float] | None
    is_aborted: bool = False


class SessionEngine(Protocol):
    """The engine as one session sees it."""

    tree: SessionTree

    def stream(self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any]) -> AsyncIterator[TokenChunk]:
        """Make one call and record it.

        Args:
            prompt_ids: The tokens that the model reads.
            sampling_params: verl's names: those of vLLM's `SamplingParams`, with a bool for `logprobs` and the
                arguments of vLLM's `StructuredOutputsParams` for `structured_outputs`.

        Yields:
            The generated tokens, in one or several chunks.
        """
        ...


class ClientEngine(SessionEngine):
    """verl's LLM servers, through the recording client of the session: one chunk per call.

    Args:
        client: The recording client.
        request_id: verl's sticky session id: all calls of the session go to one server and share its prefix cache.
        unique_request_ids: Give each call an id of its own, derived from `request_id`; needed under
            `rollout.full_determinism`, where verl hands the id to vLLM as it is.
    """

    def __init__(
        self, client: RecordingClient, *, request_id: str | None = None, unique_request_ids: bool = False
    ) -> None:
        self.tree = client.tree
        self._client = client
        self._request_id = request_id or uuid4().hex
        self._unique_request_ids = unique_request_ids

    @override
    async def stream(
        self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[TokenChunk]:
        params = _with_vllm_form(sampling_params)
        # The client takes its place among the calls before it first waits for anything.
        call = len(self.tree.calls)
        output = await self._client.generate(
            f"{self._request_id}-{call}" if self._unique_request_ids else self._request_id,
            prompt_ids=list(prompt_ids),
            sampling_params=params,
        )
        yield TokenChunk(call, list(output.token_ids), output.log_probs or None, output.stop_reason in ABORTED)


class AsyncLLMEngine(SessionEngine):
    """vLLM's `AsyncLLM` in this process, through the recording handle of the session: chunks as they come."""

    def __init__(self, llm: RecordingAsyncLLM) -> None:
        self.tree = llm.tree
        self._llm = llm

    @override
    async def stream(
        self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[TokenChunk]:
        # Importing vLLM takes seconds; with an engine in this process it is imported already.
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = _with_vllm_form(sampling_params)
        params.pop("logprobs", None)
        settings = SamplingParams(**params, logprobs=0, output_kind=RequestOutputKind.DELTA)
        call = len(self.tree.calls)
        async with aclosing(self._llm.generate(list(prompt_ids), settings, uuid4().hex)) as outputs:
            async for output in outputs:
                (completion,) = output.outputs
                token_ids, candidates = list(completion.token_ids), completion.logprobs
                assert candidates is not None, "the settings above ask for log-probs"
                log_probs = [candidates[i][token].logprob for i, token in enumerate(token_ids)]
                yield TokenChunk(call, token_ids, log_probs, completion.finish_reason == "abort")


def _with_vllm_form(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with `structured_outputs` as vLLM's own class; verl's server hands it on as it is."""
    params = dict(sampling_params)
    if "structured_outputs" in params:
        # The first import in a process takes a second or two. It is not awaited in a thread: nothing may come between a
        # request and its place among the calls.
        from vllm.sampling_params import StructuredOutputsParams

        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return params
