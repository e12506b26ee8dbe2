"""Ranks that compute every model call together: verl's Ulysses sequence parallelism without flash attention.

verl builds the process groups, gives all ranks of a team the same rows, and collects from the first of them. What it
does to a model for Ulysses is not needed: a plan knows how its tokens lie on the ranks (`verl_tree.attention.sharding`,
docs/ulysses.md). Source: verl 0.9.1, workers/engine/fsdp and models/transformers/monkey_patch.py.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from typing_extensions import override
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

T = TypeVar("T")


class BuildForTeam(FSDPEngine):
    """An engine with `ulysses_sequence_parallel_size` ranks in a team, whose model verl does not patch for it."""

    def __init__(self, *, model_config: Any, **configs: Any) -> None:
        # verl asks for rows that are packed without padding, as a tree is. The config is frozen and others read it.
        use_remove_padding = model_config.use_remove_padding
        object.__setattr__(model_config, "use_remove_padding", True)
        try:
            super().__init__(model_config=model_config, **configs)
        finally:
            object.__setattr__(model_config, "use_remove_padding", use_remove_padding)
        # The model never sees rows, so verl's patches for padded and packed rows are not needed.
        self.use_remove_padding = False

    @property
    def team(self) -> dist.ProcessGroup | None:
        """The ranks that compute every model call together; None where each computes its own."""
        return self.ulysses_parallel_group

    @override
    def _build_module(self) -> torch.nn.Module:
        # verl's patches exchange heads inside flash attention, or cut the inputs of vision models.
        num_ranks, self.ulysses_sequence_parallel_size = self.ulysses_sequence_parallel_size, 1
        try:
            return super()._build_module()
        finally:
            self.ulysses_sequence_parallel_size = num_ranks


def of_first_rank(make: Callable[[], T], *, team: dist.ProcessGroup | None) -> T:
    """Return what the first rank of a team makes, on all its ranks; `team` is None for a rank alone."""
    if team is None:
        return make()
    made = [make() if dist.get_rank(team) == 0 else None]
    dist.broadcast_object_list(made, group=team, group_src=0)
    return cast("T", made[0])
