"""What an engine of verl must bring so that mini-batches are computed as forests (`verl_tree.engine.step`).

It brings its model, which computes one call at a time, and the order in which the calls of a step run. An engine runs
them one after another, or hands them to a pipeline's schedule.

Legend: C kinds of scores, K scores of a model call.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.config import EngineConfig

from verl_tree.config import TreeConfig
from verl_tree.engine.heads import Head
from verl_tree.engine.routes.router_replay import RouterReplay
from verl_tree.engine.rows.micro_batch import MicroBatchRows, device_of_rank
from verl_tree.functional.images import PackImages, reads_images
from verl_tree.functional.memory import gradients_aside
from verl_tree.functional.scorer import LogitReading
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import Compute, Mode, RelayRun, watched
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.sharding import SequenceShard


class ModelCalls(ABC):
    """The calls of an engine's model. What is abstract here, an engine brings.

    Besides, it has what every engine of verl has: `model_config`, `engine_config`, `module`, `optimizer`.

    Attributes:
        head: What it scores.
        has_schedule: Whether a pipeline's schedule runs its calls, which gets all of a mini-batch at once.
        has_outputs: Whether this rank has the scores of a call: all ranks, or those of a pipeline's last stage.
        call_multiple: Of what the number of calls of a step must be a multiple.
        replay: The routers of its model, if `router_replay.mode` says so; the engine sets it when it builds the model.
    """

    has_schedule = False
    has_outputs: bool
    call_multiple = 1
    model_config: Any
    engine_config: EngineConfig
    module: Any
    optimizer: Any

    def __init__(self, *, head: Head, tree_config: TreeConfig) -> None:
        self.head, self.tree_config = head, tree_config
        self.replay: RouterReplay | None = None

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks, each of which has rows of its own."""

    @property
    @abstractmethod
    def team(self) -> dist.ProcessGroup | None:
        """The ranks that have the same rows and compute every model call together; None where each computes its own."""

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which the model computes its keys and values."""

    @abstractmethod
    def check(self, *, max_path_len: int, is_relayed: bool) -> None:
        """Refuse, with a ValueError, rows of that length or a relayed update which the model would compute wrongly."""

    @abstractmethod
    def scores(
        self,
        call: RelayCall,
        layout: TreeLayout,
        *,
        plan: AttentionPlan,
        images: PackImages | None,
        temperature: float | Tensor,
        calculate_entropy: bool,
        reading: LogitReading | None = None,
    ) -> Tensor:
        """Run the model on one call and return its scores, (C, K); see `verl_tree.functional.relayed.call_scores`.

        Without them (`makes_scores`) it returns what it hands on.
        """

    @abstractmethod
    def run(
        self,
        first: Sequence[Callable[[], Tensor]],
        last: Sequence[Callable[[], Tensor]],
        *,
        is_last: bool,
    ) -> None:
        """Run the calls of a step: `first` without gradient, then `last`, each of which returns what runs backward.

        All of them in their order, and the backward of a `last` call before the next `last` call. All ranks have the
        same number of each. `is_last` says whether they exchange their gradients with the last call.
        """

    @property
    @abstractmethod
    def embeddings(self) -> list[torch.nn.Module]:
        """The modules of this rank that embed tokens."""

    @abstractmethod
    def flat(self) -> AbstractContextManager[None]:
        """Return a context in which calls are of one path each, and the model computes them as if it knew no trees.

        Attention, masks and recurrent layers are its own; each rank of a team computes all of a call.
        """

    def with_idle(
        self, calls: Sequence[Callable[[], Tensor]], idle: Callable[[], Tensor], *, num_calls: int
    ) -> list[Callable[[], Tensor]]:
        """Return calls and idle ones, `num_calls` or some more, since collectives need as many of all ranks."""
        num_calls += -num_calls % self.call_multiple
        return [*calls, *[idle] * (num_calls - len(calls))]

    def gradients_aside(self) -> AbstractContextManager[None]:
        """Return a context in which there are no gradients at first, and behind which those of before are back."""
        return gradients_aside(list(self.model.parameters()))

    def clear_gradients(self) -> None:
        """Let no parameter have a gradient."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def gradient_of(self, parameter: torch.nn.Parameter) -> Tensor | None:
        """Return a parameter's gradient, once a step has ended; None is 0."""
        return parameter.grad

    def layer_name(self, name: str) -> str:
        """Return what transformers calls a layer that has a name in `model`."""
        return name

    @property
    def makes_scores(self) -> bool:
        """Whether the call that runs now makes scores; one of a pipeline's other stages hands on hidden states."""
        return self.has_outputs

    @property
    def auxiliary_loss(self) -> str | None:
        """The setting by which the model adds gradients to the loss's, or moves biases, to balance its experts."""
        return None

    @property
    def replica(self) -> dist.ProcessGroup | None:
        """The ranks that have the same rows, and so must cut them in the same way; None for a rank alone."""
        return self.team

    @property
    def route_group(self) -> dist.ProcessGroup | None:
        """The ranks of a replica among which the routers of a call are, or its tokens; None for a rank alone."""
        return self.team

    @property
    def model(self) -> torch.nn.Module:
        """The model, or this rank's part of it."""
        return self.module

    @property
    def team_size(self) -> int:
        """Ranks of a team; 1 where each computes its own calls."""
        return 1 if self.team is None else dist.get_world_size(self.team)

    @property
    def reads_images(self) -> bool:
        """Whether its model reads images."""
        return reads_images(self.model_config.hf_config)

    def score_pack(self, layout: TreeLayout, *, temperature: float = 1.0, calculate_entropy: bool) -> Tensor:
        """Run the model on a pack that belongs to no rows and score all of it, (C, K); `layout` is on the host."""
        if self.replay is not None:
            self.replay.begin()
        tokens = np.arange(layout.num_tokens)
        scorer_T = tokens if self.head.scores_own_tokens else layout.parent_T.numpy()
        call = RelayCall.of_pack(layout.subtree_end_T.numpy(), scorer_T=scorer_T)
        return self.scores(
            call,
            layout.to(device_of_rank()),
            plan=AttentionPlan.from_subtree_end(
                call.subtree_end,
                backend=self.tree_config.backend,
                device=device_of_rank(),
                shard=SequenceShard(layout.num_tokens, self.team),
            ),
            images=PackImages.of_text(layout) if self.reads_images else None,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
        )

    def relay(
        self,
        rows: MicroBatchRows,
        *,
        mode: Mode,
        calculate_entropy: bool,
        reading: LogitReading | None = None,
        around: Callable[[Compute], Compute] | None = None,
    ) -> RelayRun:
        """Plan the model calls of a micro-batch; `around` puts something around each of them."""
        micro, temperature = rows.micro, rows.temperature()

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return self.scores(
                call,
                rows.layout,
                plan=plan,
                images=micro.images,
                temperature=temperature,
                calculate_entropy=calculate_entropy,
                reading=reading,
            )

        runs_twice = micro.is_relayed and mode != "forward"
        of_model = watched(compute, self.model) if runs_twice else compute
        # A loss that couples rows reads all of them at once.
        max_loss_terms = None if mode == "joint" else self.tree_config.max_loss_terms
        return RelayRun(
            micro.calls(scores_own_tokens=self.head.scores_own_tokens, max_loss_terms=max_loss_terms),
            of_model if around is None else around(of_model),
            mode=mode,
            device=device_of_rank(),
            backend=self.tree_config.backend,
            store_on_host=self.tree_config.relay_store == "host",
            team=self.team,
            makes_scores=lambda: self.makes_scores,
        )

    def probe(self, layout: TreeLayout, *, forward_only: bool, is_last: bool) -> None:
        """Run the model, and a backward, on a pack of which everything is scored; see `choose_capacity`."""

        def score() -> Tensor:
            # Any temperature but 1 takes one more copy of a chunk's logits.
            return self.score_pack(layout, temperature=2.0, calculate_entropy=True)

        first, last = ([score], []) if forward_only else ([], [lambda: score().sum()])
        self.run(first, last, is_last=is_last)
