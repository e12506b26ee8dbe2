"""The ways to compute the gradients of one update that por.py compares, on the same rows.

Every path scores all tokens but the first of each row, with the same log-prob code, and sums the same loss: a random
coefficient times the log-prob of every (row, token). Names of paths:

- `tree`: the whole forest in one pack.
- `heuristic/4`: packs of at most 4 longest paths, one after another, made by this method of `verl_tree.packing`.
- `relay/4`: sections of at most 4 longest paths, as training runs them: the spine runs forward once more.
- `flat/same`: the rows share nothing. They are packed to micro-batches, and run on the kernel that the tree runs on.
- `flat/varlen`: the same on the backend `varlen`, which is then one causal call: FA3, FA2 or torch's own.
- `flat/fa4`, `flat/sdpa`: the same on a kernel of `flat_attention.py`.

Laying out and planning belong to the time; finding packs and sections does not (`planning_s`).

Legend: T tree tokens of a pack, F flat tokens, S rows, C kinds of scores.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from flat_attention import KERNELS, register_kernel
from por_models import Counts, attention_kernel
from por_rows import Rows
from torch import Tensor
from transformers import PreTrainedModel

from verl_tree.attention import AttentionPlan
from verl_tree.attention.hf import ATTENTION_NAME, register
from verl_tree.functional import expand
from verl_tree.functional.logprobs import tree_forward_log_probs
from verl_tree.functional.relayed import call_scores
from verl_tree.packing import METHODS, pack
from verl_tree.relay.calls import RelayCall, RelayCalls
from verl_tree.relay.cut import MIN_SECTION_COST, cut
from verl_tree.relay.run import RelayRun
from verl_tree.tree import TokenForest
from verl_tree.tree.layout import TreeLayout

EXACT_LIMIT_S = 5.0


class NotApplicableError(ValueError):
    """The path would be another path: the forest fits the capacity, or the heuristic's packs are the optimum."""


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """One way to compute the gradients.

    Attributes:
        gradients: Adds the gradients to the parameters and returns the log-probs (F,), row after row, 0 at first
            tokens. With `is_short=True` it may compute its first model call only, to warm up.
        counts: What it computes.
        num_calls: Model calls with gradient.
        capacity: Most tokens of a call, None without a limit.
        attention: The kernel.
        planning_s: Seconds that finding packs or sections took.
    """

    name: str
    gradients: Callable[..., Tensor]
    counts: Counts
    num_calls: int
    capacity: int | None
    attention: str
    planning_s: float


