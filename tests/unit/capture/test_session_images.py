"""The tree of a session whose prompts show images: what parts, what each leaf shows, and what becomes a row."""

import asyncio

import numpy as np
import pytest
import torch
import transfer_queue as tq
from picture_cases import picture, processor, question, shown
from PIL import Image
from scripted_llm import PictureDataset, ScriptedClient, tokenizer
from transformers.models.qwen2_5_vl import Qwen2_5_VLModel
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from worker_cases import InProcessWorker, run_sessions

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.image_runs import IMAGES_FIELD
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_images import SessionImages, cut_before_image
from rollout_hooks.capture.session_tree import SessionTree

IMAGE, VIDEO = 9, 8
RED, BLUE = picture("red"), picture("blue")
LIMITS = RowLimits(16, 16, wants_log_probs=True)


def tree_of(*calls, decode=None):
    """Record calls of (prompt ids, images, output ids); each token has the log-prob -1."""
    images = SessionImages(image_token=IMAGE, video_token=VIDEO)
    tree = SessionTree(images=images, decode=decode)
    for prompt, shows, output in calls:
        call = tree.begin(tree.realign(images.keys_of(prompt, shows)))
        tree.complete(call, output, log_probs=[-1.0] * len(output))
    return tree


def own(prompt, response, mask, images=()):
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask,
        response_logprobs=[-1.0] * len(response),
        multi_modal_data={"images": list(images)},
        metrics=AgentLoopMetrics(),
    )


def shows(row):
    return [image.getpixel((0, 0)) for image in (row.multi_modal_data or {}).get("images", [])]


def test_keys_are_ids_and_numbers_of_what_images_show():
    images = SessionImages(image_token=IMAGE)
    assert images.keys_of([5, 9, 9, 6], [RED]).tolist() == [5, -1, -1, 6]
    assert images.keys_of([5, 9, 9, 6, 9, 7], [BLUE, RED.copy()]).tolist() == [5, -2, -2, 6, -1, 7]
    assert images.ids_of(np.array([5, -2, -2, 6, -1, 7])).tolist() == [5, 9, 9, 6, 9, 7]
    assert images.images_of(np.array([5, -2, -2, 6, -1])) == [BLUE, RED]
    assert images.keys_of([5, 6]).tolist() == [5, 6]


def test_equal_bytes_of_other_sizes_modes_and_palettes_are_other_images():
    images = SessionImages(image_token=IMAGE)
    first, second = Image.new("P", (4, 4)), Image.new("P", (4, 4))
    first.putpalette([255, 0, 0])
    second.putpalette([0, 0, 255])
    others = [Image.new("L", (4, 4)), Image.new("L", (2, 8)), Image.new("RGB", (4, 4)), first, second, first.copy()]
    keys = [images.keys_of([IMAGE], [each]).item() for each in others]
    assert keys == [-1, -2, -3, -4, -5, -4]


@pytest.mark.parametrize("shown_images", [[], [RED, BLUE]])
def test_another_number_of_images_than_the_tokens_show_is_refused(shown_images):
    with pytest.raises(ValueError, match=f"tokens of 1 images and {len(shown_images)} images"):
        SessionImages(image_token=IMAGE).keys_of([5, 9, 9], shown_images)
    with pytest.raises(ValueError, match="tokens of 0 images and 1 images: give the images"):
        SessionImages().keys_of([5, 9, 9], [RED])
    with pytest.raises(ValueError, match="an image of the type str: give a PIL image"):
        SessionImages(image_token=IMAGE).keys_of([5, 9, 9], ["https://example.org/a.png"])


