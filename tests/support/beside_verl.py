"""An engine of trees beside verl's own on the same rows; one process per rank.

`tests/e2e/test_engines.py` starts it. Both sides are real `TrainingWorker`s with verl's real losses, in fp32 on the
CPU, and take the same SGD steps, one unless the case says more. Rank 0 writes the differences of every case. Those of
outputs are relative to the largest value of the flat side, those of gradients and parameters to the tensor. Query and
key gradients are zero but for rounding where every query sees one key; these are relative to the global norm.

In cases of float64 both sides compute in float64 what they would in float32: weights, activations, the loss, sums over
ranks, what is handed back. Inputs are float32.

With `--sp` so many ranks compute each tree together. verl's own engine cannot do that on a CPU, so on its side each of
these ranks computes the same rows: the mean over the ranks is the same. It gets all rows of a rank in one micro-batch,
because its forward of Qwen2.5-VL fails on one without images.

Recurrences run in chunks of 64 tokens on both sides. In their case `token_mean` a second flat side, with chunks of 8
tokens, says how far apart two right answers in float32 are (`flat_gradient`).
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import other_engines
import torch
import torch.distributed as dist
from engine_batches import make_batch, of_teams, sessions_of
from engine_cases import CASES_OF, GRADIENTS, RECURRENT, ROUNDED, Case, make_loss
from float64_mode import in_float64
from process_groups import join_ranks
from tensordict import TensorDict
from tiny_models import IMAGE, IMAGES, VIDEO, tiny_model
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, McoreOptimizerConfig, VeOmniOptimizerConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform and the engines)
from verl_tree.configs import FLAT_STRATEGIES
from verl_tree.engine import TreeEngine
from verl_tree.engine.canary import METRIC
from verl_tree.recurrence.bind import num_bound_mixers
from verl_tree.testing.local_worker import local_worker
from verl_tree.testing.mutants import mutated
from verl_tree.trainer.rows.batching import MiniBatchPlan
from verl_tree.trainer.worker import TreeTrainingWorker
from verl_tree.tree.plan import AttentionPlan

ENGINES = {flat: (flat, tree) for tree, flat in FLAT_STRATEGIES.items()}
"""Strategies of verl's own engine and of ours."""

SAVES_MEMORY = ("enable_gradient_checkpointing", "tiled_mlp", "enable_activation_offload")
NO_MOMENTUM = {"sgd_momentum": 0.0, "weight_decay": 0.0}
ADAM = {"optimizer": "adam", "override_optimizer_config": {"adam_eps": 1.0, "weight_decay": 0.0}}
"""What Megatron's distributed optimiser takes; with this epsilon a gradient near zero moves nothing far."""
ALL_ROWS = 4096
"""A capacity that no case exceeds."""
SHORT_CONVS = ("lfm2", "lfm2_moe")
"""Recurrent families that compute nothing in chunks."""
EXCHANGES = {"swaps_shards": lambda x_RLHD: x_RLHD.flip(0), ROUNDED: lambda x_RLHD: x_RLHD * (1 + 2**-24)}
"""Faults of what the ranks of a team exchange: blocks in another order, and numbers off by float32's rounding."""


_COMPARED: set[tuple[Any, ...]] = set()


def compares_gradient(case: Case, *, strategy: str) -> bool:
    """Whether the canary compares a gradient: in the first case of each kind, as losses and rows do not change it."""
    settings = (*sorted(case.model), str(sorted(case.engine.items())), case.tree.get("relay"))
    kind = (strategy, case.family, case.is_critic, case.tied, case.frozen_tower, case.sp, *settings)
    is_new = kind not in _COMPARED
    _COMPARED.add(kind)
    return is_new


