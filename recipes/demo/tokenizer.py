"""A character-level tokenizer in Hugging Face's format, with Qwen3's chat and tool-call markup.

Every printable ASCII character is a token. So are pairs of digits, the markup of the chat and the phrases that never
vary (the system prompt, the fixed parts of a tool call). A session is then about 120 tokens long: the small model
spends its positions on what it has to decide, and copies a two-digit number in one step. Text and tool calls look as
with a Qwen3 tokenizer, so verl's ``hermes`` tool parser and its Continuous Token builder for ``qwen3`` read them.
"""

import re
import string
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AddedToken, PreTrainedTokenizerFast

from recipes.demo.tasks import CONCLUSION, SYSTEM_PROMPT

END_OF_TURN = "<|im_end|>"
_PADDING = "<|endoftext|>"
_UNKNOWN = "<|unknown|>"
_CONTROL_TOKENS = (_PADDING, _UNKNOWN, "<|im_start|>", END_OF_TURN)
_PHRASES = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<answer>",
    "</answer>",
    SYSTEM_PROMPT,
    CONCLUSION,
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}',
    "system",
    "user",
    "assistant",
    "calculator",
    "lookup",
    "expression",
    "key",
    "error: ",
    " + ",
    " - ",
    " = ",
    "; ",
)

# Each message ends with <|im_end|> and a newline; results of one turn share a user message, as in Qwen3's template.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "tool" -%}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" -%}{{ "<|im_start|>user" }}{%- endif -%}
{{ "\n<tool_response>\n" + message.content + "\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" -%}{{ "<|im_end|>\n" }}{%- endif -%}
{%- else -%}
{{ "<|im_start|>" + message.role + "\n" + message.content }}
{%- if message.role == "system" and tools -%}
{%- for tool in tools -%}{{ "\n" + tool.function.name }}{%- endfor -%}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ "\n" }}{%- endif -%}
{{ "<tool_call>\n" }}
{{- {"name": call.function.name, "arguments": call.function.arguments} | tojson -}}
{{ "\n</tool_call>" }}
{%- endfor -%}
{{ "<|im_end|>\n" }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|im_start|>assistant\n" }}{%- endif -%}
"""


def build_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return the tokenizer; its vocabulary is fixed, nothing is trained.

    Args:
        phrases: More phrases that become one token each; of several that begin at one place the longest counts.
    """
    characters = [c for c in string.printable if c.isprintable()] + ["\n"]
    digit_pairs = [f"{number:02}" for number in range(100)]
    vocabulary = [*_CONTROL_TOKENS, *_PHRASES, *digit_pairs, *characters]
    tokenizer = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(vocabulary)}, unk_token=_UNKNOWN)
    )
    # Longest phrase first: the system prompt contains shorter ones.
    pattern = "|".join(re.escape(phrase) for phrase in sorted(_PHRASES, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pattern}|\d\d|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CONTROL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=_PADDING,
        unk_token=_UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return fast
