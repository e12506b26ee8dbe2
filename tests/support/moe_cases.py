"""Mixtures of experts: the tree engine beside verl's own on the same rows, as in `engine_cases`; a process per rank.

`tests/e2e/test_moe_engines.py` starts it.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_cases import VOCABULARY, Case, run_case
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}
CONFIGS = {
    "Qwen3-MoE": Qwen3MoeConfig(**SETTINGS, **EXPERTS),
    "gpt-oss": GptOssConfig(
        **SETTINGS,
        num_local_experts=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
CASES = {
    "Qwen3-MoE": [
        Case("token_mean", actor={"use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}),
        Case("lora", model=LORA),
        Case("checkpointing", model={"enable_gradient_checkpointing": True}),
        Case("critic", is_critic=True),
        Case("relay", tree={"capacity": 7}),
        Case("idle_rank", rows="idle_rank"),
    ],
    # transformers' SDPA has no sinks, so verl's own engine runs eager attention.
    "gpt-oss": [
        Case(name, **options, model={"override_config": {"attn_implementation": "eager"}, **model})
        for name, options, model in (
            ("token_mean", {}, {}),
            ("lora", {}, LORA),
            ("checkpointing", {}, {"enable_gradient_checkpointing": True}),
            ("critic", {"is_critic": True}, {}),
            ("relay", {"tree": {"capacity": 7}}, {}),
        )
    ],
}
"""Cases by family."""


def save_model(folder: Path, *, family: str) -> None:
    """Save a tiny random model whose experts and routes matter: larger weights than those of its initialisation."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name or "bias" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)


def main() -> None:
    """Run the cases that the command line names as "FAMILY CASE", or all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sp", type=int, default=1, help="ranks that compute each tree together")
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    root = Path(str(shared[0]))
    results = {}
    for family, all_cases in CASES.items():
        cases = [case for case in all_cases if not arguments.cases or f"{family} {case.name}" in arguments.cases]
        if not cases:
            continue
        if rank == 0:
            save_model(root / family / "untied", family=family)
        dist.barrier()
        references: dict[str, dict[str, Any]] = {}
        for case in cases:
            case = dataclasses.replace(case, sp=arguments.sp)
            result = run_case(case, rank=rank, world_size=world_size, root=root / family, references=references)
            results[f"{family} {case.name}"] = result
            if rank == 0:
                print(family, case.name, {name: f"{value:.3g}" for name, value in result.items()}, flush=True)
    if rank == 0:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
