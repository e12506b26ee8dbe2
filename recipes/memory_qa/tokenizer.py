"""The tokenizer of `arithmetic_tools` and, as one token each, the phrases that never vary in this recipe.

That makes a leaf 20 to 54 tokens long, and a turn that keeps a note six, of which the model has to decide three.
"""

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from recipes.arithmetic_tools import tokenizer as arithmetic_tools
from recipes.memory_qa.tasks import CHATTER, NAMES, REQUEST, SYSTEM_PROMPT

_PHRASES = (
    *(f"{role}\n" for role in ("user", "assistant")),
    f"system\n{SYSTEM_PROMPT}\nmemory_write\nmemory_search",
    f"user\n{REQUEST}",
    "user\nNotes:\n",
    *CHATTER,
    *NAMES,
    "How old are ",
    " is ",
    " and ",
    ". ",
    '<tool_call>\n{"name": "memory_write", "arguments": {"text": "',
    '"}}\n</tool_call>',
    "user\n<tool_response>\nKept as note ",
    ".\n</tool_response>",
    "ok",
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer; of several phrases that begin at one place the longest counts."""
    tokenizer = arithmetic_tools.build_tokenizer()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in _PHRASES])
    return tokenizer
