"""Rows for the comparison with verl's own engine: drawn trees of text, and of text and images, with padding."""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cases import Case, forest_rows
from image_cases import Row, branching_rows, draw_text, positions_of
from tensordict import TensorDict
from tiny_models import IMAGE, IMAGES, VOCAB_SIZE, tiny_model
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu

from verl_tree.engine.losses.session_weights import weigh_sessions
from verl_tree.engine.rows.positions import settle_positions
from verl_tree.testing.local_worker import batch_of_rows

PROMPT_LEN = 3
"""Of rows with images."""

Columns = dict[str, torch.Tensor]


def make_batch(case: Case, *, step: int, rank: int, world_size: int) -> TensorDict:
    """Make the rows that verl's workers get, the same number on all ranks, with random signed advantages and masks.

    The ranks of a team get the same rows, and each rank's rows count as rows of their own (`of_teams`).
    """
    make = _with_images if case.family in IMAGES else _of_text
    batch = make(case, step=step, rank=rank // case.sp, world_size=world_size)
    if case.temperature_per_row:
        batch["temperature"] = torch.tensor([0.7, 1.0, 1.4])[torch.arange(len(batch)) // 4 % 3]
    if case.model.get("use_remove_padding"):
        tu.assign_non_tensor(batch, use_remove_padding=True)
    return batch


def of_teams(batch: TensorDict, *, sp: int) -> TensorDict:
    """Return the batch with its rows counted once for each team."""
    batch = batch.clone()
    tu.assign_non_tensor(batch, global_batch_size=tu.get(batch, "global_batch_size") // sp)
    return batch


def sessions_of(batch: TensorDict) -> list[int]:
    """Return the session of each row: one, two or three leaves each, and some on both ranks. -1 is padding."""
    is_sampled = [bool(mask.any()) for mask in batch["loss_mask"].unbind()]
    return [row // (1 + row % 3) if is_sampled[row] else -1 for row in range(len(batch))]


def random_rows(kind: str, *, rank: int, rng: np.random.Generator) -> list[tuple[list[int], list[int]]]:
    """Draw the (prompt, response) token lists of one rank: trees of depth >= 3 unless the kind says otherwise."""
    if kind.startswith("forest"):
        return forest_rows(int(kind.split()[1]), rank=rank)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(1, VOCAB_SIZE, size=rng.integers(low, high + 1)).tolist()

    if kind == "single":
        return [(tokens(3, 6), tokens(4, 9))]
    if kind == "one_token":
        prompt = tokens(1, 1)
        return [(prompt, [token]) for token in (3, 4, 4, 5)] + [(prompt, [])]
    rows = []
    for _ in range(2):
        prompt = tokens(3, 8)
        for _ in range(3):
            first = tokens(2, 6)
            for _ in range(2):
                second = first + tokens(1, 5)
                rows += [(prompt, second + tokens(1, 7)) for _ in range(1 + rng.integers(2))]
    if kind == "duplicates":
        rows += [rows[0], rows[0], (rows[1][0], rows[1][1][:3]), (rows[2][0], rows[2][1][:1])]
    if kind == "idle_rank" and rank == 1:
        rows = []
    return rows


def _of_text(case: Case, *, step: int, rank: int, world_size: int) -> TensorDict:
    rows = random_rows(case.rows, rank=rank, rng=np.random.default_rng(17 + rank + 1000 * step))
    counts = _gathered(len(rows), world_size)
    generator = torch.Generator().manual_seed(99 + rank + 1000 * step)

    def row(prompt: list[int], response: list[int], *, is_padding: bool = False) -> Columns:
        def random(scale: float) -> torch.Tensor:
            return torch.randn(len(response), generator=generator) * scale

        mask = (torch.rand(len(response), generator=generator) < (0.0 if is_padding else 0.75)).long()
        if response and not is_padding:
            mask[-1] = 1
        return taught_by_path(prompt + response, k=case.top_k) | {
            "prompts": torch.tensor(prompt),
            "responses": torch.tensor(response, dtype=torch.int64),
            "response_mask": mask,
            # Far enough from the model's own log-probs that clip and dual clip are active on many tokens.
            "old_log_probs": -4.1 + random(1.0),
            "ref_log_prob": -4.1 + random(0.3),
            "advantages": random(2.0),
            "values": random(0.5),
            "returns": random(1.5),
        }

    all_rows = [row(prompt, response) for prompt, response in rows]
    if case.rows.startswith("dead"):
        for index, each in enumerate(all_rows):
            each["advantages"] *= (rank == 0 or case.rows != "dead_rank") and index // 4 % 2
    all_rows += [row([1], [1], is_padding=True) for _ in range(max(counts) + 1 - len(rows))]
    sampled = [each["response_mask"] for each in all_rows]
    if case.corrected:
        for index, each in enumerate(all_rows):
            mask = each["response_mask"]
            each["rollout_is_weights"] = (0.5 * torch.randn(len(mask), generator=generator)).exp().clamp(max=2.0)
            is_kept = torch.rand(len(mask), generator=generator) < 0.8
            each["response_mask"] = mask * is_kept * (index % 3 != 2)
    batch = _batch_of(case, all_rows, num_rows=sum(counts))
    # verl counts its denominators from the tokens as they were sampled.
    batch["loss_mask"] = torch.nested.as_nested_tensor(sampled, layout=torch.jagged)
    if case.tree.get("session_weight") == "session" and not case.planned:
        weigh_sessions(batch, sessions_of(batch), group=None)
    return batch


def taught_by_path(tokens: list[int], *, k: int) -> Columns:
    """Draw what a teacher says behind each token, which goes by the path up to it; nothing if k is 0."""
    if not k:
        return {}
    paths = [tokens[: end + 1] for end in range(len(tokens))]
    drawn = np.stack([np.random.default_rng([5, *path]).standard_normal(VOCAB_SIZE) for path in paths])
    log_probs, ids = torch.from_numpy(drawn).float().log_softmax(-1).topk(k)
    return {"teacher_logprobs": log_probs, "teacher_ids": ids}


def _with_images(case: Case, *, step: int, rank: int, world_size: int) -> TensorDict:
    """Make other trees on every rank, with two rows of padding; image tokens are not trained."""
    del step
    rows = _rows_with_images(rank)
    counts = _gathered(len(rows), world_size)
    generator = torch.Generator().manual_seed(399 + rank)

    def columns(row: Row, *, is_padding: bool) -> Columns:
        ids = torch.tensor(row.ids)
        response = ids[PROMPT_LEN:]
        mask = (torch.rand(len(response), generator=generator) < 0.8) & (response < IMAGE)
        mask[-1] = True
        return {
            "prompts": ids[:PROMPT_LEN],
            "responses": response,
            "response_mask": mask.long() * (not is_padding),
            "old_log_probs": -4.1 + torch.randn(len(response), generator=generator),
            "advantages": 2.0 * torch.randn(len(response), generator=generator),
        }

    all_rows = rows + [Row((1, 1, 1, 1))] * (max(counts) + 2 - len(rows))
    made = [columns(row, is_padding=number >= len(rows)) for number, row in enumerate(all_rows)]
    batch = _batch_of(case, made, num_rows=sum(counts))
    positions = [positions_of(_model(case.family), row) for row in all_rows]
    batch["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
    settle_positions(batch, keep_components=True)
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [_pixels_of(row) for row in all_rows])
    return batch


def _rows_with_images(rank: int) -> list[Row]:
    """Draw the rows of a rank; on the second most are text."""
    rows = branching_rows(1 + rank)
    if rank == 0:
        return rows
    rng = np.random.default_rng(rank)
    shared = [draw_text(rng, 8, 12) for _ in range(3)]
    return rows[:2] + [prompt + draw_text(rng, 3, 9) for prompt in shared for _ in range(4)]


def _pixels_of(row: Row) -> Columns:
    """Return the `multi_modal_inputs` of a row."""
    if not row.images:
        return {}
    return {
        "pixel_values": torch.cat([image.pixels_AX for image in row.images]),
        "image_grid_thw": torch.tensor([image.grid for image in row.images]),
    }


@cache
def _model(family: str) -> PreTrainedModel:
    return tiny_model(family, size="engine")


def _gathered(value: int, world_size: int) -> list[Any]:
    values: list[Any] = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def _batch_of(case: Case, rows: list[Columns], *, num_rows: int) -> TensorDict:
    return batch_of_rows(
        rows,
        max_token_len=case.capacity,
        global_batch_size=num_rows,
        calculate_entropy=case.actor.get("entropy_coeff", 0.0) != 0.0,
        distillation_use_topk=case.top_k > 0,
    )
