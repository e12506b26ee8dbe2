"""Inputs of whole runs with images: a random Qwen3-VL with its processor, and prompts with drawn images.

A program with one argument, the folder, because transformers looks for torchvision only once in a process:

    PYTHONPATH=.venv/images python tests/support/tiny_vision.py FOLDER
"""

import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.image import imsave
from tiny_models import SIZES
from tiny_run import CHARACTERS
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

MEDIA = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
PATCHES: dict[str, Any] = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single characters, with the tokens that Qwen's templates and processors ask for."""
    special = ["<end>", "<pad>", "<unk>", "<|im_end|>", *MEDIA]
    vocabulary = {token: index for index, token in enumerate([*special, ":", "\n", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<end>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=special[3:],
        chat_template=TEMPLATE,
    )


def make_model(folder: Path) -> None:
    """Save a random Qwen3-VL, with DeepStack behind the first of two vision blocks, and its processor."""
    tokenizer = make_tokenizer()

    def sizes() -> dict[str, int]:
        return {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}

    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=sizes(), **PATCHES),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=sizes(), **PATCHES),
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    image, video, start, end = (vocabulary[name] for name in MEDIA)
    text = {
        **SIZES["vllm"],
        "vocab_size": len(tokenizer),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 1,
        "in_channels": 3,
        "patch_size": PATCHES["patch_size"],
        "temporal_patch_size": PATCHES["temporal_patch_size"],
        "spatial_merge_size": PATCHES["merge_size"],
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(3)
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the default initialisation: images change probabilities.
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "bias" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(folder)


def draw_image(rng: np.random.Generator) -> bytes:
    """Draw a PNG of 16 x 16 or 16 x 24 pixels: four or six image tokens."""
    pixels = rng.integers(0, 256, (16, int(rng.choice([16, 24])), 3), dtype=np.uint8)
    file = BytesIO()
    imsave(file, pixels, format="png")
    return file.getvalue()


def make_inputs(folder: Path) -> None:
    """Write `model/`, `train.parquet`, `val.parquet` and `loops.yaml`; all prompts have one text and other images."""
    make_model(folder / "model")
    rng = np.random.default_rng(4)
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>what is in this image?"}],
            "images": [{"bytes": draw_image(rng)}],
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(16)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    pd.DataFrame(rows[:4]).to_parquet(folder / "val.parquet")
    (folder / "loops.yaml").write_text("- name: looking\n  _target_: looking_loop.LookingLoop\n")


if __name__ == "__main__":
    make_inputs(Path(sys.argv[1]))
