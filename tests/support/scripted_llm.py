"""A scripted LLM server for the tests of `rollout_hooks`; everything around it is real.

`ScriptedClient` keeps the contract of verl's `LLMServerClient.generate`, but a function of the prompt's text gives its
answers. The tokenizer is real but small: its tokens are characters and the special tokens of Qwen's chat template, so
verl picks its Qwen builder for it. Agent loops are made as verl's worker makes them.
"""

import asyncio
import functools
from collections.abc import Callable, Iterable

import hydra
from omegaconf import DictConfig
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap
from verl.tools.function_tool import FunctionTool, function_tool, get_function_tool
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

END = "<|im_end|>"
SPECIAL = ["<|im_start|>", END, "<pad>"]
VISION = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CHAT_TEMPLATE = """
{%- macro show(content) %}
{%- if content is string %}{{ content }}
{%- else %}
{%- for block in content or [] %}
{%- if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ block.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
[{{ show(message.content) }}]<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ show(message.content) }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

Reply = str | TokenOutput | Exception


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with characters as tokens, Qwen's special tokens and a chat template that shows images."""
    characters = [chr(code) for code in range(32, 127)] + ["\n", "?"]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*SPECIAL, *characters, *VISION]))}
    tokens = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokens.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=END, pad_token="<pad>", additional_special_tokens=[*SPECIAL[:1], *VISION]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def decode(token_ids: Iterable[int]) -> str:
    return tokenizer().decode(list(token_ids))


@functools.cache
def _composed_config() -> DictConfig:
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer")


def config(**rollout: object) -> DictConfig:
    """Return verl's own configuration with changes under `actor_rollout_ref.rollout` (dots written as `__`)."""
    result = _composed_config().copy()
    settings = {"prompt_length": 256, "response_length": 256, "multi_turn__max_parallel_calls": 8, **rollout}
    for name, value in settings.items():
        node = result.actor_rollout_ref.rollout
        *parents, last = name.split("__")
        for parent in parents:
            node = node[parent]
        node[last] = value
    return result


class ScriptedClient(LLMServerClient):
    """A client that answers each call with a function of the prompt's text.

    `reply` maps the prompt's text to the answer's text (its end token is added), to a whole `TokenOutput`, or to an
    exception to raise. `delay` maps it to the seconds to wait before the answer.
    """

    def __init__(self, reply: Callable[[str], Reply], delay: Callable[[str], float] | None = None) -> None:
        super().__init__(config=config())
        self.reply, self.delay = reply, delay
        self.prompts: list[str] = []
        self.sampling_params: list[dict] = []
        self.request_ids: list[str] = []
        self.images: list[list] = []  # of each call
        self.num_running = self.most_running = 0

    @override
    async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs) -> TokenOutput:
        text = tokenizer().decode(prompt_ids)
        self.prompts.append(text)
        self.sampling_params.append(dict(sampling_params))
        self.request_ids.append(request_id)
        self.images.append(list(kwargs.get("image_data") or []))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.delay(text) if self.delay else 0)
        self.num_running -= 1
        reply = self.reply(text)
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, TokenOutput):
            return reply
        token_ids = tokenizer().encode(reply + END, add_special_tokens=False)
        token_ids = token_ids[: sampling_params.get("max_tokens", len(token_ids))]
        log_probs = [log_prob(len(prompt_ids) + i, token) for i, token in enumerate(token_ids)]
        return TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if sampling_params.get("logprobs") else None,
            stop_reason="completed",
            extra_fields={"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7},
        )


def log_prob(position: int, token: int) -> float:
    """Return the rollout log-prob that `ScriptedClient` reports, different for different tokens and positions."""
    return -(position + token / 1000) / 100


@function_tool("double")
def double(x: int) -> str:
    """Double a number.

    Args:
        x: The number.
    """
    return str(2 * int(x))


@function_tool("broken")
def broken(x: int) -> str:
    """Fail.

    Args:
        x: Ignored.
    """
    del x  # verl makes the tool's schema from the signature
    raise RuntimeError("out of order")


def tools() -> list[FunctionTool]:
    return [get_function_tool("double"), get_function_tool("broken")]


def call_text(x: int, name: str = "double") -> str:
    """Return a tool call in the hermes format."""
    return f'<tool_call>{{"name": "{name}", "arguments": {{"x": {x}}}}}</tool_call>'


class PictureDataset(RLHFDataset):
    """A data set whose messages hold PIL images, which need no decoding."""

    @classmethod
    async def process_multi_modal_info(cls, messages, image_patch_size, config):  # noqa: ARG003  # verl's arguments
        blocks = [block for message in messages for block in message["content"] if isinstance(block, dict)]
        return [block["image"] for block in blocks if block["type"] == "image"] or None, None, None


def make_loop(
    loop_class: type[AgentLoopBase], client: LLMServerClient, *, processor: object = None, **rollout: object
) -> AgentLoopBase:
    """Make an agent loop with the arguments that verl's worker gives it. A model with a processor reads images."""
    settings = config(**rollout)
    return loop_class(
        trainer_config=DictConfigWrap(settings),
        server_manager=client,
        tokenizer=tokenizer(),
        processor=processor,
        hf_model_type="qwen3" if processor is None else "qwen2_5_vl",
        dataset_cls=RLHFDataset if processor is None else PictureDataset,
        data_config=DictConfigWrap(settings.data),
        tools=ToolListWrap(tools()),
    )


def run_loop(loop_class: type[AgentLoopBase], client: LLMServerClient, sampling_params: dict, /, **settings: object):
    """Make an agent loop and run it on one row (`row=`) in a fresh event loop; other settings are `rollout.*`."""
    fields = settings.pop("row", None) or row()

    async def make_and_run():
        return await make_loop(loop_class, client, **settings).run(dict(sampling_params), **fields)

    return asyncio.run(make_and_run())


def row(question: str = "q", **fields: object) -> dict[str, object]:
    """Return a dataset row as a loop's `run` receives it."""
    return {"raw_prompt": [{"role": "user", "content": question}], "uid": "u", "session_id": 0, **fields}
