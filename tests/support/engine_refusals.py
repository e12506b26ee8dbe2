"""What the tree engines on VeOmni and Megatron refuse when they are built: on one rank, and `veomni weights` on two.

`tests/e2e/test_engines.py` starts it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import other_engines
import torch.distributed as dist
from process_groups import join_ranks
from tiny_models import tiny_model
from verl.workers.config import VeOmniEngineConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.configs import MODEL_ENGINES
from verl_tree.testing.local_worker import local_worker

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "veomni": {"qwen3": {}, "lfm2": {}, "gemma3": {}},
    "veomni weights": {"qwen2_5_vl": {}, "llama": {"tie_word_embeddings": True}},
    "megatron": {"qwen3": {"vocab_size": 64}, "qwen3 moe": {"vocab_size": 64, "mlp_only_layers": []}},
}
"""Families, with settings that the engine takes."""


def on_megatron(*, replays: bool = False, **config: Any) -> dict[str, Any]:
    """Return options with settings of Megatron's own config."""
    return {
        "engine_options": {"sequence_parallel": False, "override_transformer_config": config},
        "router_replay": "R2" if replays else "disabled",
    }


CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "veomni": {
        "one rank": ("qwen3", {}),
        "adapters": ("qwen3", {"model_options": {"lora_rank": 4}}),
        "parts of a critic": ("qwen3", {"is_critic": True, "engine_options": {"expert_parallel_size": 2}}),
        "another type": ("lfm2", {}),
        "another critic": ("gemma3", {"is_critic": True}),
    },
    "veomni weights": {"names of an earlier transformers": ("qwen2_5_vl", {}), "no head": ("llama", {})},
    "megatron": {
        "adapters": ("qwen3", {"model_options": {"lora_rank": 4}}),
        "context": ("qwen3", {"engine_options": {"context_parallel_size": 2}}),
        "dropout": ("qwen3", on_megatron(hidden_dropout=0.1)),
        "no experts": ("qwen3", on_megatron(replays=True)),
        "groups": ("qwen3 moe", on_megatron(replays=True, moe_router_num_groups=2, moe_router_group_topk=1)),
        "doubled experts": (
            "qwen3 moe",
            {"engine_options": {"sequence_parallel": False, "expert_tensor_parallel_size": 2}},
        ),
        "experts computed anew": (
            "qwen3 moe",
            on_megatron(replays=True, recompute_granularity="selective", recompute_modules=["moe"]),
        ),
    },
}


def refusal(engine: str, folder: Path, **options: Any) -> str:
    """Return why a worker is not built."""
    other_engines.forget_ranks(engine)
    try:
        local_worker(str(folder), strategy=MODEL_ENGINES[engine].tree, max_token_len=64, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{options} were taken")


def main() -> None:
    """Write the refusals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", choices=CASES, required=True)
    arguments = parser.parse_args()
    engine = arguments.engine.split()[0]
    root = join_ranks()
    other_engines.load(engine)
    for family, settings in MODELS[arguments.engine].items():
        if dist.get_rank() == 0:
            tiny_model(family, size="engine", **settings).save_pretrained(root / family)
            config = root / family / "config.json"  # a tied model is saved without its head
            config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    dist.barrier()
    cases = CASES[arguments.engine].items()
    found = {name: refusal(engine, root / family, **options) for name, (family, options) in cases}
    if arguments.engine == "veomni":
        from verl_tree.engine.veomni.engine import VeOmniTreeEngine

        try:
            VeOmniTreeEngine(None, VeOmniEngineConfig(), None, None)  # type: ignore[arg-type]  (it has no tree options)
        except ValueError as error:
            found["no tree options"] = str(error)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
