"""An LLM client that records every call of one session.

It stands where verl's loops expect `LLMServerClient` and changes nothing that goes in or comes out, so any agent loop
is captured as it is. There are two exceptions. A prompt that has drifted is sent with the same text in the tokens that
the model sampled (`realign`), unless the tree heals nothing. A session that starts at a node of an earlier tree is
answered with the tokens of that tree up to the node (`starting_point`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.utils.tokenizer import get_processor_token_id
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.errors import describe_error, is_of_dead_server
from rollout_hooks.capture.prompt_router import routed_id
from rollout_hooks.capture.realign import MAX_REPLACED_TOKENS
from rollout_hooks.capture.session_images import SessionImages
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.capture.starting_point import StartingPoint

ABORTED = ("aborted", "abort")
"""verl's stop reasons for calls that the server gave up (`workers/rollout/llm_server.py`)."""


def stable_request_id(row: Mapping[str, Any]) -> str:
    """Return the request id of a session under `rollout.full_determinism`; it is the same in every training run."""
    return f"det-{int(row.get('priority', 0))}-{row.get('session_id', 0)}"


def recording_client(
    worker: AgentLoopWorker, *, prompt: str | None = None, start: StartingPoint | None = None
) -> "RecordingClient":
    """Return the LLM client of a worker, to record the calls of a new session of its model, under its configuration.

    `prompt` is the uid of the session's prompt, for the router; `start` is where the session starts.
    """
    # Only our trainer has the group `tree`, with checked values; capture works under other trainers, too.
    options = worker.config.get("tree") or {}
    heals = options.get("drift", "heal") == "heal"
    max_replaced = options.get("drift_max_tokens", MAX_REPLACED_TOKENS) if heals else 0
    # Cleaned-up spaces would make different texts equal.
    decode = partial(worker.tokenizer.decode, clean_up_tokenization_spaces=False)
    image_token, video_token = (get_processor_token_id(worker.processor, name) for name in ("image", "video"))
    images = SessionImages(image_token=image_token, video_token=video_token)
    keeps_abandoned = options.get("abandoned") == "keep"
    tree = SessionTree(decode=decode, max_replaced=max_replaced, images=images, keeps_abandoned=keeps_abandoned)
    # vLLM gets the request ids under `full_determinism`, so they stay as they are.
    is_routed = not worker.config.actor_rollout_ref.rollout.get("full_determinism", False)
    return RecordingClient(worker.llm_client, tree=tree, prompt=prompt if is_routed else None, start=start)


class RecordingClient(LLMServerClient):
    """An LLM client that records the calls of one session into `tree`; `client` does them.

    `prompt` goes to the router with every call (`routed_id`). Calls that ask what the session of `start` has asked get
    its answers.

    Attributes:
        tree: What was recorded.
        dead_server: The error of the last call whose server had died, else None; a loop may hide it.
        has_reached_start: Whether something was sampled behind the node of `start`.
        shift: By how many nats a token of `start` is likelier on average for the weights of now than for those that
            sampled it; None unless `asks_for_shift` was set before, which makes a server read the path again.
    """

    def __init__(
        self,
        client: LLMServerClient,
        *,
        tree: SessionTree,
        prompt: str | None = None,
        start: StartingPoint | None = None,
    ) -> None:
        super().__init__(config=client.config)
        self._client = client
        self._prompt = prompt
        self._start = start
        self.tree = tree
        self.dead_server: str | None = None
        self.asks_for_shift, self.has_reached_start = False, False
        self.shift: float | None = None

    @override
    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Heal the drift of a call, pass it on and record it; result and errors are the client's own.

        Raises:
            ValueError: The prompt has videos or audio, or its tokens show another number of images than it has.
        """
        others = [name for name in ("video_data", "audio_data") if kwargs.get(name)]
        if others:
            raise ValueError(f"a call with {' and '.join(others)}: only text and images can be recorded; drop the rest")
        images = self.tree.images
        prompt = self.tree.realign(images.keys_of(prompt_ids, kwargs.get("image_data") or ()))
        if prompt.splices:
            prompt_ids = images.ids_of(prompt.token_ids).tolist()
        call = self.tree.begin(prompt)
        replayed = self._replayed(prompt_ids)
        if replayed is not None and replayed.stop_reason is not None:
            output = replayed
        else:
            with self._recorded_failure(call):
                output = await self._ask(request_id, prompt_ids, sampling_params, replayed, **kwargs)
        self.tree.complete(
            call,
            output.token_ids,
            log_probs=output.log_probs or None,
            is_aborted=output.stop_reason in ABORTED,
            stop_reason=output.stop_reason,
            min_global_steps=output.extra_fields.get("min_global_steps"),
            max_global_steps=output.extra_fields.get("max_global_steps"),
            num_cached=output.extra_fields.get("num_cached_tokens"),
            num_replayed=len(replayed.token_ids) if replayed is not None else 0,
        )
        return output

    def _replayed(self, prompt_ids: list[int]) -> TokenOutput | None:
        """Return the old answer to a prompt, without a reason to stop if it is to go on; None if there is none."""
        if self._start is None:
            return None
        num_prompt = len(prompt_ids)
        end = self._start.end_of_answer(np.asarray(prompt_ids))
        if end == num_prompt:
            return None
        return TokenOutput(
            token_ids=self._start.token_ids[num_prompt:end].tolist(),
            log_probs=np.nan_to_num(self._start.log_probs[num_prompt:end]).tolist(),
            stop_reason=None if self._start.goes_on_from(end) else "completed",
        )

    async def _ask(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
        replayed: TokenOutput | None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Let the server answer, or go on with an old answer."""
        if self._prompt is not None:
            request_id = routed_id(request_id, self._prompt)
        if replayed is not None:
            prompt_ids = prompt_ids + replayed.token_ids
            if params.get("max_tokens") is not None:
                params = {**params, "max_tokens": max(1, params["max_tokens"] - len(replayed.token_ids))}
        is_behind = self._start is not None and self._start.is_passed_by(np.asarray(prompt_ids))
        asks = is_behind and self.asks_for_shift
        if asks:
            self.asks_for_shift = False
            params = {**params, "prompt_logprobs": 0}
        output = await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=params, **kwargs)
        self.has_reached_start |= is_behind
        if asks:
            self.shift = self._shift_of(output.extra_fields)
        if replayed is not None:
            log_probs = [*(replayed.log_probs or ()), *output.log_probs] if output.log_probs is not None else None
            output = output.model_copy(
                update={"token_ids": replayed.token_ids + list(output.token_ids), "log_probs": log_probs}
            )
        return output

    def _shift_of(self, extra_fields: dict[str, Any]) -> float | None:
        """Compare the log-probs that a server gave the tokens of the path with those that they were sampled with."""
        found, start = extra_fields.pop("prompt_logprobs", None), self._start
        extra_fields.pop("prompt_ids", None)
        if found is None or start is None:
            return None
        is_known = start.is_sampled & ~np.isnan(start.log_probs)
        # The server has those of the second token first.
        now = np.array([0.0] + [values[0] for values in found[: len(start.token_ids) - 1]])
        return float(np.mean((now - start.log_probs)[is_known])) if is_known.any() else None

    @contextmanager
    def _recorded_failure(self, call: int) -> Iterator[None]:
        has_ended = False
        cause = "cancelled"
        try:
            yield
            has_ended = True
        except Exception as error:
            cause = describe_error(error)
            if is_of_dead_server(error):
                self.dead_server = cause
            raise
        finally:
            if not has_ended:
                self.tree.fail(call, cause)
