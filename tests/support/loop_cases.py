"""Shared parts of the tests of the agent loops: a run on the scripted LLM, and rows as text."""

import asyncio
import functools
import json

import numpy as np
from scripted_llm import END, ScriptedClient, decode, make_loop
from scripted_llm import row as dataset_row
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer import get_processor_token_id

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_images import SessionImages
from rollout_hooks.capture.session_tree import SessionTree
from verl_tree.trainer.advantages import leaf_advantages

SAMPLING = {"temperature": 1.0, "logprobs": True}
ASSISTANT = "<|im_start|>assistant\n"


def call(name, **arguments):
    """Return a tool call in the hermes format."""
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


async def _sleep(**_: int) -> str:
    await asyncio.sleep(30)
    return "late"


def slow_tool():
    """Return a tool that takes half a minute."""
    properties = {"x": {"type": "integer", "description": "Ignored."}}
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    function = {"name": "slow", "description": "Wait.", "parameters": parameters}
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    return FunctionTool("slow", _sleep, schema, is_async=True)


def run(loop_class, reply, /, *, row=None, options=None, delay=None, more_tools=(), processor=None, **rollout):
    """Run a loop on one row and return the outputs and the recording client.

    `options` are the loop's constructor arguments, the rest is `rollout.*`. Every run checks that rows made from the
    recording equal the outputs: a token that a loop marks as trained was sampled there.
    """
    images = SessionImages(image_token=get_processor_token_id(processor, "image"))
    client = RecordingClient(ScriptedClient(reply, delay), tree=SessionTree(decode=decode, images=images))
    settings = {"prompt_length": 1024, "response_length": 1024, "multi_turn__max_assistant_turns": 6, **rollout}

    async def make_and_run():
        loop = make_loop(functools.partial(loop_class, **(options or {})), client, processor=processor, **settings)
        if more_tools:
            loop.tools |= {tool.name: tool for tool in more_tools}
        return await loop.run(dict(SAMPLING), **(row or dataset_row()))

    outputs = asyncio.run(make_and_run())
    limits = RowLimits(settings["prompt_length"], settings["response_length"], wants_log_probs=True)
    rows = session_rows(client.tree, outputs, limits=limits).outputs
    assert [row.response_mask for row in rows] == [output.response_mask for output in outputs]
    assert [row.response_logprobs for row in rows] == [output.response_logprobs for output in outputs]
    return outputs, client


def user(text):
    return f"<|im_start|>user\n{text}{END}\n"


def prompt(output):
    return decode(output.prompt_ids)


def response(output):
    return decode(output.response_ids)


def trained(output):
    """Return the trained tokens as text, one string per stretch."""
    texts, is_open = [], False
    for token, mask in zip(output.response_ids, output.response_mask, strict=True):
        if mask:
            texts = [*texts[:-1], texts[-1] + decode([token])] if is_open else [*texts, decode([token])]
        is_open = bool(mask)
    return texts


def rewards(outputs):
    return [output.leaf_reward for output in outputs]


def advantages(*sessions):
    """Return GRPO's advantages of the leaves of one prompt, session by session."""
    values = np.array([reward for outputs in sessions for reward in rewards(outputs)])
    names = [number for number, outputs in enumerate(sessions) for _ in outputs]
    return leaf_advantages(values, groups=["u"] * len(values), sessions=names, epsilon=0.0)
