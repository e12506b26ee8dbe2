"""A chat template that drops earlier thinking."""

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
    """Return the Jinja template with a prelude that cuts the thinking off every assistant message but the last message.

    Thinking is what a message's content has before ``</think>``. This is the rule of the templates of DeepSeek-R1 and
    QwQ. Qwen3's own template has it for turns before the last question of the user only: thinking between the tool
    calls of one question stays.
    """
    return _PRELUDE + chat_template