def test_paths_part_where_they_show_other_images():
    """One prompt, two pictures behind the same ids; then a turn behind the first, which shows a third."""
    tree = tree_of(
        ([5, 9, 9, 6], [RED], [1]),
        ([5, 9, 9, 6], [BLUE], [2]),
        ([5, 9, 9, 6, 1, 9, 4], [RED, BLUE], [3]),
    )
    assert [call.kind for call in tree.calls] == [CallKind.ROOT, CallKind.REWRITE, CallKind.CONTINUATION]
    first, second = tree.leaves()
    assert first.token_ids.tolist() == [5, 9, 9, 6, 1, 9, 4, 3]
    assert first.is_generated.tolist() == [False] * 4 + [True, False, False, True]
    assert second.token_ids.tolist() == [5, 9, 9, 6, 2]
    rows = session_rows(tree, [], limits=LIMITS)
    assert [shows(row) for row in rows.outputs] == [[(255, 0, 0), (0, 0, 255)], [(0, 0, 255)]]
    assert [row.response_mask for row in rows.outputs] == [[1, 0, 0, 1], [1]]
    assert rows.num_dropped == 0


def test_forks_that_a_loop_drops_become_rows_beside_its_own_output():
    """The loop returns the path with the blue picture only; equal ids under the red one are another row."""
    tree = tree_of(([5, 9, 9, 6], [RED], [1]), ([5, 9, 9, 6], [BLUE], [1]))
    rows = session_rows(tree, [own([5, 9, 9, 6], [1], [1], [BLUE])], limits=LIMITS).outputs
    assert [shows(row) for row in rows] == [[(255, 0, 0)], [(0, 0, 255)]]
    assert [row.response_mask for row in rows] == [[1], [1]]
    # Under a third picture nobody has sampled the token.
    rows = session_rows(tree, [own([5, 9, 9, 6], [1], [1], [picture("green")])], limits=LIMITS)
    assert [shows(row) for row in rows.outputs] == [[(255, 0, 0)], [(0, 0, 255)]]
    assert rows.num_dropped == 1


def test_a_row_is_cut_before_an_image_that_does_not_fit():
    assert [cut_before_image(np.array([5, -1, -1, 6, -2, -2]), n) for n in range(1, 7)] == [1, 1, 3, 4, 4, 6]
    tree = tree_of(([5], [], [1, 2]), ([5, 1, 2, 9, 9, 6], [RED], [3]))
    limits = [RowLimits(1, length, wants_log_probs=True) for length in (2, 3, 4, 6)]
    rows = [session_rows(tree, [], limits=each) for each in limits]
    assert [row.outputs[0].response_ids for row in rows] == [[1, 2], [1, 2], [1, 2, 9, 9], [1, 2, 9, 9, 6, 3]]
    assert [shows(row.outputs[0]) for row in rows] == [[], [], [(255, 0, 0)], [(255, 0, 0)]]
    assert [row.num_truncated for row in rows] == [1, 1, 1, 0]


@pytest.mark.parametrize("token", [IMAGE, VIDEO])
def test_a_row_with_a_sampled_placeholder_is_dropped(token):
    """Nothing tells what it shows; a row without it stays."""
    tree = tree_of(([5, 9, 9, 6], [RED], [1, token]), ([5, 9, 9, 6], [RED], [2]))
    rows = session_rows(tree, [own([5, 9, 9, 6], [1, token], [1, 1], [RED])], limits=LIMITS)
    assert [row.response_ids for row in rows.outputs] == [[2]]
    assert rows.num_dropped == 1


def test_drift_heals_behind_equal_images_only():
    """Token 3 reads like 1 2. It is healed where the history shows what the recorded path shows."""
    texts = {1: "a", 2: "b", 3: "ab", 4: "t", 5: "s", 6: "e"}

    def decode(ids):
        return "".join(texts[token] for token in ids)

    recorded = ([5, 9, 9, 6], [RED], [1, 2])
    tree = tree_of(recorded, ([5, 9, 9, 6, 3, 4], [RED], [5]), decode=decode)
    (leaf,) = tree.leaves()
    assert leaf.token_ids.tolist() == [5, 9, 9, 6, 1, 2, 4, 5]
    assert tree.calls[1].num_splices == 1
    tree = tree_of(recorded, ([5, 9, 9, 6, 3, 4], [BLUE], [5]), decode=decode)
    assert tree.calls[1].num_splices == 0
    assert tree.leaves()[1].token_ids.tolist() == [5, 9, 9, 6, 3, 4, 5]
    # A picture that comes later drifts along with the text before it.
    tree = tree_of(recorded, ([5, 9, 9, 6, 3, 4, 9, 6], [RED, BLUE], [5]), decode=decode)
    assert tree.leaves()[0].token_ids.tolist() == [5, 9, 9, 6, 1, 2, 4, 9, 6, 5]
    assert tree.images.images_of(tree.leaves()[0].keys) == [RED, BLUE]


