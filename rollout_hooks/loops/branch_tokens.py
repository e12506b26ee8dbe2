"""The tokens of one branch: a prompt, then what the model generated and what it read.

A row is cut into verl's prompt and response where the prompt ends. A cut inside the prompt opens it again: until the
model generates, what the branch reads belongs to the prompt.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from rollout_hooks.capture.session_images import check_num_images, image_spans


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
    images: list[tuple[int, int, Image.Image]] = field(default_factory=list)  # (start, end, image), ascending
    image_token: int | None = None  # Id of the tokens of an image; None if the model reads none

    @classmethod
    def of_prompt(
        cls, prompt_ids: Sequence[int], *, images: Sequence[Image.Image] = (), image_token: int | None = None
    ) -> "BranchTokens":
        """Make the tokens of a root branch."""
        root = cls([], [], [], 0, image_token=image_token)
        root.read(prompt_ids, max_prompt_len=None, images=images)
        root.prompt_len = len(prompt_ids)
        return root

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
            list(self.images),
            self.image_token,
        )

    @property
    def has_generated(self) -> bool:
        """Whether there is a generated token."""
        return any(self.mask)

    def end_before(self, limit: int) -> int:
        """Return the most of the first `limit` tokens that end with no part of an image."""
        return next((start for start, end, _ in self.images if start < limit < end), min(limit, len(self.token_ids)))

    def read(self, token_ids: Sequence[int], *, max_prompt_len: int | None, images: Sequence[Image.Image] = ()) -> None:
        """Append tokens that the model reads; an open prompt takes them up to `max_prompt_len` tokens (None: all).

        `images` are those that the tokens show, in order. Raise ValueError if they show another number.
        """
        spans = image_spans(np.asarray(token_ids), self.image_token)
        check_num_images(spans, images)
        at = len(self.token_ids)
        self.images += [(at + start, at + end, image) for (start, end), image in zip(spans, images, strict=True)]
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
        for start, end, _ in self.images:
            if start < to < end:
                raise ValueError(f"a cut at {to} inside the image of the tokens {start} to {end}: cut before or behind")
        for values in (self.token_ids, self.mask, self.log_probs):
            del values[to:]
        self.images = [each for each in self.images if each[1] <= to]
        self.versions = [(start, version) for start, version in self.versions if start < to]
        self.states = [(start, state) for start, state in self.states if start < to]
        for rewards in (self.rewards, self.tool_rewards):
            stay = [(position, value) for position, value in rewards if keep_rewards or position < to]
            # A kept reward may end up on a token that was read. Then it counts for the sampled token before that one.
            rewards[:] = [(min(position, to - 1), value) for position, value in stay]
        if to < self.prompt_len:
            self.prompt_len = to
            self.is_prompt_open = True