def make_worker(case: Case, *, strategy: str, folder: Path) -> TreeTrainingWorker:
    """Make a worker on the tree engine or verl's own."""
    # SGD shows the gradient; Adam's first step shows only its sign. The huge clip rescales nothing.
    make_optimizer, sgd = FSDPOptimizerConfig, {"optimizer": "SGD", "override_optimizer_config": {}}
    is_veomni = strategy in ENGINES["veomni"]
    if is_veomni:
        from verl.workers.engine.veomni import transformer_impl

        other_engines.forget_ranks("veomni")
        make_optimizer, sgd = VeOmniOptimizerConfig, {}
    elif strategy in ENGINES["megatron"]:
        other_engines.forget_ranks("megatron")
        is_shared_out = case.engine["use_distributed_optimizer"]
        sgd = ADAM if is_shared_out else {"optimizer": "sgd", "override_optimizer_config": NO_MOMENTUM}
        make_optimizer = McoreOptimizerConfig
    every = case.spoilt == GRADIENTS or (not case.spoilt and compares_gradient(case, strategy=strategy))
    canary = {"canary": int(case.spoilt in ("", GRADIENTS)), "canary_gradient_every": int(every)}
    torch.manual_seed(7)  # value heads and LoRA adapters start at random
    worker = local_worker(
        str(folder),
        strategy=strategy,
        max_token_len=case.capacity,
        is_critic=case.is_critic,
        model_options=case.model,
        tree_options=case.tree | canary | {"dump_dir": str(folder)},  # what the canary keeps
        sequence_parallel_size=case.sp,
        freeze_vision_tower=case.frozen_tower,
        engine_options=case.engine,
        optimizer=make_optimizer(lr=case.lr, clip_grad=1e9, total_training_steps=10, **sgd),
    )
    if is_veomni and case.family in IMAGES:  # verl knows the image tokens of published models only
        transformer_impl.VL_TYPE2INDEX[case.family] = {"IMAGE_INPUT_INDEX": IMAGE, "VIDEO_INPUT_INDEX": VIDEO}
    if is_veomni:  # it has Adam and Muon only
        worker.engine.optimizer = torch.optim.SGD(worker.engine.module.parameters(), lr=case.lr, foreach=False)
    worker.set_loss_fn(make_loss(case))
    if case.spoilt and strategy not in FLAT_STRATEGIES.values():
        spoilt = (exchanging if case.spoilt in EXCHANGES else mutated)(worker.engine, case.spoilt)
        spoilt.__enter__()
        worker.spoilt = spoilt  # else it would end here
    return worker


@contextmanager
def exchanging(engine: TreeEngine, name: str) -> Iterator[None]:
    """Inject a fault into the exchanges of an engine's teams, while active."""
    right, change = engine.scores, EXCHANGES[name]

    def scores(*args: Any, plan: AttentionPlan, **options: Any) -> torch.Tensor:
        exchange = plan.shard._all_to_all
        with mock.patch.object(plan.shard, "_all_to_all", lambda given: [change(each) for each in exchange(given)]):
            return right(*args, plan=plan, **options)

    with mock.patch.object(engine, "scores", scores):
        yield


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def infer(worker: TreeTrainingWorker, batch: TensorDict) -> dict[str, Any]:
    """Compute scores without an update; only the first rank of a team has them."""
    batch = batch.clone()
    tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=True, distillation_use_topk=False)
    outputs = worker.infer_batch(batch)
    if not worker.engine.is_mp_src_rank_with_outputs():
        return {}
    names = ("log_probs", "entropy", "values", "routed_experts")
    return {name: outputs.get(name) for name in names if outputs.get(name, None) is not None}


def parts_of(case: Case) -> int:
    """Return how many parts of the model a rank has."""
    return case.engine.get("virtual_pipeline_model_parallel_size", 1)


def named_parameters(worker: TreeTrainingWorker) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of the model, or of this rank's part of it."""
    module = worker.engine.module
    return list((torch.nn.ModuleList(module) if isinstance(module, list) else module).named_parameters())


def parameters(worker: TreeTrainingWorker) -> dict[str, torch.Tensor]:
    """Copy the whole parameters."""
    return {name: full(p.detach()).clone() for name, p in named_parameters(worker)}