class Case:
    """Rows and the coefficients of their loss, with the paths that compute it."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Rows,
        *,
        micro_batch_tokens: int,
        backend: str = "auto",
    ) -> None:
        self.model, self._backend, self._micro_batch_tokens = model, backend, micro_batch_tokens
        self.rows, self.forest = rows, rows.forest()
        num_flat_tokens = self.forest.num_flat_tokens
        generator = torch.Generator().manual_seed(0)
        self.coefficient_F = torch.randn(num_flat_tokens, generator=generator).to(model.device) / num_flat_tokens
        self.store_bytes = 0  # of the relay that ran last

    def path(self, name: str) -> Path:
        """Plan a path.

        Raises:
            NotApplicableError: It is another path under another name.
            ValueError: There is no such path, or `exact` gave up.
        """
        kind, _, option = name.partition("/")
        started_s = time.perf_counter()
        if kind == "relay":
            return self._relay(name, capacity=self._capacity(float(option)))
        forest, capacity, backend, attention = self.forest, None, self._backend, ATTENTION_NAME
        method = "auto"
        if kind == "flat":
            forest = self.rows.unshared()
            capacity = max(self._micro_batch_tokens, int(forest.sequence_lens.max()))
            if option in KERNELS:
                attention = register_kernel(option)
            elif option != "same":
                backend = option
        elif kind in METHODS:
            method, capacity = kind, self._capacity(float(option))
            if forest.num_tokens <= capacity:
                raise NotApplicableError(f"the forest of {forest.num_tokens} tokens fits into one pack of {capacity}")
        elif name != "tree":
            raise ValueError(f"no such path: {name!r}; see the docstring of por_paths.py")
        packing = pack(forest, capacity=capacity, method=method, time_limit_s=EXACT_LIMIT_S)
        if method == "exact" and packing.num_tokens == pack(forest, capacity=capacity, method="heuristic").num_tokens:
            raise NotApplicableError(f"the heuristic's packs are the optimum, {packing.num_tokens} tokens")
        packs = [each.leaves for each in packing.packs]
        planning_s = time.perf_counter() - started_s
        layouts = (TreeLayout.from_forest(forest, leaves) for leaves in packs)
        return Path(
            name=name,
            gradients=partial(self._run_packs, forest, packs, backend=backend, attention=attention),
            counts=sum(map(Counts.of_layout, layouts), Counts()),
            num_calls=len(packs),
            capacity=capacity,
            attention=f"{option}, causal" if option in KERNELS else self._kernel(backend),
            planning_s=planning_s,
        )

    def _kernel(self, backend: str) -> str:
        return attention_kernel(self.model, backend=backend)

    def _capacity(self, num_paths: float) -> int:
        return math.ceil(num_paths * int(self.forest.sequence_lens.max()))

    def _relay(self, name: str, *, capacity: int) -> Path:
        started_s = time.perf_counter()
        layout = TreeLayout.from_forest(self.forest)
        tree_lens = np.bincount(np.cumsum((layout.parent_T < 0).numpy()))
        if tree_lens.max() <= capacity:
            raise NotApplicableError(f"every tree fits into {capacity} tokens, so nothing is relayed")
        subtree_end_T = layout.subtree_end_T.numpy()
        sections = cut(
            subtree_end_T, layout.position_T.numpy(), capacity=capacity, section_cost=MIN_SECTION_COST * capacity
        )
        planning_s = time.perf_counter() - started_s

        def gradients(**_unread: bool) -> Tensor:
            host = TreeLayout.from_forest(self.forest)
            parent_T = host.parent_T.numpy()
            calls = RelayCalls.of_cut(
                sections,
                spine_cut=sections.spine_cut(capacity),
                scorer_T=parent_T,
                wanted_T=np.ones_like(parent_T, dtype=bool),
                tree_index_F=host.tree_index_F.numpy(),
                leaf_offsets=host.leaf_offsets,
            )
            return self._run_relay(calls, host)

        return Path(
            name=name,
            gradients=gradients,
            counts=Counts.of_layout(layout),
            num_calls=sections.num_sections,
            capacity=capacity,
            attention=self._kernel(self._backend),
            planning_s=planning_s,
        )

    def _run_packs(
        self, forest: TokenForest, packs: list[np.ndarray], *, backend: str, attention: str, is_short: bool = False
    ) -> Tensor:
        """Run packs forward and backward, one after another."""
        register()
        self.model.set_attn_implementation(attention)
        log_prob_F = torch.zeros_like(self.coefficient_F)
        for leaves in packs[:1] if is_short else packs:
            host = TreeLayout.from_forest(forest, leaves)
            layout = host.to(self.model.device)
            plan = AttentionPlan.from_subtree_end(host.subtree_end_T, device=self.model.device, backend=backend)
            scores = tree_forward_log_probs(self.model, layout, plan=plan)
            place_F = self._places(leaves)
            row_F = expand(scores.log_probs_T, layout)
            (self.coefficient_F[place_F] * row_F).sum().backward()
            log_prob_F[place_F] = row_F.detach().to(log_prob_F.dtype)
        return log_prob_F

    def _run_relay(self, calls: RelayCalls, host: TreeLayout) -> Tensor:
        """Run the spine forward and all sections forward and backward."""
        register()
        self.model.set_attn_implementation(ATTENTION_NAME)
        layout = host.to(self.model.device)
        coefficient_F = self.coefficient_F[self._places(host.leaves)]

        def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
            return call_scores(self.model, call, layout, plan=plan)

        def loss(scores_CT: Tensor, leaves: np.ndarray) -> Tensor:
            pairs = torch.from_numpy(_ranges(host.leaf_offsets, leaves)).to(self.model.device)
            return (coefficient_F[pairs] * expand(scores_CT[0], layout, pairs=pairs)).sum()

        run = RelayRun(calls, compute, mode="rows", device=self.model.device, backend=self._backend)
        for number in range(run.num_first):
            run.first(number)
        for number in range(run.num_last):
            run.last(number, loss).backward()
        self.store_bytes = run.store.num_bytes
        log_prob_F = torch.zeros_like(self.coefficient_F)
        log_prob_F[self._places(host.leaves)] = expand(run.scores_CT[0], layout).to(log_prob_F.dtype)
        return log_prob_F

    def _places(self, leaves: np.ndarray) -> Tensor:
        """Return where the tokens of some rows lie among all flat tokens."""
        return torch.from_numpy(_ranges(self.forest.sequence_offsets, leaves)).to(self.model.device)

    def reference(self) -> tuple[Tensor, list[Tensor]]:
        """Return log-probs (F,) and gradients of one row after another, with transformers' own attention and logits."""
        self.model.set_attn_implementation("sdpa")
        self.model.zero_grad(set_to_none=True)
        log_probs = []
        for sequence, coefficient in zip(
            self.rows.sequences,
            self.coefficient_F.split([len(sequence) for sequence in self.rows.sequences]),
            strict=True,
        ):
            token_ids = torch.from_numpy(sequence).long().to(self.model.device)
            logits = self.model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
            scores = logits.log_softmax(-1).gather(-1, token_ids[1:, None]).squeeze(-1)
            (coefficient[1:] * scores).sum().backward()
            log_probs += [scores.new_zeros(1), scores.detach()]
        return torch.cat(log_probs), self.gradients()

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the model and leave none behind."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad(set_to_none=True)
        return gradients


def _ranges(offsets: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return the places offsets[n]..offsets[n + 1] - 1 of some n, one after another."""
    return np.concatenate([np.arange(offsets[number], offsets[number + 1]) for number in numbers])


def errors(
    log_prob_F: Tensor, gradients: list[Tensor], *, reference: tuple[Tensor, list[Tensor]], names: list[str]
) -> dict[str, Any]:
    """Return how log-probs and gradients differ from the reference: of all, and of the worst token and parameter."""
    want_F, wanted = reference
    difference_F = (log_prob_F.double() - want_F.double()).abs()
    squares = [
        ((mine.double() - its.double()).square().sum().item(), its.double().square().sum().item())
        for mine, its in zip(gradients, wanted, strict=True)
    ]
    of_parameter = [math.sqrt(difference / of_all) for difference, of_all in squares]
    worst = int(np.argmax(of_parameter))
    return {
        "gradient_error": math.sqrt(sum(each for each, _ in squares) / sum(each for _, each in squares)),
        "worst_parameter_error": of_parameter[worst],
        "worst_parameter": names[worst],
        "log_prob_rms_error": difference_F.square().mean().sqrt().item(),
        "log_prob_max_error": difference_F.max().item(),
    }
