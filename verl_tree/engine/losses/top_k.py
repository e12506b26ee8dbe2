"""Top-k distillation on trees: what a teacher, and a student, read of the logits of their tree tokens.

verl 0.9.1 computes the student's loss where its logits are (`compute_forward_kl_topk`): from the k most probable ids of
the teacher at a position, and their log-probs. Both depend on the path only. So here verl's function gets the chunks of
logits that an output head makes of tree tokens, and what it returns is expanded to rows as log-probs are. The logits of
all positions never exist at once.

A tree token has one teacher's distribution, that of the first row which trains a token behind it. The rows of a teacher
on the training ranks agree. Those of a server, which computes each row by itself, differ as much as its kernels do.

Legend: Q tokens of a model call, P projected positions, V vocabulary, K ids of the teacher per position, F_all flat
tokens of the mini-batch, T tree tokens of a micro-batch, C kinds of scores.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.utils import tensordict_utils as tu
from verl.workers.config import DistillationConfig

from verl_tree.engine.losses.row_losses import distillation_of
from verl_tree.engine.rows.columns import jagged
from verl_tree.engine.rows.micro_batch import LossFunction
from verl_tree.engine.rows.packs import TreeMicroBatch
from verl_tree.functional.scorer import LogitReading
from verl_tree.tree.rows import trained_tokens
from verl_tree.tree.transfer import to_device

LOG_PROBS, IDS = "teacher_logprobs", "teacher_ids"
"""verl's columns of what a teacher says about a row: jagged (B, j, K), at each token about the next one."""

READING = "logit_reading"
"""The key of a mini-batch by which a worker asks its engine for a `BatchReading`."""


class BatchReading(LogitReading, Protocol):
    """A reading for the rows of a mini-batch; `names` are verl's of its C kinds."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names."""
        ...

    def of_micro_batch(self, micro: TreeMicroBatch) -> Self:
        """Return the reading of a micro-batch."""
        ...


@dataclass(frozen=True, slots=True)
class TeacherTopK(BatchReading):
    """The teacher: its k most probable ids of the first `num_ids`, which the student knows, and their log-probs."""

    k: int
    num_ids: int

    def __post_init__(self) -> None:
        assert self.num_ids <= 2**24, "ids are handed on as scores, in float32"
        if self.k > self.num_ids:
            raise ValueError(f"distillation.distillation_loss.topk={self.k}: they share {self.num_ids} ids; give fewer")

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return tuple(f"{name}_{rank}" for name in (LOG_PROBS, IDS) for rank in range(self.k))

    @override
    def of_micro_batch(self, micro: TreeMicroBatch) -> Self:
        return self

    @override
    def of_call(self, token_Q: Tensor, *, device: torch.device) -> Self:
        return self

    @override
    def __call__(self, logits_PV: Tensor, position_P: Tensor) -> Tensor:
        top = logits_PV[:, : self.num_ids].topk(self.k)
        log_probs_PK = top.values - logits_PV.logsumexp(-1, keepdim=True)
        return torch.cat((log_probs_PK, top.indices.to(log_probs_PK.dtype)), dim=-1).T

    def columns(self, outputs: TensorDict) -> dict[str, Tensor]:
        """Take the kinds out of a worker's output, and return verl's two columns."""
        taken = [outputs.pop(name) for name in self.names]
        made = torch.stack([jagged(each)[0] for each in taken], dim=-1).split(self.k, dim=-1)
        offsets = jagged(taken[0])[1]
        return {
            name: torch.nested.nested_tensor_from_jagged(values.to(dtype).contiguous(), offsets)
            for name, values, dtype in zip((LOG_PROBS, IDS), made, (torch.float32, torch.int32), strict=True)
        }