def gradients(worker: TreeTrainingWorker) -> dict[str, torch.Tensor]:
    """Copy the whole gradients; Megatron adds them up in a place of its own."""
    found = {name: getattr(p, "main_grad", p.grad) for name, p in named_parameters(worker)}
    return {name: full(gradient).clone() for name, gradient in found.items() if gradient is not None}


def train_planned(worker: TreeTrainingWorker, batches: list[TensorDict], *, sp: int, weighs: bool) -> dict[str, Any]:
    """Let the worker take a step on each batch, as mini-batches of one plan; `weighs` says whether it has sessions."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, [session for batch in batches for session in sessions_of(batch)])
    plan = MiniBatchPlan(
        rows=(tuple(map(len, batches)),) * (len(ranks) // sp),
        num_rows=tuple(tu.get(batch, "global_batch_size") for batch in batches),
        sessions=tuple(map(tuple, ranks[::sp])) if weighs else None,
    )
    data = tu.concat_tensordict([batch.exclude("global_batch_size", "global_token_num") for batch in batches])
    for key, value in plan.to_extra_info().items():
        tu.assign_non_tensor_data(data, key, value)
    before = parameters(worker)
    trained = worker.train_mini_batch(data)
    metrics = [None if trained is None else tu.get(trained, "metrics")]
    dist.broadcast_object_list(metrics)  # the first rank collects, the others of its team do not
    clipped = min(np.mean(metrics[0][f"actor/pg_clipfrac{kind}"]) for kind in ("", "_lower"))
    steps = {name: metrics[0][name] for name in ("loss", "grad_norm")}
    return {"clipped": clipped, "before": before, "after": parameters(worker), **steps}


def take_steps(worker: TreeTrainingWorker, batches: list[TensorDict]) -> dict[str, Any]:
    """Through the worker's engine, take gradients on the first batch, and a step on each batch."""
    engine = worker.engine
    result: dict[str, Any] = {"loss": [], "grad_norm": [], "before": parameters(worker)}
    for step, batch in enumerate(batches):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch.clone(), worker.loss_fn, forward_only=False)
            # Earlier stages of a pipeline have none.
            loss = torch.tensor(float(np.sum(output.get("loss", 0.0))), dtype=torch.float64)
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            result["loss"].append(loss.item())
            if step == 0:
                metrics = output.get("metrics", {})
                clipped = [metrics.get(f"actor/pg_clipfrac{kind}") for kind in ("", "_lower")]
                result["clipped"] = min(np.mean(each.values) if each is not None else 0.0 for each in clipped)
                result["gradients"] = gradients(worker)
            result["grad_norm"].append(engine.optimizer_step())
    return result | {"after": parameters(worker)}


def compare(flat: dict[str, Any], tree: dict[str, Any], batch: TensorDict) -> dict[str, float]:
    """Return relative differences, and values that show that the case is not empty; `batch` is the first one."""
    errors = dict(_differences_of_scores(flat, tree, batch))
    norm = float(flat["grad_norm"][0])
    of_flat = flat.get("gradients", {})  # a worker keeps none
    assert of_flat.keys() == tree.get("gradients", {}).keys()
    for name, gradient in of_flat.items():
        own_norm = gradient.norm().item()
        distance = (gradient - tree["gradients"][name]).norm().item() / (own_norm if own_norm > 1e-5 * norm else norm)
        errors["gradient"] = max(errors.get("gradient", 0.0), distance)
    errors["tower_gradients"] = sum("visual" in name for name in of_flat)
    errors["step"] = max(
        (flat["after"][name] - tree["after"][name]).abs().max().item() / flat["after"][name].abs().max().item()
        for name in flat["after"]
    )
    errors["moved"] = max((flat["after"][name] - flat["before"][name]).abs().max().item() for name in flat["after"])
    errors["gradient_norm"] = norm
    steps = [[np.array(side[name]) for side in (flat, tree)] for name in ("grad_norm", "loss")]
    (flat_norms, tree_norms), (flat_losses, tree_losses) = steps
    errors["grad_norm"] = float((abs(flat_norms - tree_norms) / flat_norms).max())
    errors["loss_difference"] = float(abs(flat_losses - tree_losses).max())
    errors["loss"] = float(abs(flat_losses).max())
    errors["clipped"] = float(flat["clipped"])
    return errors


