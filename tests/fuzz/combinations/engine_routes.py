"""Routes of experts on verl's own engine: its routers are told routes, or say theirs, by hooks.

A route is found by the ids of its row. So rows of the same ids have the same routes.

Legend: L tokens of a row, N layers of the model, k experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Key = tuple[int, ...]


def draw_routes(
    rows: Sequence[Key], routers: dict[int, int], *, num_layers: int, seed: int, forks: bool
) -> list[Tensor]:
    """Draw routes (L, N, 2) of rows, some unknown. `routers` has the number of experts of each layer with a router.

    Rows that share a token share its route, or with `forks` some have others.
    """
    drawn = []
    for row in rows:
        routes = torch.zeros(len(row), num_layers, 2, dtype=torch.int16)
        own = forks and len(row) > 1 and np.random.default_rng([seed, 1, *row]).random() < 0.4
        for end in range(len(row) - 1):  # nobody knows the route of a last token
            rng = np.random.default_rng([seed, 2, *(row if own and end > 1 else ()), *row[: end + 1]])
            if rng.random() < 0.85:
                for layer, num_experts in routers.items():
                    routes[end, layer] = torch.from_numpy(rng.choice(num_experts, size=2, replace=False))
        drawn.append(routes)
    return drawn


class FlatRoutes:
    """Hooks on a flat model's routers.

    Attributes:
        routes: The routes to impose, by the ids of the row; a row that is not here routes as ever.
        seen: Those of the rows that ran while `records`.
    """

    def __init__(self, model: nn.Module, *, num_layers: int) -> None:
        self.routes: dict[Key, Tensor] = {}
        self.seen: dict[Key, Tensor] = {}
        self.records = False
        self._num_layers = num_layers
        self._rows: list[Key] = []
        self._width = 0
        self.num_experts: dict[int, int] = {}
        for path, module in model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                layer = int(path.split("layers.")[1].split(".")[0])
                self.num_experts[layer] = int(module.num_experts)
                module.register_forward_hook(self._hook(layer))
        model.register_forward_pre_hook(self._note_rows, with_kwargs=True)

    def _note_rows(self, _model: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        ids, mask = kwargs["input_ids"], kwargs["attention_mask"]
        self._width = ids.shape[1]
        lens = mask.long().sum(1).tolist()
        self._rows = [tuple(row[:length].tolist()) for row, length in zip(ids, lens, strict=True)]

    def _hook(self, layer: int) -> Any:
        def hook(router: Any, _inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits, _, native = output
            by_row = [self._given(row, layer) for row in self._rows]
            given = torch.stack(by_row).reshape(-1, by_row[0].shape[-1])
            experts = torch.where(given.any(-1, keepdim=True), given, native)
            if self.records:
                for row, each in zip(self._rows, experts.reshape(len(self._rows), self._width, -1), strict=True):
                    kept = self.seen.setdefault(row, torch.zeros(len(row), self._num_layers, 2, dtype=torch.int16))
                    kept[:, layer] = each[: len(row)].to(torch.int16)
            if type(router).__name__.startswith("GptOss"):
                return logits, logits.gather(-1, experts).softmax(-1), experts
            scores = logits.softmax(-1).gather(-1, experts)
            is_normed = vars(router).get("norm_topk_prob", True)  # Qwen3.5's always are
            return logits, scores / scores.sum(-1, keepdim=True) if is_normed else scores, experts

        return hook

    def _given(self, row: Key, layer: int) -> Tensor:
        padded = torch.zeros(self._width, 2, dtype=torch.int64)
        if row in self.routes:
            padded[: len(row)] = self.routes[row][:, layer].long()
        return padded
