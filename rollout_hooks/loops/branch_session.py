"""What the branches of one session share; see `branch` for what a branch is."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from verl.workers.rollout.llm_server import LLMServerClient

from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.loops.branch import Branch


class BranchSession:
    """What the branches of one session share: the client, the sampling parameters, the budget, the list of branches.

    Args:
        client: Where calls go; inside a worker of ours it records them.
        prompt_ids: Tokens of the root prompt, at least one.
        sampling_params: verl's sampling parameters; `logprobs` decides whether rows carry rollout log-probs.
        response_length: Most tokens a branch may hold after its prompt.
        prompt_length: Most tokens of a prompt given to `restart` that count as the row's prompt; what is longer
            becomes untrained tokens of the response and uses up `response_length` (as in `rows`). None: all.
        request_id: verl's sticky session id: all calls of the session go to one server and share its prefix cache.
        unique_request_ids: Give each call an id of its own, derived from `request_id`. Needed where verl hands the
            id to vLLM as it is (`rollout.full_determinism`), since concurrent calls must not share one.
        call_timeout_s: Most seconds one call to the LLM may take; its branch fails after that. None: no limit.
    """

    def __init__(
        self,
        client: LLMServerClient,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        response_length: int,
        prompt_length: int | None = None,
        request_id: str | None = None,
        unique_request_ids: bool = False,
        call_timeout_s: float | None = None,
    ) -> None:
        if not len(prompt_ids):
            raise ValueError("prompt_ids=[]: a session needs a prompt of at least one token")
        self.client = client
        self.prompt_ids = [int(token) for token in prompt_ids]
        self.sampling_params = dict(sampling_params)
        self.response_length = response_length
        self.prompt_length = prompt_length
        self.request_id = request_id or uuid4().hex
        self.unique_request_ids = unique_request_ids
        self.call_timeout_s = call_timeout_s
        self.branches: list[Branch] = []
        self.root = Branch(self)

    @property
    def wants_log_probs(self) -> bool:
        """Whether the sampling parameters ask for rollout log-probs."""
        return bool(self.sampling_params.get("logprobs"))

    def leaves(self) -> list[Branch]:
        """The finished branches: depth first in the order of forking, the root branch last.

        The order does not depend on which of two concurrent branches forked first.
        """
        finished = [branch for branch in self.branches if branch.is_finished]
        return sorted(finished, key=lambda branch: (branch is self.root, branch.lineage))

    def outputs(self) -> list[TreeAgentLoopOutput]:
        """The leaves as rows."""
        return [leaf.as_output() for leaf in self.leaves()]
