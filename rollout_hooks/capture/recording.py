"""An LLM client that records every call of one session.

It stands where verl's loops expect `LLMServerClient` and changes nothing that goes in or comes out, so any agent loop
is captured as it is. The one exception is a prompt that has drifted: it is sent with the same text in the tokens that
the model sampled (`realign`), unless the tree heals nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

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

ABORTED = ("aborted", "abort")
"""verl's stop reasons for calls that the server gave up (`workers/rollout/llm_server.py`)."""


def stable_request_id(row: Mapping[str, Any]) -> str:
    """Return the request id of a session under `rollout.full_determinism`; it is the same in every training run."""
    return f"det-{int(row.get('priority', 0))}-{row.get('session_id', 0)}"


def recording_client(worker: AgentLoopWorker, *, prompt: str | None = None) -> "RecordingClient":
    """Return the LLM client of a worker, to record the calls of a new session of its model, under its configuration.

    `prompt` is the uid of the session's prompt, for the router.
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
    return RecordingClient(worker.llm_client, tree=tree, prompt=prompt if is_routed else None)


class RecordingClient(LLMServerClient):
    """An LLM client that records the calls of one session into `tree`; `client` does them.

    `prompt` goes to the router with every call (`routed_id`).

    Attributes:
        tree: What was recorded.
        dead_server: The error of the last call whose server had died, else None; a loop may hide it.
    """

    def __init__(self, client: LLMServerClient, *, tree: SessionTree, prompt: str | None = None) -> None:
        super().__init__(config=client.config)
        self._client = client
        self._prompt = prompt
        self.tree = tree
        self.dead_server: str | None = None

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
        if self._prompt is not None:
            request_id = routed_id(request_id, self._prompt)
        with self._recorded_failure(call):
            output = await self._client.generate(
                request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
            )
        self.tree.complete(
            call,
            output.token_ids,
            log_probs=output.log_probs or None,
            is_aborted=output.stop_reason in ABORTED,
            stop_reason=output.stop_reason,
            min_global_steps=output.extra_fields.get("min_global_steps"),
            max_global_steps=output.extra_fields.get("max_global_steps"),
            num_cached=output.extra_fields.get("num_cached_tokens"),
        )
        return output

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
