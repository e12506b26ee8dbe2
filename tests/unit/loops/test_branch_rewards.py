"""Rewards of nodes (`Branch.add_reward`): where they lie in the rows, and who has them."""

import asyncio
import copy
import math

import numpy as np
import pytest
import torch
from branch_reward_cases import SAMPLING, decode, drawn_rows, encode, scores, session, written
from scripted_llm import END, ScriptedClient, make_loop, tokenizer
from scripted_llm import row as dataset_row
from verl.utils.tokenizer.continuous_token import GLMContinuousTokenBuilder
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.loops.base import BranchingAgentLoop


def test_rewards_lie_on_the_last_token_of_their_turn():
    rows = drawn_rows()
    assert rows["u_0_0"]["rm_scores"].tolist() == [0, 1, 0, 0, 2]
    assert rows["u_0_1"]["rm_scores"].tolist() == [0, 1, -1]
    assert rows["u_1_0"]["rm_scores"].tolist() == [3]
    assert rows["u_0_0"]["response_mask"].tolist() == [1, 1, 0, 1, 1]
    assert rows["u_0_0"]["rm_scores"].dtype == torch.float32
    assert [row["extra_fields"]["turn_scores"] for row in rows.values()] == [[1, 2], [1], []]
    assert "node_rewards" not in rows["u_0_0"]


async def test_forks_inherit_what_was_given_before_and_rewind_drops_what_lies_behind():
    running = session("ab", "cd", "ef", "gh")
    root = running.root
    await root.generate()
    (before,) = root.fork()
    root.add_reward(1.0)
    middle = root.position
    await root.generate()
    root.add_reward(0.25)
    root.add_reward(0.5)  # they add up
    (kept,) = root.fork()
    kept.finish(0.0)
    root.rewind(middle + 1)  # inside the turn cd: its reward was for the whole of it
    (inside,) = root.fork()
    await inside.generate()
    inside.finish(0.0)
    root.rewind(middle)
    (after,) = root.fork()
    await before.generate()
    before.finish(0.0)
    after.finish(0.0)
    root.restart(encode("R"))
    with pytest.raises(ValueError, match="no token that the model sampled"):
        root.add_reward(1.0)
    assert scores(running) == {
        "abgh": [0, 0, 0, 0],
        "abcd": [0, 1, 0, 0.75],
        "abcef": [0, 1, 0, 0, 0],
        "ab": [0, 1],
    }


async def test_a_reward_on_the_cursor_goes_to_the_model_not_to_what_it_read():
    running = session("ab")
    await running.root.generate()
    running.root.observe(encode("TT"))
    running.root.add_reward(1.0)
    running.root.rewind(running.root.position - 1)  # behind it
    running.root.finish(0.5)
    # The leaf's own reward lies on the last token, as verl's score does.
    assert scores(running) == {"abT": [0, 1, 0.5]}


def test_rewards_do_not_depend_on_which_branch_is_faster():
    async def run(slow):
        running = session("ab", "c", "c", delay=lambda prompt: 0.02 if prompt.endswith(slow) else 0.0)
        await running.root.generate()
        running.root.add_reward(1.0)

        async def attempt(branch, mark, value):
            branch.observe(encode(mark))
            await branch.generate()
            branch.add_reward(value)
            branch.finish(0.0)

        left, right = running.root.fork(2)
        await asyncio.gather(attempt(left, "L", 0.5), attempt(right, "R", -0.5))
        return [(decode(row["responses"]), row["rm_scores"].tolist()) for row in written(running)]

    expected = [("abLc", [0, 1, 0, 0.5]), ("abRc", [0, 1, 0, -0.5])]
    assert asyncio.run(run("L")) == asyncio.run(run("R")) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1", np.array([1.0, 2.0])])
def test_bad_values_are_refused_by_name(value):
    async def run():
        running = session("a")
        await running.root.generate()
        running.root.add_reward(value)

    with pytest.raises(ValueError, match=r"add_reward\(.*a reward is a finite number"):
        asyncio.run(run())