@dataclass(frozen=True, slots=True, eq=False)
class StudentTopK(BatchReading):
    """The student: verl's loss of each position, and what verl's metrics say about it."""

    config: DistillationConfig
    ids_NK: Tensor  # N: the flat tokens of the mini-batch, then the tree tokens of a micro-batch, or of a model call
    log_probs_NK: Tensor
    is_read_F: Tensor  # (F_all,) bool, whether the next token of the row is trained: others may have no distribution

    KINDS: ClassVar = (
        *("distillation_losses", "student_mass", "teacher_mass"),
        *("overlap_count", "overlap_token_advantage"),
    )

    @property
    @override
    def names(self) -> tuple[str, ...]:
        return self.KINDS

    @override
    def of_micro_batch(self, micro: TreeMicroBatch) -> Self:
        last = len(self.ids_NK) - 1
        place_F = torch.where(self.is_read_F[micro.flat_index_F], micro.flat_index_F, last)
        last_T = torch.full((micro.layout.num_tokens,), last)
        first_T = last_T.scatter_reduce(0, micro.layout.tree_index_F, place_F, "amin")
        return replace(self, ids_NK=self.ids_NK[first_T], log_probs_NK=self.log_probs_NK[first_T])

    @override
    def of_call(self, token_Q: Tensor, *, device: torch.device) -> Self:
        ids_QK, log_probs_QK = to_device((self.ids_NK[token_Q], self.log_probs_NK[token_Q]), device)
        return replace(self, ids_NK=ids_QK, log_probs_NK=log_probs_QK)

    @override
    def __call__(self, logits_PV: Tensor, position_P: Tensor) -> Tensor:
        one_row = torch.arange(2, device=logits_PV.device) * len(position_P)  # made there, so the host does not wait
        as_row = partial(torch.nested.nested_tensor_from_jagged, offsets=one_row)
        outputs: Any = compute_forward_kl_topk(
            student_logits=logits_PV.unsqueeze(0),
            teacher_topk_log_probs=as_row(self.log_probs_NK[position_P].to(logits_PV.dtype)),
            teacher_topk_ids=as_row(self.ids_NK[position_P].long()),
            config=self.config,
            data_format="thd",
        )
        loss, *others = (outputs[name].squeeze(0).to(logits_PV.dtype) for name in self.KINDS)
        return torch.stack((loss, *(each.detach() for each in others)))


def reading_of(data: TensorDict, loss_function: LossFunction | None, *, num_ids: int) -> BatchReading | None:
    """Return what a mini-batch has to be read of the logits, and take the columns for it out of `data`.

    `num_ids` is the vocabulary of the model.

    Raises:
        ValueError: The loss is top-k distillation, and rows lack the teacher's columns, or have ids that the model does
            not know.
    """
    asked: Any = tu.pop(data, READING, default=None)
    config = distillation_of(loss_function)
    if asked is not None or config is None or not config.distillation_loss.loss_settings.use_topk:
        return asked
    if IDS not in data or LOG_PROBS not in data:
        raise ValueError(
            f"rows lack {IDS} or {LOG_PROBS}, which top-k distillation reads: whoever writes rows must ask the teacher "
            "about each, or set distillation.nnodes=0 for a teacher on the training ranks"
        )
    (mask, mask_offsets), (_, offsets) = jagged(data["response_mask"]), jagged(data["input_ids"])
    mask_lens, row_lens = (each.diff().cpu().numpy() for each in (mask_offsets, offsets))
    trained = trained_tokens(mask.cpu().numpy(), mask_lens=mask_lens, row_lens=row_lens)
    ids_NK, log_probs_NK = (jagged(data.pop(name))[0].cpu() for name in (IDS, LOG_PROBS))
    if int(ids_NK.max()) >= num_ids:
        raise ValueError(
            f"{IDS} has {int(ids_NK.max())}, and the student's vocabulary has {num_ids} ids: give a teacher with the "
            "student's tokenizer (distillation.teacher_models), or set distillation.nnodes=0, where others are left out"
        )
    return StudentTopK(config, ids_NK, log_probs_NK, is_read_F=torch.from_numpy(trained).roll(-1))
