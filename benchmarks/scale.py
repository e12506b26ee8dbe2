"""What a step costs the driver, from 8 ranks and 1 M flat tokens to 4,096 ranks and 4 G: seconds and bytes. JSON.

The planning code is the trainer's own; ranks, models and rollouts are not there. Groups are drawn trees (searches,
parallel tool calls, stars) of short nodes, from which the shapes of their rows are made as the agent loop workers make
them. Each group's lengths are then multiplied by one number, as if each token were that many, so 4 G tokens need no
memory: a shape has the same bytes. The factors of a step's groups lie up to two times above or below their mean.

    tags      the rows' tags become shapes and groups, and TransferQueue copies the batch with its tags
    profiles  shapes become the work of every range of every group
    deal      groups are dealt to mini-batches and ranks, and cut
    nodes     the session trees of an estimator on nodes
    portions  rows are cut into portions, one for each rank, and pickled; verl's metrics of all portions are joined

Bytes of TransferQueue are those of the tensors and pickled values of one row, written as verl's agent loop worker does.
What verl's own trainer reads is added up from the fields that its methods ask for (`VERL_READS`).

    python benchmarks/scale.py --out docs/benchmarks/data/scale.json

With `--trees` it plans a step that a run has stored instead, and prints a page about it (`scale_page`, docs/scale.md).

    python benchmarks/scale.py --trees runs/trees/step_000010.parquet --ranks 1024
"""

import argparse
import pickle
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from harness import Times, environment, new_parser, print_table, write_json
from omegaconf import OmegaConf
from scale_page import Question, StoredStep, add_page_options, computed_rows, model_calls, page_lines, update_times
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from rollout_hooks.capture.leaf_shapes import LEAF_SHAPE_TAG, WrittenRow, leaf_shapes
from rollout_hooks.capture.outputs import make_row
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.wire_columns import PromptColumns
from verl_tree.cost.model import CostModel, WorkProfile
from verl_tree.testing.synthetic import star, tool_fan_out, tree_search
from verl_tree.trainer.advantages import SessionTrees
from verl_tree.trainer.portions.portion import Counts, Portion, PortionResult, join_untrained
from verl_tree.trainer.portions.portion_metrics import MEANS, join_metrics
from verl_tree.trainer.rows.batching import RowAssignment, assign_rows
from verl_tree.trainer.rows.step_rows import StepRows

# (ranks, leaves, flat tokens, mini-batches, share of the leaves that are one group)
CASES = (
    (8, 512, 1_000_000, 4, 0.0),
    (8, 512, 16_000_000, 4, 0.0),
    (64, 4_096, 16_000_000, 4, 0.0),
    (64, 4_096, 268_000_000, 4, 0.0),
    (512, 8_192, 268_000_000, 4, 0.0),
    (512, 16_384, 1_000_000_000, 4, 0.0),
    (4_096, 100_000, 1_000_000_000, 1, 0.0),
    (4_096, 100_000, 4_000_000_000, 1, 0.0),
    (4_096, 100_000, 4_000_000_000, 4, 0.0),
    (4_096, 100_000, 4_000_000_000, 1, 0.1),
    (4_096, 100_000, 4_000_000_000, 1, 1.0),
)
SHAPES = (
    partial(tree_search, prompt_len=64, step_len=(8, 64)),
    partial(tool_fan_out, prompt_len=128, plan_len=(4, 32), call_len=(4, 16), result_len=(8, 64)),
    partial(star, 16, prompt_len=128, branch_len=(32, 256)),
)
NUM_DRAWN = 48
"""Trees that are drawn; a step repeats them with other factors."""

TAGS = {"status": "success", "global_steps": 1, "min_global_steps": 1, "max_global_steps": 1}

VERL_READS = {
    "_compute_old_log_prob": (8, 28),  # entropy, log_probs | and response_mask, responses, rollout_log_probs
    "_compute_advantage": (0, 20),  # response_mask, rm_scores, rollout_log_probs, old_log_probs
    "_compute_metrics": (8, 28),  # prompts | responses, response_mask, advantages, returns, rm_scores
}
"""Bytes per token of prompt and of response that methods of `PPOTrainer` (verl 0.9.1) bring to the driver; none of the
optional fields (reference, critic, KL in the reward)."""

