"""Rows under one of verl's losses, flat and relayed: the loss and all gradients of both.

Flat is transformers' own attention on one sequence after another, and one call of the loss on all rows. The relayed
side makes the model calls that a tree engine makes, from the same parts.

Legend: T tree tokens, C kinds of scores.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tiny_models import VOCAB_SIZE
from torch import Tensor
from transformers import PreTrainedModel
from tree_cases import flat_scores, run_all
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.attention.hf import ATTENTION_NAME
from verl_tree.cost.model import CostModel
from verl_tree.engine.losses.row_losses import is_sum_over_rows
from verl_tree.engine.losses.session_weights import session_weighted_loss
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import MicroBatchRows
from verl_tree.engine.rows.packs import TreeMicroBatch, lay_out_relayed
from verl_tree.engine.rows.read_rows import ReadRows
from verl_tree.functional.relayed import call_scores, call_values
from verl_tree.relay.calls import RelayCall
from verl_tree.relay.run import Mode, RelayRun
from verl_tree.testing.local_worker import batch_of_rows
from verl_tree.testing.synthetic import random_forest
from verl_tree.tree.layout import TreeLayout
from verl_tree.tree.nodes import IntArray
from verl_tree.tree.plan import AttentionPlan
from verl_tree.tree.rows import trained_tokens

CPU = torch.device("cpu")
NUM_FORESTS = 24
POLICY_LOSSES = [
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gspo",
    "sapo",
    "gpg",
    "cispo",
    "dro",
    "clip_cov",
    "kl_cov",
    "geo_mean",
]
AGGREGATIONS: list[tuple[str, dict[str, Any]]] = [
    ("token-mean", {}),
    ("token-sum", {}),
    ("seq-mean-token-sum", {}),
    ("seq-mean-token-mean", {}),
    ("seq-mean-token-sum-norm", {"loss_scale_factor": 16}),
    ("seq-mean-token-sum-norm", {}),
]


@dataclass(frozen=True)
class LossCase:
    """A loss of verl: a name in `actor.policy_loss.loss_mode`, "value" or "sft"."""

    name: str = "vanilla"
    mode: str = "token-mean"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the kinds of scores that it reads."""
        return {"value": ("values",), "sft": ("log_probs",)}.get(self.name, ("log_probs", "entropy"))

    @property
    def shift(self) -> int:
        """How far verl moves a score along its row."""
        return 0 if self.name == "value" else -1

    def function(self) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
        """Make the loss function as verl's workers do."""
        settings: dict[str, Any] = {"strategy": "fsdp2", "ppo_micro_batch_size_per_gpu": 1, "rollout_n": 1}
        settings |= {"loss_agg_mode": self.mode, **self.options}
        if self.name == "sft":
            return partial(sft_loss, config=None)
        if self.name == "value":
            return partial(value_loss, config=FSDPCriticConfig(**settings))
        if self.name.startswith("dppo"):  # these bound differences of probabilities, which are small here
            settings |= {"clip_ratio_low": 0.002, "clip_ratio_high": 0.002}
        # The bounds let clip_cov and kl_cov choose some tokens of a few dozen.
        policy_loss = PolicyLossConfig(
            loss_mode=self.name, clip_cov_ratio=0.3, clip_cov_lb=0.01, kl_cov_ratio=0.3, dro_beta=0.5
        )
        return partial(ppo_loss, config=FSDPActorConfig(policy_loss=policy_loss, **settings))


@cache
def forest(seed: int) -> list[IntArray]:
    """Draw one of the forests on which the losses are tried."""
    return random_forest(
        100 + seed,
        num_leaves=9,
        mean_len=1 + seed % 4,
        root_probability=0.15,
        prefix_probability=0.15,
        vocab_size=VOCAB_SIZE,
    )


class WeightedLoss(LossCase):
    """A loss as our workers hold it where sessions are weighed."""

    def function(self) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
        """Make the loss function around that of verl."""
        return partial(session_weighted_loss, super().function())


@dataclass(frozen=True, eq=False)
class Result:
    """The loss of all rows, and the gradient of every parameter that has one."""

    loss: float
    gradients: dict[str, Tensor]
    metrics: list[dict[str, Any]]


