"""The tree engine beside verl's own FSDP2 engine on rows with images; one process per rank.

`tests/e2e/test_image_engines.py` starts it. As in `engine_cases`, both sides are real workers in fp32 on the CPU that
take the same SGD step, and rank 0 writes the differences of every case. verl's engine gets all rows of a rank in one
micro-batch: its forward of Qwen2.5-VL fails on a micro-batch without images.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engine_cases import Case, compare, infer, make_loss, make_worker, take_steps
from image_cases import FAMILIES, IMAGE, Row, branching_rows, draw_text, positions_of, vision_model
from tensordict import TensorDict
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.engine.rows.positions import settle_positions
from verl_tree.testing.local_worker import batch_of_rows, local_worker

PROMPT_LEN = 3
ALL_ROWS = 4096

_COMMON = {"entropy_coeff": 0.05}
CASES = [
    Case("one_pack", actor=_COMMON, capacity=ALL_ROWS),
    Case("packs", actor=_COMMON, capacity=45, tree={"relay": "never"}),
    Case("flat_packs", actor=_COMMON, tree={"gate": "always"}, capacity=60),
    Case("gradient_checkpointing", actor=_COMMON, capacity=60, model={"enable_gradient_checkpointing": True}),
    Case("lora", actor=_COMMON, capacity=60, model={"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    # Sections cut through images.
    Case("relay", actor=_COMMON, capacity=7),
    Case("joint", actor=_COMMON, capacity=7, is_known_loss=False),
    Case("gspo", actor={"policy_loss": {"loss_mode": "gspo"}, "loss_agg_mode": "seq-mean-token-mean"}, capacity=60),
    Case("temperature_per_row", actor=_COMMON, capacity=60, temperature_per_row=True),
]

FROZEN = "frozen_tower"


def rows_of_rank(rank: int) -> list[Row]:
    """Return other trees on every rank; the second rank has mostly text."""
    rows = branching_rows(1 + rank)
    if rank == 0:
        return rows
    rng = np.random.default_rng(rank)
    shared = [draw_text(rng, 8, 12) for _ in range(3)]
    return rows[:2] + [prompt + draw_text(rng, 3, 9) for prompt in shared for _ in range(4)]


def make_batch(case: Case, model: PreTrainedModel, *, rank: int, world_size: int) -> TensorDict:
    """Make the rows of a rank and two of padding, with random signed advantages; image tokens are not trained."""
    rows = rows_of_rank(rank)
    counts: list[Any] = [None] * world_size
    dist.all_gather_object(counts, len(rows))
    padding = [Row((1, 1, 1, 1))] * (max(counts) + 2 - len(rows))
    generator = torch.Generator().manual_seed(99 + rank)

    def columns(row: Row, *, is_padding: bool) -> dict[str, torch.Tensor]:
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

    all_rows = rows + padding
    batch = batch_of_rows(
        [columns(row, is_padding=number >= len(rows)) for number, row in enumerate(all_rows)],
        max_token_len=case.capacity,
        global_batch_size=sum(counts),
        calculate_entropy="entropy_coeff" in case.actor,
    )
    positions = [positions_of(model, row) for row in all_rows]
    batch["position_ids"] = torch.nested.as_nested_tensor(positions, layout=torch.jagged)
    settle_positions(batch, keep_components=True)
    tu.assign_non_tensor_stack(batch, "multi_modal_inputs", [inputs_of(row) for row in all_rows])
    if case.temperature_per_row:
        batch["temperature"] = torch.tensor([0.7, 1.0, 1.4])[torch.arange(len(all_rows)) // 4 % 3]
    return batch


def inputs_of(row: Row) -> dict[str, torch.Tensor]:
    """Return the `multi_modal_inputs` of a row."""
    if not row.images:
        return {}
    return {
        "pixel_values": torch.cat([image.pixels_AX for image in row.images]),
        "image_grid_thw": torch.tensor([image.grid for image in row.images]),
    }


def run_case(case: Case, model: PreTrainedModel, *, rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """Run one case on all ranks; return the worst rank's distances."""
    sides, saved = [], 0.0
    batch = make_batch(case, model, rank=rank, world_size=world_size)
    for strategy in (FLAT_STRATEGY, TREE_STRATEGY):
        capacity = ALL_ROWS if strategy == FLAT_STRATEGY else case.capacity
        worker = make_worker(dataclasses.replace(case, capacity=capacity), strategy=strategy, folder=folder)
        mine = batch.clone()
        tu.assign_non_tensor(mine, max_token_len_per_gpu=capacity)
        sides.append(infer(worker, mine) | take_steps(worker, [mine]))
        if strategy == TREE_STRATEGY:
            saved = worker.engine.tree_counts.metrics()["tree/por"]
    result = compare(sides[0], sides[1], batch)
    result["tower_gradients"] = sum("visual" in name for name in sides[1]["gradients"])
    errors: list[Any] = [None] * world_size
    dist.all_gather_object(errors, result)
    return {name: max(each[name] for each in errors) for name in errors[0]} | {"por": saved}


def freeze_tower(model: PreTrainedModel, *, rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """Compare a step with a frozen vision tower with one that trains it, in sections that cut through images."""
    case, sides = Case(FROZEN, capacity=20), []
    for freezes in (False, True):
        worker = local_worker(
            str(folder), strategy=TREE_STRATEGY, max_token_len=case.capacity, freeze_vision_tower=freezes
        )
        worker.set_loss_fn(make_loss(case))
        sides.append(take_steps(worker, [make_batch(case, model, rank=rank, world_size=world_size)]))
    trained, frozen = (side["gradients"] for side in sides)
    moved = {name for name, before in sides[1]["before"].items() if not torch.equal(before, sides[1]["after"][name])}
    return {
        "tower_gradients": sum("visual" in name for name in trained),
        "frozen_tower_gradients": sum("visual" in name for name in frozen),
        "tower_moved": sum("visual" in name for name in moved),
        "text_stayed": len(frozen.keys() - moved),
        "text_gradient": max(float((frozen[name] - trained[name]).norm() / trained[name].norm()) for name in frozen),
    }


def main() -> None:
    """Run the cases named on the command line, or all, of every family."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    results = {}
    for family in FAMILIES:
        model, folder = vision_model(family), Path(shared[0]) / family
        if rank == 0:
            model.save_pretrained(folder)
        dist.barrier()
        for case in CASES:
            if case.name in (arguments.cases or [each.name for each in CASES]):
                name = f"{family}-{case.name}"
                results[name] = run_case(case, model, rank=rank, world_size=world_size, folder=folder)
                if rank == 0:
                    print(name, {key: f"{value:.3g}" for key, value in results[name].items()}, flush=True)
        if FROZEN in (arguments.cases or [FROZEN]):
            results[f"{family}-{FROZEN}"] = freeze_tower(model, rank=rank, world_size=world_size, folder=folder)
    if rank == 0:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
