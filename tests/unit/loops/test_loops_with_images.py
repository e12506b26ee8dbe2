"""Loops that branch, with images in the prompt and from tools: what each call is sent, and what each row shows."""

import pytest
from loop_cases import call, prompt, response, run, trained
from picture_cases import camera, picture, processor, question, shown
from scripted_llm import END

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.loops.base import BranchingAgentLoop
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop

RED, BLUE, GREEN = picture("red"), picture("blue"), picture("green", width=16, height=16)
CAMERA = camera(sea=BLUE, wood=GREEN)
RESULT = "\n<|im_start|>user\n["
ANSWER = "]" + END + "\n<|im_start|>assistant\n"
SEA, WOOD = shown() + "the sea", shown(4) + "the wood"


def images_of(output):
    return [(image.size, image.getpixel((0, 0))) for image in output.multi_modal_data["images"]]


def seen(*images):
    return [(image.size, image.getpixel((0, 0))) for image in images]


def look_at_both(text):
    """Look at sea and wood at once; then say what was seen."""
    if "the sea" in text and "the wood" in text:
        return "both"
    if "the sea" in text:
        return "blue"
    return "green" if "the wood" in text else call("look", scene="sea") + call("look", scene="wood")


def test_each_branch_sees_the_images_of_its_own_path():
    outputs, client = run(
        ParallelToolsAgentLoop,
        look_at_both,
        row=question("what is on ", RED, "?"),
        more_tools=[CAMERA],
        processor=processor(),
    )
    turn = call("look", scene="sea") + call("look", scene="wood") + END
    system, user = f"<|im_start|>system\ndouble broken look {END}\n", f"<|im_start|>user\nwhat is on {shown()}?{END}\n"
    assert {prompt(output) for output in outputs} == {system + user + "<|im_start|>assistant\n"}
    assert [response(output) for output in outputs] == [
        turn + RESULT + SEA + ANSWER + "blue" + END,
        turn + RESULT + WOOD + ANSWER + "green" + END,
        turn + RESULT + SEA + "]" + END + RESULT + WOOD + ANSWER + "both" + END,
    ]
    assert [images_of(output) for output in outputs] == [seen(RED, BLUE), seen(RED, GREEN), seen(RED, BLUE, GREEN)]
    sent = [[image.getpixel((0, 0)) for image in images] for images in client._client.images]
    red, blue, green = (image.getpixel((0, 0)) for image in (RED, BLUE, GREEN))
    assert sorted(sent) == sorted([[red], [red, blue], [red, green], [red, blue, green]])
    assert [trained(output) for output in outputs] == [
        [turn, "blue" + END],
        [turn, "green" + END],
        [turn, "both" + END],
    ]
    assert client.tree.count_kinds() == {CallKind.ROOT: 1, CallKind.CONTINUATION: 1, CallKind.FORK: 2}
    assert [len(path.calls) for path in client.tree.leaves()] == [2, 2, 2]


def test_videos_of_a_tool_and_images_for_a_model_of_text_are_refused():
    with pytest.raises(SessionFailed, match="Multimodal inputs require"):
        run(ParallelToolsAgentLoop, look_at_both, more_tools=[CAMERA])


def test_a_cursor_keeps_the_images_before_it_and_goes_into_none():
    class Cursor(BranchingAgentLoop):
        async def run_branches(self, root, **row):
            start = root.position
            seen_by = {"role": "user", "content": [{"type": "image", "image": BLUE}]}
            assert await self.observe_messages(root, [seen_by], history=list(row["raw_prompt"]))
            (behind,) = root.fork()
            with pytest.raises(ValueError, match="inside the image of the tokens"):
                root.rewind(root.token_ids.index(processor().image_token_id) + 1)
            root.rewind(start)
            with pytest.raises(ValueError, match="tokens of 0 images and 1 images"):
                root.observe([1], images=[RED])
            for branch in (behind, root):
                await branch.generate()
                branch.finish(0.0)

    behind, root = run(Cursor, lambda _: "a", row=question(RED), processor=processor())[0]
    assert (images_of(behind), images_of(root)) == (seen(RED, BLUE), seen(RED))


def test_contexts_that_begin_anew_show_the_images_of_their_messages():
    """The notes of `memory`: each context has the row's picture, and the first turn's results are in the second."""

    def reply(text):
        return "done" if "the sea" in text else call("look", scene="sea")

    outputs, _ = run(
        MemoryAgentLoop, reply, row=question("what is ", RED, "?"), more_tools=[CAMERA], processor=processor()
    )
    assert [images_of(output) for output in outputs] == [seen(RED), seen(RED, BLUE)]
    assert shown() in prompt(outputs[0])
