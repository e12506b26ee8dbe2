"""The rows of an engine's draw: those of `tests/support`, other ones for each seed, and what a draw changes of them."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from engine_batches import make_batch, of_teams, sessions_of
from engine_cases import Case
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_tree.engine.losses.session_weights import weigh_sessions

from .drawing import Settings
from .engine_features import IMAGES

ALL_TOKENS = 4096
"""A capacity, and a length of micro-batches, that no draw exceeds."""


def draw_batch(settings: Settings, *, seed: int, step: int, sp: int) -> TensorDict:
    """Make the batch that verl's worker gets on this rank; the worker's ranks are teams of `sp`.

    The ranks of the draw's teams have the same rows. Where the worker has no teams, they count on each rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    case = Case(
        "drawn",
        family=settings["model"].removesuffix(" tied"),
        actor={"entropy_coeff": settings["entropy"]},
        rows=settings["rows"],
        capacity=ALL_TOKENS,
        temperature_per_row=settings["temperature"] == "per row",
        corrected=settings["corrected"],
        sp=settings["ulysses"],
    )
    if settings["model"] in IMAGES:
        # Of its ranks the first has images in most rows, all others in two: verl's own Qwen2.5-VL fails without any.
        as_rank = rank if seed % 2 else 2 + 2 * (10 * seed + step) + rank
        batch = make_batch(case, step=step, rank=as_rank * case.sp, world_size=world_size)
        tu.assign_non_tensor(batch, calculate_entropy=settings["entropy"] != 0.0)
        batch["ref_log_prob"] = batch["old_log_probs"] * 0.9
    else:
        batch = make_batch(case, step=10 * seed + step, rank=rank, world_size=world_size)
    if settings["temperature"] != "per row":
        tu.assign_non_tensor(batch, temperature=settings["temperature"])
    batch = of_teams(batch, sp=sp)
    if settings["session_weight"] == "session" and not settings["planned"]:
        # The rows of a team count once where its ranks compute together.
        weigh_sessions(batch, sessions_of(batch), group=None if sp == 1 else _alone())
    return _for_sft(batch) if settings["loss"] == "sft" else batch


def _for_sft(batch: TensorDict) -> TensorDict:
    """Return the batch as verl's SFT trainer makes it: masks of whole rows, and nothing of a rollout."""
    rows = zip(batch["input_ids"].unbind(0), batch["loss_mask"].unbind(0), strict=True)
    masks = [torch.cat([torch.zeros(len(row) - len(mask), dtype=torch.int64), mask]) for row, mask in rows]
    batch = batch.exclude("response_mask", "old_log_probs", "ref_log_prob", "advantages", "values", "returns")
    batch["loss_mask"] = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    return batch


@cache
def _alone() -> Any:
    """Return a group of this rank; all ranks make theirs together."""
    return dist.new_subgroups(group_size=1)[0]