def test_misuse_is_refused_with_the_remedy():
    root = session("a").root
    with pytest.raises(ValueError, match=r"add_reward\(1\.0\).*generate before, or give the reward to `finish`"):
        root.add_reward(1.0)
    root.observe(encode("T"))
    with pytest.raises(ValueError, match="no token that the model sampled"):
        root.add_reward(1.0)
    root.finish(0.0)
    with pytest.raises(ValueError, match="finished"):
        root.add_reward(1.0)
    with pytest.raises(ValueError, match="must be finite"):
        TreeAgentLoopOutput(
            prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, node_rewards=((0, math.nan),)
        )


async def test_a_reward_behind_a_cut_moves_to_the_last_trained_token_that_is_left():
    running = session("ab", "cd")
    root = running.root
    await root.generate()
    root.observe(encode("T"))
    await root.generate()
    root.add_reward(1.0)
    root.finish(0.0)
    (output,) = running.outputs()
    cut = {"response_ids": output.response_ids[:3], "response_mask": output.response_mask[:3], "reward_score": 0.0}
    assert output.model_copy(update=cut).as_dict()["rm_scores"].tolist() == [0, 1, 0]


async def test_a_reward_moves_with_its_token_where_drift_is_healed():
    """The agent sends `END` back as its letters; what was sent, and is trained, is the one token that was sampled."""
    running = session("a" + END, "b", "c")
    root = running.root
    start = root.position
    await root.generate()
    root.rewind(start)
    root.observe(encode("a") + [tokenizer().convert_tokens_to_ids(letter) for letter in END] + encode("T"))
    await root.generate()
    root.add_reward(1.0)
    await root.generate()
    root.finish(0.5)
    assert len(running.outputs()[0].response_ids) == 1 + len(END) + 3
    assert scores(running) == {"a" + END + "Tbc": [0, 0, 0, 1, 0.5]}


OBSERVATION = "<|observation|>"


class Observing(BranchingAgentLoop):
    """Rewards its turn, then reads a tool's message."""

    async def run_branches(self, root, **row):
        history = [*row["raw_prompt"], {"role": "assistant", "content": "x"}]
        await root.generate()
        root.add_reward(1.0)
        assert await self.observe_messages(root, [{"role": "tool", "content": "6"}], history=history)
        root.finish(0.0)


async def test_a_reward_outlives_the_stop_token_that_a_template_takes_away():
    """GLM's stop token <|observation|> is the first token of the tool's message, so verl's builder takes it away."""
    glm = copy.deepcopy(tokenizer())
    glm.add_tokens([OBSERVATION, "<|user|>"], special_tokens=True)
    stop = glm.convert_tokens_to_ids(OBSERVATION)
    answer = TokenOutput(token_ids=[*encode("xy"), stop], log_probs=[-1.0] * 3, stop_reason="completed")
    loop = make_loop(Observing, ScriptedClient(lambda _: answer))
    loop.continuous_token_builder = GLMContinuousTokenBuilder(glm)
    (output,) = await loop.run(dict(SAMPLING), **dataset_row())
    assert (output.response_ids[:2], stop in output.response_ids) == (encode("xy"), False)
    assert output.response_mask[:3] == [1, 1, 0]
    assert output.as_dict()["rm_scores"].nonzero().tolist() == [[1]]


@pytest.mark.parametrize(("to", "expected"), [(2, [1, 0, 0, 0]), (1, [0, 1, 0])])
async def test_rewards_that_are_kept_move_to_a_sampled_token(to, expected):
    """Behind Q a, or behind Q: nothing sampled is left there, so the next turn has it."""
    running = session("abcd", "ef")
    root = running.root
    await root.generate()
    root.add_reward(1.0)
    root.rewind(to, keep_rewards=True)
    root.observe(encode("T"))
    await root.generate()
    root.finish(0.0)
    assert list(scores(running).values()) == [expected]
