"""vLLM's `AsyncLLM` in this process, with every call of a session recorded.

    llm = RecordingAsyncLLM(engine, new_tree=lambda: SessionTree(decode=tokenizer.decode))
    session = llm.session("task-7")
    async for output in session.generate([1, 2, 3], SamplingParams(max_tokens=64), "request-1"):
        ...
    session.tree.leaves()

The outputs are vLLM's own `RequestOutput`s. The end of a call is recorded before the caller gets the output that says
so. A call that is left early keeps the tokens that had arrived. If it was cancelled or failed, its caller got no answer
and it is abandoned (`LeftOut`). A caller that closed it has read what it wanted.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Any

from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.realign import Realignment
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.session_tree import SessionTree

if TYPE_CHECKING:
    # Importing vLLM takes seconds, and whoever has an engine has already imported it.
    from vllm import RequestOutput, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_PROMPT_KEYS = frozenset({"type", "prompt", "prompt_token_ids", "cache_salt"})
"""Keys that a prompt of nothing but tokens may have."""


class RecordingAsyncLLM:
    """An engine that records the calls of one session; `session` gives handles for others on the same engine.

    `new_tree` makes a tree for this session and for each `session`. A tree that can decode heals drifted prompts.
    """

    def __init__(self, engine: "AsyncLLM", *, new_tree: Callable[[], SessionTree] = SessionTree) -> None:
        self.engine = engine
        self.tree = new_tree()
        self._new_tree = new_tree
        self._sessions: dict[str, RecordingAsyncLLM] = {}

    def session(self, session_id: str) -> "RecordingAsyncLLM":
        """Return the handle of a session with its own tree; the same id gives the same handle."""
        if session_id not in self._sessions:
            self._sessions[session_id] = RecordingAsyncLLM(self.engine, new_tree=self._new_tree)
        return self._sessions[session_id]

    def close_session(self, session_id: str) -> None:
        """Forget a session; its handle and its tree stay usable where they are held."""
        self._sessions.pop(session_id, None)

    async def generate(
        self,
        prompt: "Sequence[int] | TokensPrompt",
        sampling_params: "SamplingParams",
        request_id: str,
        **engine_kwargs: Any,
    ) -> AsyncGenerator["RequestOutput", None]:
        """Heal the drift of a call, pass it to the engine and record it; `n` samples count as `n` calls.

        The arguments are those of `AsyncLLM.generate`, but the prompt holds nothing but token ids, and concurrent calls
        must not share a request id. Log-probs of the sampled tokens are added if they are not asked for. To leave a
        call early, use `contextlib.aclosing`. Otherwise it ends only when it is garbage collected.

        Raises:
            ValueError: The prompt is text, or holds more than tokens.
        """
        tokens_prompt = _checked_prompt(prompt)
        if sampling_params.logprobs is None:
            sampling_params = sampling_params.clone()
            sampling_params.logprobs = 0
        healed = self.tree.realign(tokens_prompt["prompt_token_ids"])
        if healed.splices:
            tokens_prompt["prompt_token_ids"] = healed.token_ids.tolist()
        calls = [_RecordedSample(self.tree, healed, sampling_params) for _ in range(sampling_params.n)]
        outputs = self.engine.generate(tokens_prompt, sampling_params, request_id, **engine_kwargs)
        cause, is_abandoned = "cancelled", True
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    for completion in output.outputs:
                        calls[completion.index].add(completion)
                    yield output
            is_abandoned = False
        except GeneratorExit:
            is_abandoned = False
            raise
        except Exception as error:
            cause = describe_error(error)
            raise
        finally:
            with ExitStack() as leaving:  # each of them, even if the tokens of one cannot be recorded
                for call in reversed(calls):
                    leaving.callback(call.leave, cause, is_abandoned=is_abandoned)


class _RecordedSample:
    """One sample of a request: its call in the tree and the tokens that have arrived."""

    def __init__(self, tree: SessionTree, prompt: Realignment, params: "SamplingParams") -> None:
        self._tree = tree
        self._is_delta = params.output_kind.name == "DELTA"
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._has_ended = False
        self._call = tree.begin(prompt)

    def add(self, completion: "CompletionOutput") -> None:
        """Take the new tokens of an output: all of a delta, else those after the tokens that had arrived."""
        num_known = 0 if self._is_delta else len(self._token_ids)
        new_ids = list(completion.token_ids)[num_known:]
        self._token_ids += new_ids
        if new_ids:
            assert completion.logprobs is not None
            positions = range(num_known, num_known + len(new_ids))
            self._log_probs += [
                completion.logprobs[i][token].logprob for i, token in zip(positions, new_ids, strict=True)
            ]
        if completion.finish_reason is not None:
            self._end(stop_reason=completion.finish_reason, is_aborted=completion.finish_reason == "abort")

    def leave(self, cause: str, *, is_abandoned: bool) -> None:
        """Record that no more tokens will come; those that have come were sampled, so they stay."""
        if is_abandoned:
            self._tree.leave_out(self._call, LeftOut.ABANDONED)
        if self._has_ended:
            return
        if self._token_ids:
            self._end(stop_reason=cause, is_aborted=True)
        else:
            self._has_ended = True
            self._tree.fail(self._call, cause)

    def _end(self, *, stop_reason: str, is_aborted: bool) -> None:
        self._has_ended = True
        self._tree.complete(
            self._call,
            self._token_ids,
            log_probs=self._log_probs,
            is_aborted=is_aborted,
            stop_reason=stop_reason,
        )


def _checked_prompt(prompt: "Sequence[int] | TokensPrompt") -> "TokensPrompt":
    if isinstance(prompt, str):
        raise ValueError(f"prompt={str(prompt)[:80]!r} is text: encode it first, the tokens are what is recorded")
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": [int(token) for token in prompt]}
    more = sorted(key for key, value in prompt.items() if key not in _PROMPT_KEYS and value)
    if more or "prompt_token_ids" not in prompt:
        raise ValueError(
            f"prompt with the keys {sorted(prompt)}: give prompt_token_ids and nothing beside them that the model "
            "reads; prompts with media or embeddings cannot be recorded as tokens"
        )
    return prompt.copy()
