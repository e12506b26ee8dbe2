"""What capture and loops with images rely on in verl 0.9.1: its rendering of images, and what its loops hand on."""

import asyncio

import numpy as np
import pytest
from picture_cases import camera, picture, processor, question, shown
from scripted_llm import ScriptedClient, make_loop, run_loop, tokenizer
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.utils.tokenizer import get_processor_token_id

RED, BLUE = picture("red"), picture("blue", width=16, height=16)


def in_loop(check, *, with_processor: bool = True):
    """Call `check` with a loop of verl's, and return what it returns."""

    async def made_and_checked():
        client = ScriptedClient(lambda _: "a")
        return await check(make_loop(SingleTurnAgentLoop, client, processor=processor() if with_processor else None))

    return asyncio.run(made_and_checked())


def test_the_images_of_messages_are_those_that_the_data_set_class_reads() -> None:
    """base.BranchingAgentLoop.prompt_images: media that a prompt lacks are not there."""

    async def media(loop: AgentLoopBase) -> list[dict]:
        return [await loop.process_multi_modal_info(question(*parts)["raw_prompt"]) for parts in (("a",), ("a", RED))]

    assert in_loop(media) == [{}, {"images": [RED]}]
    assert in_loop(media, with_processor=False) == [{}, {}]


def test_images_need_a_processor() -> None:
    async def supported(loop: AgentLoopBase) -> None:
        loop._assert_mm_supported(False)
        loop._assert_mm_supported(True)

    in_loop(supported)
    with pytest.raises(ValueError, match="Multimodal inputs require"):
        in_loop(supported, with_processor=False)


def test_a_processor_knows_the_tokens_of_its_media() -> None:
    assert get_processor_token_id(processor(), "image") == tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert get_processor_token_id(processor(), "video") == tokenizer().convert_tokens_to_ids("<|video_pad|>")
    assert get_processor_token_id(None, "image") is None


def test_prompts_and_later_messages_have_a_token_for_each_part_of_their_images() -> None:
    """base.BranchingAgentLoop: `prompt_tokens` gives the images, `observe_messages` leaves them in the messages."""
    asked, seen = question("see ", RED)["raw_prompt"], question(BLUE)["raw_prompt"]

    async def rendered(loop: AgentLoopBase) -> tuple[str, str]:
        prompt = loop.continuous_token_builder.build_initial_tokens(asked, tools=None, images=[RED])
        assert prompt == await loop.ct_build_initial_tokens(asked, images=[RED])
        merged, _, _ = await loop.ct_merge_context_msg(asked, [*asked, *seen], prompt, [])
        assert merged.token_ids[: len(prompt)] == prompt
        return tokenizer().decode(prompt), tokenizer().decode(merged.token_ids[len(prompt) :])

    prompt, more = in_loop(rendered)
    assert f"see {shown(2)}<|im_end|>" in prompt
    assert f"user\n{shown(4)}<|im_end|>" in more


def test_a_prompt_with_images_is_refused_where_text_would_be_cut() -> None:
    async def prompt(loop: AgentLoopBase) -> None:
        loop.rollout_config.prompt_length = 4
        await loop.ct_build_initial_tokens(question(RED)["raw_prompt"], images=[RED])

    with pytest.raises(ValueError, match="exceeding"):
        in_loop(prompt)


def test_calls_get_the_settings_of_the_processor() -> None:
    """branch.Branch and engine.ClientEngine send them with images, as verl's loops do."""

    async def settings(loop: AgentLoopBase) -> dict:
        loop.mm_processor_kwargs = {"max_pixels": 9}
        return loop._get_mm_processor_kwargs()

    assert in_loop(settings) == {"max_pixels": 9}


def test_verls_tool_loop_sends_and_returns_the_images_of_its_path() -> None:
    """rows.py: `multi_modal_data` has one image for each run of image tokens, in order; calls have those before."""

    def reply(text: str) -> str:
        return "done" if "the sea" in text else '<tool_call>{"name": "look", "arguments": {"scene": "sea"}}</tool_call>'

    client = ScriptedClient(reply)
    tool = camera(sea=BLUE)

    class WithCamera(ToolAgentLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.tools = {tool.name: tool}

    output = run_loop(WithCamera, client, {}, row=question("see ", RED), processor=processor(), prompt_length=1024)
    assert [image.size for image in output.multi_modal_data["images"]] == [RED.size, BLUE.size]
    assert [[image.size for image in images] for images in client.images] == [[RED.size], [RED.size, BLUE.size]]
    is_image = np.array(output.prompt_ids + output.response_ids) == processor().image_token_id
    assert np.flatnonzero(np.diff(is_image.astype(int)) == 1).size == 2
