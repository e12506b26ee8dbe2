"""A branching loop in which one session in `LONG_EVERY` takes many times as long as the others."""

from typing import Any

from typing_extensions import override

from rollout_hooks.loops.base import Branch, BranchingAgentLoop

TURN_LEN = 5
LONG_TURN_LEN = 120
LONG_EVERY = 8
"""With two sessions a prompt, one prompt in four has a long session."""


def is_long(index: int, session_id: int) -> bool:
    """Whether a session of the prompt with this `extra_info.index` is long."""
    return (2 * index + session_id) % LONG_EVERY == 0


class LongTailLoop(BranchingAgentLoop):
    """A loop that forks twice on every path, four leaves a session; one branch of a long session is slow.

    A branch's reward is its share of even tokens, so leaves differ. No turn ends before its length::

        root turn ─┬─ side turn ─┬─ leaf turn
                   │             └─ turn
                   └─ turn ──────┬─ leaf turn
                                 └─ turn, LONG_TURN_LEN tokens in a long session
    """

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        is_long_session = is_long(row["extra_info"]["index"], row["session_id"])
        await _turn(root)
        (side,) = root.fork()
        for branch, mark in ((side, 3), (root, 4)):
            branch.observe([mark] * 3)
            await _turn(branch)
            (leaf,) = branch.fork()
            leaf.observe([5])
            await _turn(leaf)
            leaf.finish(_share_of_even_tokens(leaf))
        await _turn(side)
        side.finish(_share_of_even_tokens(side))
        await _turn(root, LONG_TURN_LEN if is_long_session else TURN_LEN)
        root.finish(_share_of_even_tokens(root))


async def _turn(branch: Branch, turn_len: int = TURN_LEN) -> None:
    await branch.generate({"max_tokens": turn_len, "ignore_eos": True})


def _share_of_even_tokens(branch: Branch) -> float:
    mask = branch.response_mask
    trained = [token for token, is_trained in zip(branch.token_ids[-len(mask) :], mask, strict=True) if is_trained]
    return sum(token % 2 == 0 for token in trained) / len(trained)
