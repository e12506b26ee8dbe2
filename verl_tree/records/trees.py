"""The trajectories of a group as they are stored and shown: tokens, masks, log-probs, rewards, advantages."""

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from typing import Any

import numpy as np

from verl_tree.tree import TokenForest

LEFT_OUT = "left_out"
"""Key in the `reward_extra_info` of a leaf that made no row: `abandoned` (nobody read the answer) or `dropped`."""
FOUND = "canary"
"""Key in the `reward_extra_info` of a leaf that the canary of a training run found wrong (`tree.canary`)."""
ROLE = "leaf_role"
"""Key in the `reward_extra_info` that files have of a leaf with a role; `StoredLeaf.role` once it is read."""
_OPTIONAL = ("token_rewards", "token_advantages")


@dataclass(frozen=True, slots=True)
class CallRun:
    """Consecutive tokens of a trajectory, `start` to `end` (half-open), that one LLM call sampled.

    `call` is the call's index in its session, in the order of sending. `kind` is how its prompt related to earlier
    calls (`rollout_hooks.capture.call_kinds.CallKind`). `min_global_steps` and `max_global_steps` are the first and the
    last version of the weights that sampled it, None if unknown; they differ if it was interrupted and resumed.
    """

    call: int
    kind: str
    start: int
    end: int
    min_global_steps: int | None = None
    max_global_steps: int | None = None


@dataclass(frozen=True, slots=True)
class ImageRun:
    """Tokens of a trajectory, `start` to `end` (half-open), that show the image `number`.

    Images with one number are equal (`rollout_hooks.capture.image_runs`); numbers are above all token ids.
    """

    start: int
    end: int
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredLeaf:
    """One trajectory of L tokens, the last R of them the response.

    Attributes:
        session, leaf: Its place in the group. verl's row key is `{uid}_{session}_{leaf}`.
        token_ids: (L,) int32.
        prompt_len: L - R.
        is_trained: (L,) bool, verl's response mask; False on the prompt.
        log_probs: (L,) float32 rollout log-probs, NaN where there is none.
        token_rewards: (R,) float32, verl's `rm_scores`; None if nothing was scored.
        token_advantages: (R,) float32; None if none were computed (validation).
        reward_extra_info: JSON values from the reward function.
        min_global_steps, max_global_steps: First and last version of the weights, None if unknown.
        calls: The parts that LLM calls sampled, ascending; empty if not recorded.
        images: Its images, ascending.
        role: What it was for (docs/advantages.md); None if it has no role.
    """

    session: int
    leaf: int
    token_ids: np.ndarray
    prompt_len: int
    is_trained: np.ndarray
    log_probs: np.ndarray
    token_rewards: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    reward_extra_info: dict[str, Any] | None = None
    min_global_steps: int | None = None
    max_global_steps: int | None = None
    calls: tuple[CallRun, ...] = ()
    images: tuple[ImageRun, ...] = ()
    role: str | None = None

    def __post_init__(self) -> None:
        ids = np.asarray(self.token_ids)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu" or ids.min() < -(2**31) or ids.max() >= 2**31:
            raise ValueError(f"token_ids of shape {ids.shape} and {ids.dtype}: give at least one 32-bit token id")
        if not 0 <= self.prompt_len <= len(ids):
            raise ValueError(f"prompt_len={self.prompt_len} of {len(ids)} tokens: give 0..{len(ids)}")
        object.__setattr__(self, "token_ids", ids.astype(np.int32, copy=False))
        response_len = len(ids) - self.prompt_len
        for name, value, num_values, dtype in (
            ("is_trained", self.is_trained, len(ids), bool),
            ("log_probs", self.log_probs, len(ids), np.float32),
            ("token_rewards", self.token_rewards, response_len, np.float32),
            ("token_advantages", self.token_advantages, response_len, np.float32),
        ):
            if value is None and name in _OPTIONAL:
                continue
            array = np.asarray(value, dtype=dtype)
            if array.shape != (num_values,):
                raise ValueError(f"{name} has shape {array.shape}: give {num_values} values, one per token")
            object.__setattr__(self, name, array)

    @property
    def reward(self) -> float | None:
        """Sum of the token rewards; None if nothing was scored."""
        return None if self.token_rewards is None else float(self.token_rewards.sum(dtype=np.float64))

    @property
    def advantage(self) -> float | None:
        """The advantage of all trained tokens; None if there is none or if it varies along the leaf."""
        if self.token_advantages is None:
            return None
        is_trained = self.is_trained[self.prompt_len :]
        trained = self.token_advantages[is_trained]
        value = trained[0] if trained.size else np.float32(0)
        return float(value) if (self.token_advantages == np.where(is_trained, value, 0)).all() else None

    @property
    def is_left_out(self) -> bool:
        """Whether it made no row; see `StoredTree.left_out`."""
        is_told = LEFT_OUT in (self.reward_extra_info or {})
        return is_told and self.token_rewards is None and not self.is_trained.any()

    def keys(self) -> np.ndarray:
        """Return what tells its tokens from those of others, (L,) int64: ids, and numbers of images in their place."""
        keys = self.token_ids.astype(np.int64)
        for run in self.images:
            keys[run.start : run.end] = run.number
        return keys

    def row(self) -> dict[str, np.ndarray]:
        """Return the trajectory under verl's names, as its trainer, an SFT job or a replay takes it.

        `prompts` (P,), `responses` (R,), `input_ids` (L,) and `response_mask` (R,) are int64. `rollout_log_probs` (R,)
        float32 is there if any are known, 0 for the others; `rm_scores` and `advantages` (R,) float32 if known.
        """
        input_ids, response = self.token_ids.astype(np.int64), slice(self.prompt_len, None)
        row = {
            "prompts": input_ids[: self.prompt_len],
            "responses": input_ids[response],
            "input_ids": input_ids,
            "response_mask": self.is_trained[response].astype(np.int64),
        }
        if not np.isnan(self.log_probs).all():
            row["rollout_log_probs"] = np.nan_to_num(self.log_probs[response], nan=0.0)
        if self.token_rewards is not None:
            row["rm_scores"] = self.token_rewards
        if self.token_advantages is not None:
            row["advantages"] = self.token_advantages
        return row