CONFIG = OmegaConf.create({"actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}})
"""What joining metrics reads of a configuration."""

READ_WITHOUT_SHAPES = (8, 20)
"""The same for rows without shapes: input_ids | and response_mask, rm_scores."""


@dataclass(frozen=True, slots=True)
class Layout:
    """On what a step is planned, and what of it."""

    num_ranks: int  # data-parallel ones
    num_mini_batches: int
    width: int = 1  # ranks of the team or of the pipeline that is one of these
    leaves_out: bool = False  # rows that teach nothing
    model: CostModel = field(default_factory=CostModel.prior)


def main() -> None:
    """Measure all cases, print a table and write the JSON; or answer a question about a stored step."""
    options = _parse_options()
    try:
        question = Question.take_from(options)
        if question is not None:
            _answer(question, options)
            return
    except ValueError as error:
        sys.exit(f"scale.py: {error}")
    drawn = [draw(SHAPES[number % len(SHAPES)], seed=options.seed + number) for number in range(NUM_DRAWN)]
    records = [_measure(*case, drawn=drawn, options=options) for case in CASES]
    print_table(
        [
            {
                "ranks": record["ranks"],
                "leaves": record["leaves"],
                "flat tokens": f"{record['flat_tokens'] / 1e6:,.0f} M",
                "mini-batches": record["mini_batches"],
                "largest group": f"{record['largest_group']:,}",
                **{name: f"{seconds:.2f}" for name, seconds in record["seconds"].items()},
                "longest": f"{record['longest_leaf']:,}",
                "MB": f"{record['bytes']['shapes'] / 1e6:.2f}",
                "portions MB": f"{record['bytes']['portions'] / 1e6:.2f}",
                "imbalance": f"{record['imbalance']:.2f}",
                "at least": f"{record['least_imbalance']:.2f}",
            }
            for record in records
        ]
    )
    row = _row_bytes()
    print(row)
    write_json({"environment": environment(options), "row_bytes": row, "cases": records}, options.out)


def _parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_page_options(parser)
    return parser.parse_args()


def _answer(question: Question, options: argparse.Namespace) -> None:
    """Plan the step that is asked about, print the page and write the JSON."""
    step = StoredStep.read(question)
    costs = question.costs()
    groups = step.repeated(step.shapes)
    keys, tags = tagged_rows(groups)  # with sessions of its own, which no plan reads
    roles = [step.roles[row] for group in step.repeated(step.rows.groups) for row in group]
    layout = Layout(
        question.ranks // (question.team * question.pipeline),
        question.mini_batches,
        width=question.team * question.pipeline,
        leaves_out=not question.all_rows,
        model=costs,
    )
    record, profiles, assignment = _measure_step(
        groups,
        keys,
        [tag if role is None else {**tag, ROLE: role} for tag, role in zip(tags, roles, strict=True)],
        layout=layout,
        repetitions=options.repetitions,
    )
    is_computed = computed_rows(profiles)
    calls, costs_s = model_calls(step, assignment, is_computed=is_computed, capacity=question.capacity, costs=costs)
    row = _row_bytes()
    record |= {
        "mini_batches": len(assignment.plan.num_rows),
        "groups_per_mini_batch": -(-len(groups) // question.mini_batches),
        "computed_rows": int(is_computed.sum()),
        "computed_tokens": sum(int(profile.cumulative_counts[-1, 0]) for profile in profiles),
        "idle_cells": int((calls == 0).sum()),
        "calls": {
            "mean": float(calls[calls > 0].mean()),
            "least": int(calls[calls > 0].min()),
            "most": int(calls.max()),
        },
        "update": update_times(
            costs_s / question.team,
            calls,
            num_stages=question.pipeline,
            whole_s=sum(costs.predict(profile.range_work(0, profile.num_leaves)) for profile in profiles)
            / question.team,
        ),
    }
    record["bytes"]["transfer_queue"] = _stored_bytes(np.concatenate(groups), row)
    print(*page_lines(question, step, record), sep="\n")
    write_json(
        {"environment": environment(options), "row_bytes": row, "question": asdict(question), "step": record},
        options.out,
    )


def draw(shape: Any, *, seed: int) -> np.ndarray:
    """Return the shapes of a drawn group's rows; a quarter of each row is the prompt, the rest is trained."""
    rows = []
    for token_ids in shape(seed=seed):
        response_len = len(token_ids) - len(token_ids) // 4
        rows.append(WrittenRow.of(token_ids, response_mask=np.ones(response_len), reward=0.0))
    return leaf_shapes(rows)


def _measure(
    num_ranks: int,
    num_leaves: int,
    num_flat_tokens: int,
    num_mini_batches: int,
    share_of_one: float,
    *,
    drawn: list[np.ndarray],
    options: argparse.Namespace,
) -> dict[str, Any]:
    groups = drawn_groups(num_leaves, num_flat_tokens, drawn=drawn, rng=np.random.default_rng(options.seed))
    num_joined = round(share_of_one * len(groups))
    if num_joined:
        groups = [_joined(groups[:num_joined]), *groups[num_joined:]]
    layout = Layout(num_ranks, num_mini_batches)
    return _measure_step(groups, *tagged_rows(groups), layout=layout, repetitions=options.repetitions)[0]


def _measure_step(
    groups: list[np.ndarray], keys: list[str], tags: list[dict[str, Any]], *, layout: Layout, repetitions: int
) -> tuple[dict[str, Any], list[WorkProfile], RowAssignment]:
    """Plan a step several times; return what it costs, and the plan."""
    times = {name: Times() for name in ("tags", "profiles", "deal", "nodes", "portions")}
    repeated = [_plan(keys, tags, layout=layout, times=times) for _ in range(repetitions)]
    batch, profiles, assignment, portion_bytes = repeated[-1]
    if not np.any(assignment.predicted_s):
        raise ValueError("an update computes no row of this step; give another one, or --all-rows")
    dearest_leaf_s = _dearest_leaves(profiles, layout)
    shapes = np.concatenate(groups)
    num_tokens, num_shared = (int(shapes[name].sum(dtype=np.int64)) for name in ("num_tokens", "num_shared"))
    num_response = int(shapes["response_len"].sum(dtype=np.int64))
    record = {
        "ranks": layout.num_ranks,
        "leaves": len(keys),
        "groups": len(groups),
        "largest_group": max(map(len, groups)),
        "flat_tokens": num_tokens,
        "tree_tokens": num_tokens - num_shared,
        "longest_leaf": int(shapes["num_tokens"].max()),
        "mini_batches": layout.num_mini_batches,
        "seconds": {name: statistics.median(each.cpu_s) for name, each in times.items()},
        "bytes": {
            "shapes": shapes.nbytes,
            "batch": len(pickle.dumps(batch)),
            "portions": portion_bytes,
            "without_shapes": _num_bytes(READ_WITHOUT_SHAPES, num_tokens=num_tokens, num_response=num_response),
            "verl": {
                name: _num_bytes(each, num_tokens=num_tokens, num_response=num_response)
                for name, each in VERL_READS.items()
            },
        },
        "imbalance": _imbalance(assignment),
        "least_imbalance": _imbalance(assignment, dearest_leaf_s=dearest_leaf_s),
        "cut_groups": assignment.num_cut_groups,
        "lost_tokens": assignment.num_lost_tokens,
        "padding_rows": assignment.num_padding,
    }
    return record, profiles, assignment


def _plan(
    keys: list[str], tags: list[dict[str, Any]], *, layout: Layout, times: Mapping[str, Times]
) -> tuple[KVBatchMeta, list[WorkProfile], RowAssignment, int]:
    """Do what the driver does between a sampled batch and its dispatch, and for an estimator on nodes."""
    with times["tags"].measure():
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        rows = StepRows.fetch(batch)
        num_groups = len(rows.groups)
    with times["profiles"].measure():
        profiles = rows.profiles(live=rows.of_mixed_groups() if layout.leaves_out else None)
    with times["deal"].measure():
        assignment = assign_rows(
            rows.groups,
            profiles=profiles,
            model=layout.model,
            num_ranks=layout.num_ranks,
            groups_per_mini_batch=-(-num_groups // layout.num_mini_batches),
        )
    with times["nodes"].measure():
        told = rows.announcement(weigh_sessions=False)
        SessionTrees.from_shape(
            told.shape, rewards=rows.rewards, groups=told.groups, sessions=told.sessions, weigh_sessions=False
        )
    with times["portions"].measure():
        num_bytes = _deal_portions(batch, rows, num_ranks=layout.num_ranks * layout.width)
    return batch, profiles, assignment, num_bytes


def _deal_portions(batch: KVBatchMeta, rows: StepRows, *, num_ranks: int) -> int:
    """Do what the driver does for the advantages of a step, and return the bytes that it sends and gets."""
    units = join_untrained(rows.groups, num_trained=rows.shapes["num_trained"].tolist())
    whole = Portion(PPOTrainer._compute_advantage, batch, ray.ObjectRef.nil(), step_rows=rows)
    sent = [
        len(pickle.dumps((each.method, each.batch, each.step_rows)))
        for each in whole.cut(units, num_portions=num_ranks)
    ]
    metrics = dict.fromkeys((*MEANS, "critic/score/max", "critic/score/min"), 1.0)
    result = PortionResult(metrics, Counts(1, 1, 1, 1, 1, 1), fields=None, moments=None)
    join_metrics([result] * len(sent), config=CONFIG)
    return sum(sent) + len(pickle.dumps(result)) * len(sent)


def drawn_groups(
    num_leaves: int, num_flat_tokens: int, *, drawn: list[np.ndarray], rng: np.random.Generator
) -> list[np.ndarray]:
    """Repeat drawn groups until there are `num_leaves` rows, and multiply their lengths to about `num_flat_tokens`."""
    chosen: list[np.ndarray] = []
    while sum(map(len, chosen)) < num_leaves:
        chosen.append(drawn[len(chosen) % len(drawn)])
    mean_factor = num_flat_tokens / sum(int(group["num_tokens"].sum()) for group in chosen)
    groups = []
    for group in chosen:
        longer = group.copy()
        factor = max(1, round(mean_factor * 2 ** rng.uniform(-1, 1)))
        for name in ("num_shared", "num_tokens", "response_len", "num_trained", "num_new_trained"):
            longer[name] *= factor
        longer["reward"] = rng.integers(0, 2, size=len(group))
        groups.append(longer)
    return groups


def _joined(groups: list[np.ndarray]) -> np.ndarray:
    """Hang groups below one prompt: half of the shortest one's first leaf is what all of them share."""
    ranks = np.cumsum([0, *map(len, groups)])
    num_shared = min(int(group["num_tokens"].min()) for group in groups) // 2
    joined = np.concatenate(groups)
    joined["rank"] += np.repeat(ranks[:-1], np.diff(ranks))
    # The first leaf of each but the first, and the leaves that shared less with their neighbours.
    joined["num_shared"] = np.maximum(joined["num_shared"], num_shared)
    joined["num_shared"][joined["rank"] == 0] = 0
    return joined


def tagged_rows(groups: list[np.ndarray]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the keys and tags of the rows of all groups, four sessions each, as they come from TransferQueue."""
    keys, tags = [], []
    for number, group in enumerate(groups):
        uid = f"{number:09d}-00000000-0000-0000-0000-{number:012d}"
        for row, shape in enumerate(group):
            keys.append(f"{uid}_{4 * row // len(group)}_{row}")
            lens = {
                "prompt_len": int(shape["num_tokens"] - shape["response_len"]),
                "response_len": int(shape["response_len"]),
                "seq_len": int(shape["num_tokens"]),
            }
            tags.append({**TAGS, **lens, LEAF_SHAPE_TAG: shape.tobytes()})
    return keys, tags


def _num_bytes(per_token: tuple[int, int], *, num_tokens: int, num_response: int) -> int:
    return per_token[0] * (num_tokens - num_response) + per_token[1] * num_response


def _imbalance(assignment: RowAssignment, *, dearest_leaf_s: np.ndarray | None = None) -> float:
    """Divide the time of the slowest ranks by the mean, over all mini-batches.

    With `dearest_leaf_s` (mini-batches,), the slowest rank has the mean or one leaf, which cannot be cut.
    """
    predicted_s = np.array(assignment.predicted_s)
    mean_s = predicted_s.mean(axis=0)
    slowest_s = predicted_s.max(axis=0) if dearest_leaf_s is None else np.maximum(mean_s, dearest_leaf_s)
    return float(slowest_s.sum() / mean_s.sum())


def _dearest_leaves(profiles: list[WorkProfile], layout: Layout) -> np.ndarray:
    """Return the predicted time of the dearest leaf of each mini-batch."""
    num_groups = -(-len(profiles) // layout.num_mini_batches)
    dearest_s = [layout.model.predict_counts(profile.path_counts).max() for profile in profiles]
    return np.array([max(dearest_s[start : start + num_groups]) for start in range(0, len(profiles), num_groups)])


def _row_bytes() -> dict[str, float]:
    """Return the bytes of a row that shares nothing, as trees on the wire: per row, prompt token and response token."""
    one, longer_prompt, longer_response = (
        sum(map(value_bytes, PromptColumns().encode(_row(prompt_len, response_len), 0).values()))
        for prompt_len, response_len in ((1000, 1000), (2000, 1000), (1000, 2000))
    )
    prompt_token, response_token = (longer_prompt - one) / 1000, (longer_response - one) / 1000
    return {
        "per_prompt_token": prompt_token,
        "per_response_token": response_token,
        "per_row": one - 1000 * (prompt_token + response_token),
        "tags_per_row": len(pickle.dumps({**TAGS, "prompt_len": 1000, "response_len": 1000, "seq_len": 2000})),
        "shape_per_row": len(pickle.dumps({LEAF_SHAPE_TAG: leaf_shapes([_written(2000)])[0].tobytes()})),
    }


def _stored_bytes(shapes: np.ndarray, row: Mapping[str, float]) -> float:
    """Return the bytes of rows in TransferQueue, each token of a tree once; `row` is of `_row_bytes`."""
    num_own = (shapes["num_tokens"] - shapes["num_shared"]).astype(np.int64)
    num_response = np.minimum(num_own, shapes["response_len"])
    per_row = row["per_row"] + row["tags_per_row"] + row["shape_per_row"]
    of_tokens = row["per_prompt_token"] * (num_own - num_response) + row["per_response_token"] * num_response
    return float(len(shapes) * per_row + of_tokens.sum())


def _written(num_tokens: int) -> WrittenRow:
    return WrittenRow.of(np.zeros(num_tokens, dtype=int), response_mask=np.ones(num_tokens // 2), reward=0.0)


def _row(prompt_len: int, response_len: int) -> Mapping[str, Any]:
    num_tokens = prompt_len + response_len
    token_ids = [100_000 + token for token in range(num_tokens)]
    return row_fields(token_ids, log_probs=[-1.0] * num_tokens, prompt_len=prompt_len)


def row_fields(token_ids: Sequence[int], *, log_probs: Sequence[float], prompt_len: int) -> dict[str, Any]:
    """Return the fields of a row, as `_agent_loop_postprocess` of verl's agent loop worker writes them."""
    num_tokens = len(token_ids)
    response_len = num_tokens - prompt_len
    calls = [(0, "root", prompt_len, num_tokens, 1, 1)]
    fields = make_row(
        token_ids,
        [0] * prompt_len + [1] * response_len,
        log_probs,
        prompt_len=prompt_len,
        response_length=response_len,
        versions=[1],
        extra_fields={"recorded_calls": calls},
        leaf_reward=1.0,
    ).as_dict()
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    return fields | {
        "input_ids": input_ids,
        "position_ids": torch.arange(num_tokens),
        "loss_mask": fields["response_mask"],
        "multi_modal_inputs": {},
        "uid": "000000000-00000000-0000-0000-0000-000000000000",
        "session_id": 0,
        "raw_prompt": [{"role": "user", "content": ""}],
    }


def value_bytes(value: Any) -> int:
    """Return the bytes of a value of a row, without those of its message."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return len(value) if isinstance(value, bytes) else len(pickle.dumps(value))


if __name__ == "__main__":
    main()
