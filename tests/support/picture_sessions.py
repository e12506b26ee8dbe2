"""Rows of two sessions of `parallel_tools` with images, as the real worker writes them.

A session is shown a map, looks at two places at once, and concludes about each place by itself and about both.
"""

from typing import Any

import pytest
import transfer_queue as tq
from loop_cases import call
from picture_cases import camera, processor, question
from PIL import Image, ImageDraw
from scripted_llm import PictureDataset
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from worker_cases import InProcessWorker, run_sessions


def drawing(colour: str, shape: str, size: tuple[int, int]) -> Image.Image:
    """Draw a shape on white."""
    image = Image.new("RGB", size, "white")
    box = (size[0] // 8, size[1] // 8, size[0] * 7 // 8, size[1] * 7 // 8)
    draw = ImageDraw.Draw(image)
    {"rectangle": draw.rectangle, "ellipse": draw.ellipse}[shape](box, fill=colour)
    return image


MAP = drawing("darkgreen", "rectangle", (160, 96))
SEA, WOOD = drawing("royalblue", "ellipse", (96, 96)), drawing("sienna", "ellipse", (96, 96))


def reply(text: str) -> str:
    """Look at both places at once; say of each, and then of both, what was seen."""
    if "the sea" in text and "the wood" in text:
        return "The sea is blue and the wood is brown."
    if "the sea" in text:
        return "A blue circle."
    return "A brown circle." if "the wood" in text else call("look", scene="sea") + call("look", scene="wood")


def two_sessions() -> tuple[list[str], list[dict[str, Any]], TensorDict]:
    """Run the sessions; return the keys, tags and columns of their six rows."""
    puts: list[dict[str, Any]] = []

    async def put(**arguments: Any) -> None:
        puts.append(arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tq, "async_kv_batch_put", put)
        worker = InProcessWorker(reply, num_sessions=2, reward_handles=None)
        worker.rollout_config.prompt_length = worker.rollout_config.response_length = 1024
        worker.processor, worker.hf_model_type, worker.dataset_cls = processor(), "qwen2_5_vl", PictureDataset
        worker.tools = [camera(sea=SEA, wood=WOOD)]
        prompt = question("What is at the places of this map? ", MAP)["raw_prompt"]
        errors = run_sessions(worker, num_sessions=2, agent_name="parallel_tools", raw_prompt=prompt)
        assert errors == [None, None]
    rows = {key: row for each in puts[:2] for key, row in zip(each["keys"], each["fields"], strict=True)}
    tags = [tag for each in puts[:2] for tag in each["tags"]]
    return list(rows), tags, list_of_dict_to_tensordict([row.to_dict() for row in rows.values()])
