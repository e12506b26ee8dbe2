"""Images in requests to the gateway: what the model is sent, what is recorded, and what is refused with 400."""

import base64
import io
import warnings

import openai
import pytest
from gateway_cases import SAMPLING, chat_format, client_engine, text_of, with_gateway
from picture_cases import picture, processor, shown
from PIL import Image
from scripted_llm import END, ScriptedClient, run_loop, tokenizer
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_images import SessionImages
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.loops.blackbox import BlackboxAgentLoop

pytestmark = pytest.mark.timeout(60)

RED, BLUE = picture("red"), picture("blue")
ASSISTANT = "<|im_start|>assistant\n"


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def user(*parts: str | Image.Image) -> dict:
    """Make a message of texts and images, each text as it is and each image as a PNG."""
    blocks = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]
    return {"role": "user", "content": blocks}


def open_session(server, reply, name="s"):
    builder = create_continuous_token_builder(tokenizer(), hf_model_type="qwen2_5_vl", processor=processor())
    token = processor().image_token_id
    form = chat_format(render=builder.build_initial_tokens, image_token=token)
    engine = client_engine(reply, images=SessionImages(image_token=token))
    server.open(name, engine, form=form)
    return engine


def colours(images):
    return [image.getpixel((0, 0)) for image in images]


@with_gateway
async def test_a_conversation_with_images_is_one_leaf_and_another_image_a_fork(server):
    engine = open_session(server, lambda text: "blue" if text.count("<|vision_start|>") > 1 else "red")
    create = server.client("s").chat.completions.create
    first = [user("what is ", RED, "?")]
    answer = (await create(model="policy", messages=first)).choices[0].message.content
    second = [*first, {"role": "assistant", "content": answer}, user(BLUE)]
    await create(model="policy", messages=second)
    await create(model="policy", messages=[user("what is ", BLUE, "?")])
    prompt = f"<|im_start|>user\nwhat is {shown()}?{END}\n{ASSISTANT}"
    more = f"\n<|im_start|>user\n{shown()}{END}\n{ASSISTANT}"
    assert engine.scripted.prompts == [prompt, prompt + "red" + END + more, prompt]
    red, blue = colours([RED, BLUE])
    assert [colours(images) for images in engine.scripted.images] == [[red], [red, blue], [blue]]
    assert [text_of(leaf) for leaf in engine.tree.leaves()] == [
        prompt + "red" + END + more + "blue" + END,
        prompt + "red" + END,
    ]
    rows = session_rows(engine.tree, [], limits=RowLimits(256, 256, wants_log_probs=True)).outputs
    assert [colours(row.multi_modal_data["images"]) for row in rows] == [[red, blue], [blue]]


@with_gateway
async def test_responses_take_images_of_users_and_of_tools_and_go_on_from_them(server):
    engine = open_session(server, lambda _: "fine")
    create = server.client("s").responses.create
    part = {"type": "input_image", "image_url": url_of(RED, "JPEG"), "detail": "original"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "see "}, part]}]
    first = await create(model="policy", input=items)
    call = {"type": "function_call", "call_id": "c", "name": "double", "arguments": "{}"}
    result = {"type": "input_image", "image_url": url_of(BLUE), "detail": "high"}  # as Codex's view_image has it
    output = {"type": "function_call_output", "call_id": "c", "output": [result]}
    await create(model="policy", input=[call, output], previous_response_id=first.id)
    assert f"see {shown()}" in engine.scripted.prompts[0]
    assert engine.scripted.prompts[1].endswith(f"[{shown()}]{END}\n{ASSISTANT}")
    ((first,), second) = engine.scripted.images
    assert first.getpixel((0, 0))[0] > 250  # JPEG is not exact
    assert colours(second)[1] == BLUE.getpixel((0, 0))


@with_gateway
async def test_transparent_images_are_shown_on_white(server):
    engine = open_session(server, lambda _: "x")
    clear = Image.new("RGBA", (16, 8), (255, 0, 0, 0))
    await server.client("s").chat.completions.create(model="policy", messages=[user(clear)])
    ((image,),) = engine.scripted.images
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


PNG = url_of(RED)
HEAD, _, FILE = PNG.partition(",")


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://example.org/a.png", "nothing is fetched"),
        ("file:///etc/passwd", "nothing is fetched"),
        ("data:image/gif;base64,R0lGODlh", "other formats are not read"),
        ("data:image/png;base64,***", "this is no base64"),
        ("data:image/png;base64,AAAA", "no whole PNG or JPEG file"),
        (f"{HEAD},{FILE[:40]}", "no whole PNG or JPEG file"),
        (url_of(picture("red", width=65, height=64)), "has 65 x 64 pixels, and 4096 are the most"),
    ],
    ids=["remote", "local", "gif", "no base64", "no image", "half an image", "large"],
)
@with_gateway(max_pixels=4096)
async def test_what_is_no_image_to_be_read_is_refused_by_name(server, url, reason):
    engine = open_session(server, lambda _: "x")
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, answer = await server.post({"messages": [message]})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "messages", "invalid_image")
    assert reason in error["message"]
    assert len(error["message"]) < 300
    assert not engine.tree.calls


SYSTEM = {**user(RED), "role": "system"}
LOW = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}]}


@pytest.mark.parametrize(
    ("session", "message", "reason"),
    [
        ("s", user(RED, BLUE), "show 2 images, and 1 are the most"),
        ("s", SYSTEM, "the role system shows an image"),
        ("s", LOW, "detail='low'"),
        ("s", user("what is <|image_pad|>?"), "tokens of 1 images and 0 images"),
        ("text", user(RED), "this model reads text"),
    ],
)
@with_gateway(max_images=1)
async def test_images_are_counted_and_go_to_models_that_read_them_from_those_who_may_show_them(
    server, session, message, reason
):
    open_session(server, lambda _: "x")
    server.open("text", client_engine(lambda _: "x"))
    status, answer = await server.post({"messages": [message]}, session=session)
    assert status == 400
    assert reason in answer["error"]["message"]


async def two_looks(*, base_url, api_key, model, row):
    """Ask about the row's image, and apart from that about another one."""
    (content,) = (message["content"] for message in row["raw_prompt"])
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for image in (content[0]["image"], BLUE):
            await client.chat.completions.create(model=model, messages=[user(image, "?")])
    return 1.0


def test_an_agent_that_shows_images_is_trained_on_a_row_for_each():
    tree = SessionTree(decode=tokenizer().decode, images=SessionImages(image_token=processor().image_token_id))
    client = RecordingClient(ScriptedClient(lambda _: "seen"), tree=tree)
    row = {"raw_prompt": [{"role": "user", "content": [{"type": "image", "image": RED}]}], "uid": "u", "session_id": 0}

    class Agent(BlackboxAgentLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, agent=f"{__name__}:two_looks", **kwargs)

    outputs = run_loop(Agent, client, SAMPLING, row=row, processor=processor())
    assert [colours(output.multi_modal_data["images"]) for output in outputs] == [colours([RED]), colours([BLUE])]
    assert [output.leaf_reward for output in outputs] == [1.0, 1.0]