def _differences_of_scores(
    flat: dict[str, Any], tree: dict[str, Any], batch: TensorDict
) -> Iterator[tuple[str, float]]:
    lens = batch["input_ids"].offsets().diff()
    for name in ("log_probs", "entropy", "values"):
        if name not in flat or name not in tree:
            continue
        worst, largest = 0.0, 1e-30
        for row in range(len(batch)):
            mask = batch["response_mask"][row].bool()
            end = int(lens[row]) - 1  # scores stand one position before their token
            here, there = (side[name][row][end - len(mask) : end][mask] for side in (flat, tree))
            if len(here):
                worst = max(worst, (here - there).abs().max().item())
                largest = max(largest, here.abs().max().item())
        yield name, worst / largest


def reference_of(case: Case) -> Case:
    """Return what verl's own engine computes of a case; cases with the same reference share it.

    Trees, what saves memory, the length of micro-batches and teams change no number of verl's.
    """
    return dataclasses.replace(
        case,
        name="reference",
        runs=(),
        long=(),
        model={name: value for name, value in case.model.items() if name not in SAVES_MEMORY},
        tree={name: value for name, value in case.tree.items() if name == "session_weight"},
        capacity=ALL_ROWS,
        spoilt="",
        same_objective=True,
        is_known_loss=True,
    )


class Comparison:
    """The comparisons of some ranks; verl's sides are kept for other cases."""

    def __init__(self, root: Path, *, engine: str = "fsdp2") -> None:
        self.root = root
        self.flat, self.tree = ENGINES[engine]
        self.references: dict[str, dict[str, Any]] = {}

    def errors_of(self, case: Case) -> dict[str, float]:
        """Run one case on all ranks; return the worst rank's distances."""
        if case.spoilt == GRADIENTS:
            return {"seen": float(self.sees_wrong_gradients(case))}
        reference = reference_of(case)
        has_chunks = self.flat == "fsdp2" and case.family in RECURRENT and case.family not in SHORT_CONVS
        if repr(reference) not in self.references:
            self.references[repr(reference)], _ = self.side(reference, chunk_size=64 if has_chunks else None)
        flat = self.references[repr(reference)]
        tree, worker = self.side(case)
        distances = compare(flat, tree, tree["batch"])
        if has_chunks and case.name == "token_mean":
            other, _ = self.side(reference, chunk_size=8)
            distances["flat_gradient"] = compare(flat, other, tree["batch"])["gradient"]
        if self.flat != "megatron":
            assert worker.get_dispatch_collect() == dispatch_of(dist.get_rank(), sp=case.sp)
        counts = worker.engine.tree_counts.metrics()
        distances["canary"] = worker.engine.canary.metrics.get(METRIC, -1.0)  # -1: it did not look
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, distances)
        # Some ranks return no outputs.
        names = {name for each in errors for name in each}
        worst = {name: max(each[name] for each in errors if name in each) for name in names}
        shown = {"por": "tree/por", "sections": "tree/sections", "live_tokens": "tree/live_tokens"}
        return worst | {name: counts.get(key, 0) for name, key in shown.items()}

    def sees_wrong_gradients(self, case: Case) -> bool:
        """Whether the canary ends the update of a case."""
        try:
            self.side(case)
        except ValueError as error:
            return "the gradient of" in str(error)
        return False

    def side(self, case: Case, *, chunk_size: int | None = None) -> tuple[dict[str, Any], TreeTrainingWorker]:
        """Take the steps of one side of a case, verl's if it is a reference; return what they give and the worker."""
        is_flat = case.name == "reference"
        rank, world_size = dist.get_rank(), dist.get_world_size()
        batches = [make_batch(case, step=step, rank=rank, world_size=world_size) for step in range(case.num_steps)]
        # Ranks of Megatron compute rows together on both sides.
        sp = 1 if is_flat and self.flat != "megatron" else case.sp
        mine = [of_teams(batch, sp=sp) for batch in batches]
        strategy = self.flat if is_flat else self.tree
        worker = make_worker(dataclasses.replace(case, sp=sp), strategy=strategy, folder=self.folder_of(case))
        model = worker.engine.module
        if self.flat == "megatron":
            assert len(model) == parts_of(case)
            model = torch.nn.ModuleList(model)
        if is_flat and case.frozen_tower:  # verl's own engine does not read the key
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("visual" not in name)
        if chunk_size is not None:
            set_chunk_size(model, chunk_size)
        elif case.family in RECURRENT and not is_flat:
            assert num_bound_mixers(model) == 2
        weighs = case.tree.get("session_weight") == "session"
        scores = infer(worker, mine[0])
        steps = train_planned(worker, mine, sp=sp, weighs=weighs) if case.planned else take_steps(worker, mine)
        return scores | steps | {"batch": batches[0]}, worker

    def folder_of(self, case: Case) -> Path:
        """Save the model of a case, once for all ranks."""
        num_parts = parts_of(case)
        folder = self.root / f"{case.family.replace(' ', '_')}_{num_parts}" / ("tied" if case.tied else "untied")
        if dist.get_rank() == 0 and not folder.exists():
            # Ranks share the vocabulary out.
            size: dict[str, Any] = {"vocab_size": 64} if self.flat == "megatron" else {}
            if case.family == "qwen3 moe" and size:
                size["mlp_only_layers"] = []  # its bridge knows mixtures in all layers
            if num_parts > 1:
                size["num_hidden_layers"] = 2 * num_parts
            model = tiny_model(case.family, size="engine", seed=5, tie_word_embeddings=case.tied, **size)
            # VeOmni does not know the names that these have in a checkpoint of an earlier transformers.
            is_renamed = case.family == "qwen2_5_vl" or "qwen3_5_moe" in case.family
            model.save_pretrained(folder, save_original_format=self.flat != "veomni" or not is_renamed)
        dist.barrier()
        return folder


