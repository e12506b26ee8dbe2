"""Engines as the gateway sees them: prompt tokens in, recorded tokens out.

A `SessionEngine` belongs to one session and records its calls in the session's tree; the gateway records nothing.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import uuid4

from PIL import Image
from typing_extensions import override

from rollout_hooks.capture.async_llm import RecordingAsyncLLM
from rollout_hooks.capture.recording import ABORTED, RecordingClient
from rollout_hooks.capture.session_tree import SessionTree


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some tokens of a call, perhaps none, with one log-prob each if the engine gave log-probs.

    `call` is the index of the call in the session's tree. With `is_aborted` the engine gave the call up after them.
    """

    call: int
    token_ids: list[int]
    log_probs: list[float] | None
    is_aborted: bool = False


class SessionEngine(Protocol):
    """The engine as one session sees it."""

    tree: SessionTree

    def stream(
        self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any], images: Sequence[Image.Image] = ()
    ) -> AsyncIterator[TokenChunk]:
        """Make one call, record it, and yield its generated tokens in one or several chunks.

        `images` are those that the prompt shows, in order; there are none if the session's `ChatFormat` reads none.

        Sampling parameters have verl's names, those of vLLM's `SamplingParams`. But `logprobs` is a bool, and
        `structured_outputs` holds the arguments of vLLM's `StructuredOutputsParams`.
        """
        ...


class ClientEngine(SessionEngine):
    """verl's LLM servers, through the recording client of the session: one chunk per call.

    All calls with one `request_id`, verl's session id, go to one server and share its prefix cache. With
    `unique_request_ids` each call gets an id of its own, made from it. `rollout.full_determinism` needs that, since
    verl then hands the id to vLLM as it is. `mm_processor_kwargs` say how images are processed.
    """

    def __init__(
        self,
        client: RecordingClient,
        *,
        request_id: str | None = None,
        unique_request_ids: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tree = client.tree
        self._client = client
        self._request_id = request_id or uuid4().hex
        self._unique_request_ids = unique_request_ids
        self._mm_processor_kwargs = dict(mm_processor_kwargs or {})

    @override
    async def stream(
        self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any], images: Sequence[Image.Image] = ()
    ) -> AsyncIterator[TokenChunk]:
        params = _with_vllm_form(sampling_params)
        media = {"image_data": list(images), "mm_processor_kwargs": self._mm_processor_kwargs} if images else {}
        # The client adds its call to the tree before it first awaits, so that this is the call's index.
        call = len(self.tree.calls)
        output = await self._client.generate(
            f"{self._request_id}-{call}" if self._unique_request_ids else self._request_id,
            prompt_ids=list(prompt_ids),
            sampling_params=params,
            **media,
        )
        yield TokenChunk(call, list(output.token_ids), output.log_probs or None, output.stop_reason in ABORTED)


class AsyncLLMEngine(SessionEngine):
    """vLLM's `AsyncLLM` in this process, through the session's recording handle: text only, chunks as they come."""

    def __init__(self, llm: RecordingAsyncLLM) -> None:
        self.tree = llm.tree
        self._llm = llm

    @override
    async def stream(
        self, prompt_ids: Sequence[int], *, sampling_params: Mapping[str, Any], images: Sequence[Image.Image] = ()
    ) -> AsyncIterator[TokenChunk]:
        if images:
            raise ValueError(f"{len(images)} images: RecordingAsyncLLM records text; serve images by ClientEngine")
        # Imported here: vLLM takes seconds, and a process that has this engine has imported it already.
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
    """Return sampling parameters with `structured_outputs` as vLLM's own class, which verl's server passes on."""
    params = dict(sampling_params)
    if "structured_outputs" in params:
        # The first import takes a second or two. It does not run in a thread: during an `await`, another request could
        # take this one's place among the calls.
        from vllm.sampling_params import StructuredOutputsParams

        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    return params
