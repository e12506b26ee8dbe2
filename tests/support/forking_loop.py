"""A loop that branches whatever the model says: trees three forks deep, rewards for every leaf and the first turn."""

from typing import Any

from typing_extensions import override

from rollout_hooks.loops.base import Branch, BranchingAgentLoop

TURN_LEN = 5


class ForkingLoop(BranchingAgentLoop):
    """A loop that generates, forks, observes, generates, forks; a leaf's reward is 1 plus its share of even tokens."""

    @override
    async def run_branches(self, root: Branch, **row: Any) -> None:
        await root.generate({"max_tokens": TURN_LEN})
        root.add_reward(1.0)
        (side,) = root.fork()
        for branch, mark in ((side, 3), (root, 4)):
            branch.observe([mark] * 3)
            await branch.generate({"max_tokens": TURN_LEN})
            (leaf,) = branch.fork()
            leaf.observe([5])
            for end in (leaf, branch):
                await end.generate({"max_tokens": TURN_LEN})
                trained = [
                    token
                    for token, mask in zip(end.token_ids[-len(end.response_mask) :], end.response_mask, strict=True)
                    if mask
                ]
                end.finish(sum(token % 2 == 0 for token in trained) / max(len(trained), 1))