def worst_error(got: Result, want: Result) -> float:
    """Return the greatest difference of loss and gradients, relative to each.

    A gradient of less than a thousandth of the whole is measured by that: where a query sees one key, it is zero but
    for rounding.
    """
    assert got.gradients.keys() == want.gradients.keys()
    least = 1e-3 * torch.stack([gradient.norm() for gradient in want.gradients.values()]).norm()
    errors = [
        ((got.gradients[name] - gradient).norm() / torch.maximum(gradient.norm(), least)).item()
        for name, gradient in want.gradients.items()
    ]
    return max(*errors, abs(got.loss - want.loss) / abs(want.loss))


def flat_rows(model: PreTrainedModel, sequences: Sequence[Any], *, is_critic: bool = False) -> list[tuple[Tensor, ...]]:
    """Compute the scores of each sequence by itself: the value of each token, or log-prob and entropy of the next."""
    if is_critic:
        return [(model(input_ids=torch.tensor([[*row]]), use_cache=False).logits[0, :, 0],) for row in sequences]
    zero = torch.zeros(1, dtype=torch.float64)
    return [tuple(torch.cat((score, zero)) for score in flat_scores(model, row)) for row in sequences]


def verl_rows(sequences: Sequence[Any], scores: list[tuple[Tensor, ...]], case: LossCase, *, seed: int) -> TensorDict:
    """Make verl's mini-batch of the sequences: signed advantages, ratios around 1, and every third token untrained."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for sequence, row_scores in zip(sequences, scores, strict=True):
        prompt_len = 1 + int(torch.randint(0, 1 + len(sequence) // 3, (), generator=generator))
        prompts, responses = torch.tensor([*sequence]).long().tensor_split([prompt_len])

        def near(x: Tensor, width: float, num: int = len(responses)) -> Tensor:
            return x + width * torch.randn(num, generator=generator, dtype=torch.float64)

        made = row_scores[0].detach()[prompt_len - 1 : len(sequence) - 1]
        mask = (torch.rand(len(responses), generator=generator) < 0.67).long()
        mask[-1:] = 1
        rows.append(
            {
                "prompts": prompts,
                "responses": responses,
                "response_mask": mask,
                # Ratios of single tokens and of whole sequences leave the clip range.
                "old_log_probs": near(made, 0.4) + near(torch.zeros(()), 0.4, 1),
                "ref_log_prob": near(made, 0.5),
                "advantages": near(torch.zeros(()), 2.0),
                "rollout_is_weights": near(torch.zeros(()), 0.2).exp(),
                "values": near(made, 0.5),
                "returns": near(made, 1.0),
            }
        )
    # As of two ranks with more rows and tokens than are here.
    data = batch_of_rows(
        rows, max_token_len=1, global_batch_size=2 * len(rows), batch_num_tokens=50 * len(rows), dp_size=2
    )
    if case.name == "sft":
        whole = [torch.cat((torch.zeros(len(row["prompts"])).long(), row["response_mask"])) for row in rows]
        data["loss_mask"] = torch.nested.as_nested_tensor(whole, layout=torch.jagged)
        data.pop("response_mask")
    return data


def lay_out(data: TensorDict, *, capacity: int, mode: Mode, shared_tokens: str = "sum") -> TreeMicroBatch:
    """Lay out all rows that a loss reads as one forest in sections."""
    (tokens, offsets), (mask, mask_offsets) = (
        [each.numpy() for each in jagged(data[name])]
        for name in ("input_ids", "response_mask" if "response_mask" in data else "loss_mask")
    )
    trained = trained_tokens(mask, mask_lens=np.diff(mask_offsets), row_lens=np.diff(offsets))
    read = ReadRows.from_batch(tokens, offsets=offsets, trained=trained).weigh(shared_tokens)
    return lay_out_relayed(read, read.forest.order, capacity=capacity, cost_model=CostModel.prior(), mode=mode)


def flat_result(
    model: PreTrainedModel, data: TensorDict, scores: list[tuple[Tensor, ...]], case: LossCase, *, rows: IntArray
) -> Result:
    """Compute the loss once on all rows that it reads, in the order in which the tree has them."""
    chosen = tu.index_select_tensor_dict(data, torch.from_numpy(rows))
    outputs = {
        kind: torch.nested.nested_tensor_from_jagged(
            torch.cat([scores[row][number] for row in rows.tolist()]), jagged(chosen["input_ids"])[1]
        )
        for number, kind in enumerate(case.kinds)
    }
    torch.manual_seed(0)  # clip_cov draws
    loss, metrics = case.function()(model_output=outputs, data=chosen, dp_group=None)
    model.zero_grad()
    loss.backward(retain_graph=True)
    return Result(loss.item(), _gradients(model), [metrics])


def relayed_result(
    model: PreTrainedModel,
    data: TensorDict,
    case: LossCase,
    *,
    capacity: int,
    on_host: bool = False,
    max_loss_terms: int | None = None,
    shared_tokens: str = "sum",
    team: dist.ProcessGroup | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Result:
    """Make the model calls of a tree engine, in the mode that it chooses for the loss; all ranks of a team together."""
    function = case.function()
    mode: Mode = "rows" if is_sum_over_rows(function) else "joint"
    micro = lay_out(data, capacity=capacity, mode=mode, shared_tokens=shared_tokens)
    mine = MicroBatchRows(micro, data, names=case.kinds, shift=case.shift)
    losses, all_metrics = [], []

    def loss(scores_CT: Tensor, leaves: IntArray) -> Tensor:
        rows, outputs = mine.select(scores_CT, leaves)
        value, metrics = function(model_output=outputs, data=rows, dp_group=None)
        losses.append(value.item())
        all_metrics.append(metrics)
        return value

    run = relay_run(
        model,
        micro,
        kinds=case.kinds,
        mode=mode,
        on_host=on_host,
        max_loss_terms=None if mode == "joint" else max_loss_terms,
        team=team,
        backend=backend,
    )
    torch.manual_seed(seed)  # clip_cov draws
    model.zero_grad()
    run_all(run, loss)
    return Result(sum(losses), _gradients(model), all_metrics)


def relay_run(
    model: PreTrainedModel,
    micro: TreeMicroBatch,
    *,
    kinds: Sequence[str],
    mode: Mode,
    on_host: bool = False,
    max_loss_terms: int | None = None,
    layout: TreeLayout | None = None,
    team: dist.ProcessGroup | None = None,
    backend: str = "auto",
) -> RelayRun:
    """Plan a pass of a model over a micro-batch; `layout` replaces the tokens of the forest."""
    layout = micro.layout if layout is None else layout

    def compute(call: RelayCall, plan: AttentionPlan) -> Tensor:
        if kinds == ("values",):
            return call_values(model, call, layout, plan=plan)
        return call_scores(model, call, layout, plan=plan, calculate_entropy="entropy" in kinds)

    calls = micro.calls(scores_own_tokens=kinds == ("values",), max_loss_terms=max_loss_terms)
    model.set_attn_implementation(ATTENTION_NAME)
    return RelayRun(calls, compute, mode=mode, device=CPU, store_on_host=on_host, team=team, backend=backend)


def assert_a_token_changes_its_subtree_only(
    model: PreTrainedModel, micro: TreeMicroBatch, *, mode: Mode, tokens: Iterable[int]
) -> None:
    """Put another token in the place of each: no score outside its subtree changes a bit, and all inside change.

    The layout and the cut stay. Gradients flow with a loss that reads everything.
    """
    layout = micro.layout
    micro = replace(micro, wanted_T=torch.ones(layout.num_tokens, dtype=torch.bool))

    def scores(changed: TreeLayout) -> Tensor:
        run = relay_run(model, micro, kinds=("log_probs", "entropy"), mode=mode, layout=changed)
        return run_all(run, lambda scores_CT, _leaves: scores_CT.square().sum())

    before_CT, every_T = scores(layout), torch.arange(layout.num_tokens)
    for token in tokens:
        ids_T = layout.token_ids_T.clone()
        ids_T[token] = (ids_T[token] + 1) % VOCAB_SIZE
        after_CT = scores(replace(layout, token_ids_T=ids_T))
        is_below_T = (every_T >= token) & (every_T < layout.subtree_end_T[token])
        assert torch.equal(before_CT[:, ~is_below_T], after_CT[:, ~is_below_T])
        assert (before_CT[0] != after_CT[0])[is_below_T & (layout.parent_T >= 0)].all()


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
