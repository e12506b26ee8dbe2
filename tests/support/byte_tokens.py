"""Real tokens: a byte-level tokenizer in which a text has many encodings, and texts as a model samples them."""

import functools
import random

from scripted_llm import CHAT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


@functools.cache
def byte_level_tokenizer() -> PreTrainedTokenizerFast:
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
