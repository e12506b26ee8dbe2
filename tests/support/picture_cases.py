"""A processor of Qwen2.5-VL for the scripted LLM, pictures, and tools that return some.

The processor is the real one of transformers, with images processed by PIL and without its part for videos: that part,
and the fast images, need torchvision. A patch has 4 x 4 pixels, and 2 x 2 patches make a token.
"""

import functools
import types

from PIL import Image
from scripted_llm import VISION, tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor
from transformers.models.qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin
from verl.tools.function_tool import FunctionTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

START, STOP, PAD, _ = VISION


class PictureProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor of text and images, bound to its model as verl's `hf_processor` does."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        self.image_token, self.video_token = PAD, VISION[3]
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([PAD, VISION[3]])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)
        self.config = Qwen2_5_VLConfig(
            image_token_id=self.image_token_id,
            video_token_id=self.video_token_id,
            vision_start_token_id=tokenizer.convert_tokens_to_ids(START),
            vision_config={"spatial_merge_size": 2},
        )
        for name in ("get_rope_index", "get_vision_position_ids"):
            setattr(self, name, types.MethodType(vars(Qwen2_5_VLModel)[name], self))


@functools.cache
def processor() -> PictureProcessor:
    """Make the processor of the scripted LLM's tokenizer."""
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    return PictureProcessor(images, tokenizer(), chat_template=tokenizer().chat_template)


def picture(colour: str, *, width: int = 16, height: int = 8) -> Image.Image:
    """Draw an image of one colour; by default it makes two tokens."""
    return Image.new("RGB", (width, height), colour)


def shown(num_tokens: int = 2) -> str:
    """Return the text of a prompt where it shows an image of so many tokens."""
    return START + PAD * num_tokens + STOP


def question(*parts: str | Image.Image) -> dict:
    """Make a dataset row whose prompt is a message of texts and images."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"raw_prompt": [{"role": "user", "content": content}], "uid": "u", "session_id": 0}


def camera(**scenes: Image.Image) -> FunctionTool:
    """Make the tool `look`, which returns the picture of a scene, and says so in words."""

    def look(scene: str) -> ToolResponse:
        return ToolResponse(text=f"the {scene}", image=[scenes[scene].copy()])

    properties = {"scene": {"type": "string", "description": "What to look at."}}
    parameters = {"type": "object", "properties": properties, "required": ["scene"]}
    function = {"name": "look", "description": "Look.", "parameters": parameters}
    return FunctionTool(
        "look", look, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
    )
