"""What the VeOmni tree engine refuses when it is built, on one rank. `tests/e2e/test_engines.py` starts it."""

import argparse
import json
from pathlib import Path
from typing import Any

import other_engines
from process_groups import join_ranks
from tiny_models import tiny_model
from verl.workers.config import VeOmniEngineConfig

import verl_tree.cpu.platform  # noqa: F401  (the CPU platform)
from verl_tree.configs import MODEL_ENGINES
from verl_tree.testing.local_worker import local_worker


def refusal(folder: Path, **options: Any) -> str:
    """Return why a worker is not built."""
    other_engines.forget_ranks("veomni")
    try:
        local_worker(str(folder), strategy=MODEL_ENGINES["veomni"].tree, max_token_len=64, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{options} were taken")


def main() -> None:
    """Write the refusals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    root = join_ranks()
    other_engines.load("veomni")
    from verl_tree.engine.veomni.engine import VeOmniTreeEngine

    for family in ("qwen3", "qwen3_5_text"):
        tiny_model(family, size="engine").save_pretrained(root / family)
    found = {
        "one rank": refusal(root / "qwen3"),
        "adapters": refusal(root / "qwen3", model_options={"lora_rank": 4}),
        "parts of a critic": refusal(root / "qwen3", is_critic=True, engine_options={"expert_parallel_size": 2}),
        "another type": refusal(root / "qwen3_5_text"),
    }
    try:
        VeOmniTreeEngine(None, VeOmniEngineConfig(), None, None)  # type: ignore[arg-type]  (it has no tree options)
    except ValueError as error:
        found["no tree options"] = str(error)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
