"""The tokens of one branch: a prompt, then what the model generated and what it read.

A row is cut into verl's prompt and response where the prompt ends. A cut inside the prompt opens it again: until the
model generates, what the branch reads belongs to the prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class BranchTokens:
    """Tokens of a branch, the prompt included."""

    token_ids: list[int]  # All N tokens
    mask: list[int]  # 1 for a generated token, 0 for one that was read
    log_probs: list[float]  # Rollout log-prob of a generated token, 0.0 for one that was read
    prompt_len: int  # Tokens of the row's prompt
    is_prompt_open: bool = False  # Whether what is read next belongs to the prompt
    # (position, version of the weights) of the calls that generated tokens from that position on.
    versions: list[tuple[int, int]] = field(default_factory=list)
    # (position, key of the state or None) of the calls that generated tokens from that position on.
    states: list[tuple[int, str | None]] = field(default_factory=list)
    # (position of a token, reward) in the order in which they were given.
    rewards: list[tuple[int, float]] = field(default_factory=list)
    # (position of the last token before the result, reward) of each tool call.
    tool_rewards: list[tuple[int, float]] = field(default_factory=list)

    @classmethod
    def of_prompt(cls, prompt_ids: Sequence[int]) -> "BranchTokens":
        """Make the tokens of a root branch."""
        return cls(list(prompt_ids), [0] * len(prompt_ids), [0.0] * len(prompt_ids), len(prompt_ids))

    def copy(self) -> "BranchTokens":
        """Make the tokens of a fork."""
        return BranchTokens(
            list(self.token_ids),
            list(self.mask),
            list(self.log_probs),
            self.prompt_len,
            self.is_prompt_open,
            list(self.versions),
            list(self.states),
            list(self.rewards),
            list(self.tool_rewards),
        )

    @property
    def has_generated(self) -> bool:
        """Whether there is a generated token."""
        return any(self.mask)

    def read(self, token_ids: Sequence[int], *, max_prompt_len: int | None) -> None:
        """Append tokens that the model reads; an open prompt takes them up to `max_prompt_len` tokens (None: all)."""
        self.token_ids += [int(token) for token in token_ids]
        self.mask += [0] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        if self.is_prompt_open:
            num_tokens = len(self.token_ids)
            self.prompt_len = num_tokens if max_prompt_len is None else min(num_tokens, max_prompt_len)

    def generated(
        self, token_ids: Sequence[int], log_probs: Sequence[float], *, versions: Iterable[int], state: str | None = None
    ) -> None:
        """Append what one call generated from a state, with a log-prob per token."""
        assert len(log_probs) == len(token_ids)
        if len(token_ids):
            self.states.append((len(self.token_ids), state))
        self.versions += [(len(self.token_ids), int(version)) for version in versions]
        self.is_prompt_open = self.is_prompt_open and not len(token_ids)
        self.token_ids += [int(token) for token in token_ids]
        self.mask += [1] * len(token_ids)
        self.log_probs += [float(value) for value in log_probs]

    def reward(self, value: float) -> None:
        """Reward the last generated token; there must be one."""
        last = max(position for position, is_generated in enumerate(self.mask) if is_generated)
        self.rewards.append((last, value))

    def cut(self, to: int, *, keep_rewards: bool = False) -> None:
        """Drop the tokens from position `to` on, with their rewards unless kept. A cut inside the prompt opens it."""
        for values in (self.token_ids, self.mask, self.log_probs):
            del values[to:]
        self.versions = [(start, version) for start, version in self.versions if start < to]
        self.states = [(start, state) for start, state in self.states if start < to]
        for rewards in (self.rewards, self.tool_rewards):
            stay = [(position, value) for position, value in rewards if keep_rewards or position < to]
            # A kept reward may end up on a token that was read. Then it counts for the sampled token before that one.
            rewards[:] = [(min(position, to - 1), value) for position, value in stay]
        if to < self.prompt_len:
            self.prompt_len = to
            self.is_prompt_open = True
