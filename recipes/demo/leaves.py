"""Trajectories for supervised steps, written as verl's agent loops write them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One trajectory; `trained` marks the tokens that the model is to learn (1) and the others (0)."""

    token_ids: list[int]
    trained: list[int]


class Renderer:
    """Writes chats as tokens, through verl's Continuous Token builder.

    Args:
        tokenizer: With the chat template of the small model.
        schemas: Of the tools that a prompt shows.
        model_type: Of the model; verl has rules for some.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        schemas: Iterable[OpenAIFunctionToolSchema],
        *,
        model_type: str = Qwen3Config.model_type,
    ) -> None:
        self._tokenizer = tokenizer
        self._builder = create_continuous_token_builder(tokenizer, hf_model_type=model_type)
        self._tools = [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]

    @classmethod
    def of_model(cls, model: Path, schemas: Iterable[OpenAIFunctionToolSchema]) -> Self:
        """Return the renderer of a Hugging Face model folder."""
        model_type = AutoConfig.from_pretrained(model).model_type
        return cls(AutoTokenizer.from_pretrained(model), schemas, model_type=model_type)

    def read(self, messages: Sequence[Message]) -> Leaf:
        """Return a prompt."""
        token_ids = self._builder.build_initial_tokens(list(messages), tools=self._tools)
        return Leaf(token_ids, [0] * len(token_ids))

    def read_on(self, leaf: Leaf, messages: Sequence[Message], more: Sequence[Message]) -> Leaf:
        """Return `leaf`, which ends with `messages`, with `more` messages behind it."""
        merged = self._builder.merge_context_tokens(
            list(messages), [*messages, *more], leaf.token_ids, tools=self._tools
        )
        num_read = len(merged.token_ids) - len(leaf.trained)
        return Leaf(merged.token_ids, leaf.trained + [0] * num_read)

    def write(self, leaf: Leaf, text: str) -> Leaf:
        """Return `leaf` with a turn of the model and its end token behind it, both to be learnt."""
        written = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Leaf(leaf.token_ids + written, leaf.trained + [1] * len(written))
