"""Shared parts of the tests of node rewards: a session whose model gives listed answers, its rows, and a drawn tree.

A letter is a token, and T is a tool's token::

    session 0:  Q ── a A (+1) ─┬─ T ── b B (+2)   finish(0)      reward 1 + 2 + 0 = 3
                               └─ c               finish(-1)     reward 1 - 1 = 0
    session 1:  Q ── d                            finish(3)      reward 3
"""

import asyncio

from scripted_llm import ScriptedClient, decode, encode
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.loops.base import BranchSession

SAMPLING = {"temperature": 1.0, "logprobs": True}
LIMITS = RowLimits(prompt_length=8, response_length=100, wants_log_probs=True)


def says(text):
    """Make an answer without an end token."""
    token_ids = encode(text)
    return TokenOutput(token_ids=token_ids, log_probs=[-1.0] * len(token_ids), stop_reason="completed")


def session(*answers, response_length=100, delay=None):
    """Make a session whose model gives these answers, one per call; the root prompt is Q."""
    remaining = iter(answers)
    client = ScriptedClient(lambda _: says(next(remaining)), delay)
    recording = RecordingClient(client, tree=SessionTree(decode=decode))
    return BranchSession(recording, prompt_ids=encode("Q"), sampling_params=SAMPLING, response_length=response_length)


def written(running, limits=LIMITS):
    """Return the rows of a session as verl gets them."""
    return [output.as_dict() for output in session_rows(running.client.tree, running.outputs(), limits=limits).outputs]


def scores(running):
    return {decode(row["responses"]): row["rm_scores"].tolist() for row in written(running)}


def drawn_rows(of_a=1.0):
    """Return the rows of the drawn sessions by key, with another reward for node a."""

    async def first():
        running = session("aA", "c", "bB")
        root = running.root
        await root.generate()
        root.add_reward(of_a)
        (side,) = root.fork()
        await side.generate()
        side.finish(-1.0)
        root.observe(encode("T"))
        await root.generate()
        root.add_reward(2)
        root.finish(0.0)
        return running

    async def second():
        running = session("d")
        await running.root.generate()
        running.root.finish(3.0)
        return running

    by_text = {}
    for make in (first, second):
        by_text |= {decode(row["responses"]): row for row in written(asyncio.run(make()))}
    return {key: by_text[text] for key, text in (("u_0_0", "aATbB"), ("u_0_1", "aAc"), ("u_1_0", "d"))}
