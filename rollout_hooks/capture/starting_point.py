"""Where a session starts that goes on from a node of an earlier tree: its calls get the old answers up to there.

    earlier tree      prompt ── turn 1 ──┬── result ── turn 2, right
                                         └── result ── turn 2, wrong
    this session      prompt ── turn 1 ──── result ── tu│rn 2
                                replayed    anew      re-│ sampled
                                                      played

The agent runs from its beginning, so it needs to know nothing of this: its tools act again, its environment is what the
tokens say, and its calls are answered by the tokens of the earlier session as long as they ask what that one asked.
From the node on, or where the environment answers otherwise, the server answers. Replayed tokens are read, not trained.
"""

from dataclasses import dataclass

import numpy as np

STARTING_POINT = "starting_point"
"""Column of prompts: a `StartingPoint`, or None where sessions start at the prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class StartingPoint:
    """A path of N tokens to a node of an earlier tree; N is 0 for the prompt itself.

    Attributes:
        token_ids: (N,) int32.
        is_sampled: (N,) bool, the tokens of the model.
        log_probs: (N,) float32, with which they were sampled; NaN where nothing is known.
        is_inside_a_turn: Whether the turn of the last token goes on.
    """

    token_ids: np.ndarray
    is_sampled: np.ndarray
    log_probs: np.ndarray
    is_inside_a_turn: bool

    @property
    def is_inside(self) -> bool:
        """Whether the node is behind a token of the model, so that there is something to replay."""
        return bool(self.is_sampled.any())

    def end_of_answer(self, prompt: np.ndarray) -> int:
        """Return where the old answer to a prompt (P,) ends; P if there is none.

        It is N where the answer is to go on, if the path ends inside the turn (`goes_on_from`).
        """
        num_prompt = len(prompt)
        if num_prompt >= len(self.token_ids) or not np.array_equal(self.token_ids[:num_prompt], prompt):
            return num_prompt
        read = np.flatnonzero(~self.is_sampled[num_prompt:])
        return num_prompt + int(read[0]) if read.size else len(self.token_ids)

    def goes_on_from(self, end: int) -> bool:
        """Whether an answer that is replayed up to here is then sampled."""
        return end == len(self.token_ids) and self.is_inside_a_turn

    def is_passed_by(self, prompt: np.ndarray) -> bool:
        """Whether a prompt holds the whole path, so that what follows is sampled behind the node."""
        num_tokens = len(self.token_ids)
        return len(prompt) >= num_tokens and np.array_equal(prompt[:num_tokens], self.token_ids)
