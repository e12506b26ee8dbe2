"""The smallest engine of trees there is: a model of transformers as it is, in this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from verl.workers.config import EngineConfig

from verl_tree.attention.hf import check_model, own_attention
from verl_tree.config import TreeConfig
from verl_tree.engine.heads import POLICY, VALUE
from verl_tree.engine.step import TreeEngine
from verl_tree.recurrence.bind import RecurrentLayers
from verl_tree.relay.run import RELAYED


class PlainEngine(TreeEngine):
    """A model of transformers as it is: one rank, one call after another."""

    group = None
    team = None
    compute_dtype = torch.float64
    has_outputs = True

    def __init__(self, model: PreTrainedModel, *, is_critic: bool = False, **tree: Any) -> None:
        super().__init__(head=VALUE if is_critic else POLICY, tree_config=TreeConfig(**tree))
        self.module, self.optimizer = model, None
        self.model_config = SimpleNamespace(hf_config=model.config)
        self.engine_config = EngineConfig(strategy="plain")
        self.num_calls = 0  # on trees
        self.recurrent = RecurrentLayers(model)
        self.recurrent.bind()

    def check(self, *, max_path_len: int, is_relayed: bool) -> None:
        check_model(self.module, max_path_len=max_path_len)
        if is_relayed:
            RELAYED.check(self.module)

    @property
    def embeddings(self) -> list[torch.nn.Module]:
        return [self.module.get_input_embeddings()]

    @contextmanager
    def flat(self) -> Iterator[None]:
        num_calls = self.num_calls
        with own_attention(self.module), self.recurrent.unbound():
            yield
        self.num_calls = num_calls

    def scores(self, *of_call: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        return self.head.score(self.module, *of_call, chunk_size=self.tree_config.logits_chunk_size, **options)

    def run(
        self, first: Sequence[Callable[[], Tensor]], last: Sequence[Callable[[], Tensor]], *, is_last: bool
    ) -> None:
        del is_last  # there is no other rank
        for call in first:
            call()
        for call in last:
            call().backward()
