"""The tokenizer of `arithmetic_tools` with this recipe's phrases, and a chat template that drops earlier thinking."""

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from recipes.arithmetic_tools import tokenizer as arithmetic_tools

SYSTEM_PROMPT = (
    "Find the value of both expressions, one after the other. calculator adds and subtracts numbers, lookup gives the "
    "number stored under a key such as k41. In every turn think of what you know and what comes next, then call one "
    "tool. With both values known reply <answer>first second</answer>."
)
THOUGHT = "<think>\n{}.\n</think>\n\n"

_PHRASES = (SYSTEM_PROMPT, "<think>", "</think>", "Known: ", "Next: ", "\n\n")

_PRELUDE = """\
{%- set chat = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.role == "assistant" and not loop.last and message.content is string -%}
{%- set chat.messages = chat.messages + [dict(message, content=message.content.split("</think>")[-1].lstrip("\n"))] -%}
{%- else -%}
{%- set chat.messages = chat.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = chat.messages -%}
"""


def drop_thinking(chat_template: str) -> str:
    """Returns the template with a prelude that cuts the thinking off every assistant message but the last message.

    The rule of the templates of DeepSeek-R1 and QwQ. Qwen3's own template has it too, but only for turns before the
    last question of the user: thinking between the tool calls of one question stays.

    Args:
        chat_template: a Jinja template whose messages hold the thinking in their content, ended by ``</think>``.
    """
    return _PRELUDE + chat_template


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer; of several phrases that begin at one place the longest counts."""
    tokenizer = arithmetic_tools.build_tokenizer()
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in _PHRASES])
    tokenizer.chat_template = drop_thinking(tokenizer.chat_template)
    return tokenizer
