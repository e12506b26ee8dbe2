"""Hybrids: the tree engine beside verl's own FSDP2 engine on the same rows; one process per rank.

`tests/e2e/test_hybrid_engines.py` starts it. All is as in `engine_cases.py` but the models. On the flat side,
transformers' chunked rule runs in chunks of 64 tokens, as on trees. In the case `token_mean` a second flat side, with
chunks of 8 tokens, says how far apart two right answers in float32 are; short convolutions have no chunks.

verl replaces the forwards of the classes of Qwen3.5 in the process that loads a model with images, so that model is the
last.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import VOCABULARY, Case, compare, infer, make_batch, make_worker, take_steps
from hybrid_cases import EXPERTS, SETTINGS, draw_what_starts_constant
from mixer_cases import OTHERS, make_other
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY
from verl_tree.recurrence.bind import num_bound_mixers

LR = 0.05
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CHECKPOINTING = {"enable_gradient_checkpointing": True}


def case(name: str, **options: Any) -> Case:
    """Return a case whose steps are small enough for a recurrence. Trees fit into packs but in the cases of relay."""
    return Case(name, **({"lr": LR, "capacity": 160} | options))


CASES = {
    "qwen3_next": [
        case("token_mean"),
        case("kl_and_entropy", actor={"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}),
        case("lora", model=LORA),
        case("critic", is_critic=True),
        case("relay_lora", tree={"capacity": 7}, model=LORA),
    ],
    "qwen3_5_text": [
        case("token_mean"),
        case("gradient_checkpointing", model=CHECKPOINTING),
        case("lora", model=LORA | CHECKPOINTING),
        case("duplicates_and_prefixes", rows="duplicates"),
        case("one_token_responses", rows="one_token"),
        case("idle_rank", rows="idle_rank"),
        case("three_steps", num_steps=3, lr=0.01),
        case("relay_checkpointing_on_host", tree={"capacity": 20, "relay_store": "host"}, model=CHECKPOINTING),
        case("relay_idle_rank", rows="idle_rank", tree={"capacity": 7}),
    ],
    "qwen3_5_moe_text": [case("token_mean", model=LORA | CHECKPOINTING)],
    "olmo_hybrid": [case("token_mean", model=CHECKPOINTING), case("relay_lora", model=LORA, tree={"capacity": 7})],
    "lfm2": [case("token_mean", model=CHECKPOINTING), case("relay_lora", model=LORA, tree={"capacity": 7})],
    "lfm2_moe": [case("token_mean", model=LORA | CHECKPOINTING)],
    "granitemoehybrid": [case("token_mean", model=CHECKPOINTING), case("relay_lora", model=LORA, tree={"capacity": 7})],
    "qwen3_5": [
        case("token_mean"),
        case("gradient_checkpointing", model=CHECKPOINTING),
        case("relay", tree={"capacity": 11}),
        # The tower's adapters would get no gradient and stay zero.
        case("lora", model=LORA | {"target_modules": ["in_proj_qkv", "out_proj", "q_proj", "gate_proj"]}),
    ],
}

SHORT_CONVS = ("lfm2", "lfm2_moe")
"""Families that compute nothing in chunks."""


def make_model(family: str) -> PreTrainedModel:
    """Make a tiny random hybrid; `qwen3_5` has a vision tower, as every published checkpoint of Qwen3.5."""
    torch.manual_seed(5)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.1}
    settings = SETTINGS | sizes
    if family in OTHERS:
        return make_other(family, **sizes)
    if family == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**settings, **EXPERTS))
    elif family == "qwen3_5_moe_text":
        model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**settings, **EXPERTS))
    elif family == "qwen3_5_text":
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings))
    else:
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_heads": 2,
            "out_hidden_size": settings["hidden_size"],
            "patch_size": 4,
            "num_position_embeddings": 16,
        }
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=settings, vision_config=vision))
    draw_what_starts_constant(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # distances of parameters are relative
                parameter.normal_(std=0.1)
    return model


def run_case(case: Case, *, folder: Path, rank: int, world_size: int, has_chunks: bool) -> dict[str, float]:
    """Run one case on all ranks; return the worst rank's distances, and those of two flat sides (`flat_...`)."""
    batches = [make_batch(case, step=step, rank=rank, world_size=world_size) for step in range(case.num_steps)]
    sides, counts = [], {}
    others = [(FLAT_STRATEGY, 8)] if case.name == "token_mean" and has_chunks else []
    for strategy, chunk_size in ((FLAT_STRATEGY, 64), (TREE_STRATEGY, 64), *others):
        worker = make_worker(case, strategy=strategy, folder=folder)
        if strategy == FLAT_STRATEGY and has_chunks:
            set_chunk_size(worker.engine.module, chunk_size)
        elif strategy == TREE_STRATEGY:
            assert num_bound_mixers(worker.engine.module) == SETTINGS["layer_types"].count("linear_attention")
        sides.append(infer(worker, batches[0]) | take_steps(worker, batches))
        if strategy == TREE_STRATEGY:
            counts = worker.engine.tree_counts.metrics()
    flat, tree, *others = sides
    distances = compare(flat, tree, batches[0])
    for other_chunks in others:
        distances |= {f"flat_{name}": value for name, value in compare(flat, other_chunks, batches[0]).items()}
    errors: list[Any] = [None] * world_size
    dist.all_gather_object(errors, distances)
    worst = {name: max(each[name] for each in errors) for name in errors[0]}
    return worst | {"por": counts["tree/por"], "sections": counts.get("tree/sections", 0)}


def set_chunk_size(model: torch.nn.Module, chunk_size: int) -> None:
    """Let the recurrent layers of a flat model run in chunks of another size."""
    names = {"chunk_gated_delta_rule", "chunk_size"}
    mixers = [module for module in model.modules() if names & vars(module).keys()]
    assert len(mixers) == SETTINGS["layer_types"].count("linear_attention")
    for mixer in mixers:
        if "chunk_size" in vars(mixer):  # Mamba-2
            mixer.chunk_size = chunk_size
            continue
        assert mixer.chunk_gated_delta_rule.__name__ == "torch_chunk_gated_delta_rule"
        mixer.chunk_gated_delta_rule = partial(torch_chunk_gated_delta_rule, chunk_size=chunk_size)


def main() -> None:
    """Run the cases that the command line names as FAMILY_CASE, or all."""
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
    for family, cases in CASES.items():
        # On one rank the first case says enough.
        names = {f"{family}_{each.name}": each for each in cases[: 1 if world_size == 1 else None]}
        wanted = {name: each for name, each in names.items() if name in (arguments.cases or names)}
        if not wanted:
            continue
        folder = Path(shared[0]) / family
        if rank == 0:
            make_model(family).save_pretrained(folder)
        dist.barrier()
        for name, each in wanted.items():
            has_chunks = family not in SHORT_CONVS
            results[name] = run_case(each, folder=folder, rank=rank, world_size=world_size, has_chunks=has_chunks)
            if rank == 0:
                print(name, {key: f"{value:.3g}" for key, value in results[name].items()}, flush=True)
    if rank == 0:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