@dataclass(frozen=True, slots=True, eq=False)
class StoredTree:
    """The trajectories of the group `uid` at one global step, in the order of their rows.

    `thumbnails` are its images by their numbers, as small JPEG files; some or all may be missing.

    `known_forest` is their forest, if the caller has it already, or if a file of an older version does not tell where
    rows with images part. What its tokens are does not matter.

    `left_out` are leaves that made no row: nothing of them is trained, they have no reward, and `reward_extra_info` has
    the reason (`LEFT_OUT`). Files and pages show them; they are not in `leaves` and not in the forest.
    """

    step: int
    uid: str
    leaves: tuple[StoredLeaf, ...]
    known_forest: InitVar[TokenForest | None] = None
    thumbnails: Mapping[int, bytes] = field(default_factory=dict)
    left_out: tuple[StoredLeaf, ...] = ()
    _forest: TokenForest | None = field(init=False, repr=False)

    def __post_init__(self, known_forest: TokenForest | None) -> None:
        if not self.leaves:
            raise ValueError(f"the tree {self.uid!r} has no leaves: leave it out")
        object.__setattr__(self, "_forest", known_forest)

    def shown(self) -> "StoredTree":
        """Return the tree with those that are left out behind its leaves."""
        if not self.left_out:
            return self
        return StoredTree(self.step, self.uid, self.leaves + self.left_out, thumbnails=self.thumbnails)

    def forest(self) -> TokenForest:
        """Return the forest of the leaves in their order; it is built once."""
        if self._forest is None:
            object.__setattr__(self, "_forest", TokenForest.from_sequences([leaf.keys() for leaf in self.leaves]))
        assert self._forest is not None
        return self._forest


def end_nodes(forest: TokenForest) -> np.ndarray:
    """Return the node in which each trajectory ends: (S,) int64, in the order of the trajectories."""
    ends = np.zeros(forest.num_leaves, dtype=np.int64)
    bounds = zip(forest.node_first_leaf.tolist(), forest.node_last_leaf.tolist(), strict=True)
    # Preorder: the deepest node of a leaf comes last.
    for node, (first, last) in enumerate(bounds):
        ends[forest.order[first:last]] = node
    return ends