def dispatch_of(rank: int, *, sp: int) -> dict[str, Any]:
    """Return how the driver sees a rank: all ranks of a team get the same rows, and the first hands back results."""
    return {"dispatch_dp_rank": {"train": rank // sp}, "collect_dp_rank": {"train": rank % sp == 0}}


def set_chunk_size(model: torch.nn.Module, chunk_size: int) -> None:
    """Let the recurrent layers of a flat model run in chunks of another size."""
    names = {"chunk_gated_delta_rule", "chunk_size"}
    mixers = [module for module in model.modules() if names & vars(module).keys()]
    assert len(mixers) == 2
    for mixer in mixers:
        if "chunk_size" in vars(mixer):  # Mamba-2
            mixer.chunk_size = chunk_size
            continue
        assert mixer.chunk_gated_delta_rule.__name__ == "torch_chunk_gated_delta_rule"
        mixer.chunk_gated_delta_rule = partial(torch_chunk_gated_delta_rule, chunk_size=chunk_size)


def main() -> None:
    """Run the cases that the command line names as "FAMILY CASE", or all of so many ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sp", type=int, default=1, help="ranks that compute each tree together")
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    if arguments.engine != "fsdp2":
        other_engines.load(arguments.engine)
    comparison = Comparison(join_ranks(), engine=arguments.engine)
    ranks = (dist.get_world_size(), arguments.sp)
    results: dict[str, dict[str, float]] = {}
    for case in CASES_OF[arguments.engine]:
        if case.key in arguments.cases or (not arguments.cases and ranks in case.runs + case.long):
            with in_float64() if case.float64 else nullcontext():
                results[case.key] = comparison.errors_of(dataclasses.replace(case, sp=arguments.sp))
            if dist.get_rank() == 0:
                print(case.key, {name: f"{value:.3g}" for name, value in results[case.key].items()}, flush=True)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