def test_the_client_hands_on_images_and_refuses_other_media():
    images = SessionImages(image_token=processor().image_token_id)
    inner = ScriptedClient(lambda _: "x")
    client = RecordingClient(inner, tree=SessionTree(images=images))
    ids = tokenizer().encode(f"look {shown()}", add_special_tokens=False)
    asyncio.run(client.generate("r", prompt_ids=ids, sampling_params={}, image_data=[RED]))
    assert inner.images == [[RED]]
    with pytest.raises(ValueError, match="a call with video_data: only text and images can be recorded"):
        asyncio.run(client.generate("r", prompt_ids=ids, sampling_params={}, image_data=[RED], video_data=["clip"]))
    with pytest.raises(ValueError, match="tokens of 1 images and 0 images"):
        asyncio.run(client.generate("r", prompt_ids=ids, sampling_params={}))
    assert len(client.tree.calls) == 1


@pytest.mark.parametrize("agent_name", ["single_turn_agent", "parallel_tools"])
def test_rows_of_text_of_a_model_that_reads_images_have_no_pixels(agent_name, monkeypatch):
    puts = []

    async def put(**arguments):
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    worker = InProcessWorker(lambda _: "fine", num_sessions=1, reward_handles=None)
    worker.processor, worker.hf_model_type, worker.dataset_cls = processor(), "qwen2_5_vl", PictureDataset
    assert run_sessions(worker, num_sessions=1, agent_name=agent_name) == [None]
    (fields,) = puts[0]["fields"]
    assert "pixel_values" not in fields["multi_modal_inputs"]
    assert fields["image_thumbnails"] == {}
    assert fields["position_ids"].tolist() == [list(range(len(fields["input_ids"])))] * 4
    assert IMAGES_FIELD not in fields["extra_fields"]


def test_the_worker_writes_pixels_positions_and_places_of_each_rows_images(monkeypatch):
    """The single-turn loop of verl, on a prompt with two pictures, through verl's calls of the processor."""
    puts = []

    async def put(**arguments):
        puts.append(arguments)

    monkeypatch.setattr(tq, "async_kv_batch_put", put)
    worker = InProcessWorker(lambda _: "fine", num_sessions=1, reward_handles=None)
    worker.processor, worker.hf_model_type, worker.dataset_cls = processor(), "qwen2_5_vl", PictureDataset
    tall = picture("blue", width=8, height=32)
    prompt = question("a ", RED, " b ", tall)["raw_prompt"]
    assert run_sessions(worker, num_sessions=1, raw_prompt=prompt) == [None]
    (fields,) = puts[0]["fields"]
    ids = fields["input_ids"]
    pixels = processor().image_processor([RED, tall], return_tensors="pt")
    torch.testing.assert_close(fields["multi_modal_inputs"]["pixel_values"], pixels["pixel_values"], rtol=0, atol=0)
    grids = fields["multi_modal_inputs"]["image_grid_thw"]
    assert grids.tolist() == [[1, 2, 4], [1, 8, 2]]
    pad = processor().image_token_id
    runs = fields["extra_fields"][IMAGES_FIELD]
    first, _, second, *_ = np.flatnonzero(ids.numpy() == pad).tolist()
    assert [run[:2] for run in runs] == [(first, first + 2), (second, second + 4)]
    mrope, _ = Qwen2_5_VLModel.get_rope_index(
        processor(),
        ids[None],
        (ids[None] == pad).int(),
        image_grid_thw=grids,
        attention_mask=torch.ones_like(ids[None]),
    )
    assert fields["position_ids"].shape == (4, len(ids))
    assert torch.equal(fields["position_ids"][1:], mrope[:, 0])
    assert "multi_modal_data" not in fields
