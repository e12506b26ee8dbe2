"""Sessions of a prompt on one rollout server or spread by verl's balancer: the recipe memory_qa with two servers.

    PYTHONPATH=. python benchmarks/routing.py --out docs/benchmarks/data/routing.csv

Every prompt of the recipe gets a text of its own, --prompt-tokens long, with which all contexts of its sessions start.
The model is the recipe's with more positions. Runs alternate between the two routers, and start alike.
"""

import csv
import json
import shutil
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
from harness import new_parser, print_table
from recipe_runs import ROOT, train

from recipes.memory_qa.prepare import SETTINGS, prepare
from recipes.memory_qa.tasks import CHATTER

ROUTERS = {"prompt_router.yaml": (), "verl's balancer": ("actor_rollout_ref.rollout.router_config_path=null",)}
HIT_RATE, CALLS = "tree/prefix_cache_hit_rate", "tree/calls"
GENERATION_S, STEP_S = "timing_s/gen", "timing_s/step"
NUM_OTHER_TOKENS = 512
"""Room for what else a context has."""
LOOP = """
- name: memory_qa
  _target_: recipes.memory_qa.loop.MemoryQALoop
  max_notes: 2
  max_turn_len: 32
"""
"""The recipe's, and an end to what a model says that has never seen so long a prompt."""


def main() -> None:
    """Run the recipe with either router, in turn; write a row for each run."""
    parser = new_parser(__doc__, needed_out="CSV file")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="tokens that each prompt has more")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not counted")
    parser.add_argument("--rounds", type=int, default=2, help="runs with either router")
    parser.add_argument("--work", type=Path, default=Path("runs/routing"), help="folder of the runs")
    options = parser.parse_args()
    work = options.work.resolve()
    prepared = _with_long_prompts(work / "prepared", num_tokens=options.prompt_tokens)
    length = options.prompt_tokens + NUM_OTHER_TOKENS
    settings = (
        f"recipe.folder={prepared}",
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={options.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        f"data.max_prompt_length={length}",
        f"actor_rollout_ref.rollout.max_model_len={length + 48}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={prepared}/loops.yaml",
    )
    rows = []
    for number in range(1, options.rounds + 1):
        for router, choice in ROUTERS.items():
            name = f"{number}_{'prompt' if not choice else 'balancer'}"
            metrics = train("memory_qa", *settings, *choice, folder=work / name)
            steps = [metrics[step] for step in range(2, options.steps + 1)]
            rows.append(
                {
                    "router": router,
                    "run": number,
                    "prompt_tokens": options.prompt_tokens,
                    "steps": len(steps),
                    "prefix_cache_hit_rate": round(fmean(step[HIT_RATE] for step in steps), 4),
                    "calls": sum(int(step[CALLS]) for step in steps),
                    "generation_s": round(fmean(step[GENERATION_S] for step in steps), 2),
                    "step_s": round(fmean(step[STEP_S] for step in steps), 2),
                }
            )
    print_table([{name: str(value) for name, value in row.items()} for row in rows])
    with options.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _with_long_prompts(folder: Path, *, num_tokens: int) -> Path:
    """Return a copy of the prepared recipe whose prompts have a text of their own."""
    made = prepare(ROOT / ".cache", settings=SETTINGS)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    config = folder / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 2 * num_tokens}))
    (folder / "loops.yaml").write_text(LOOP)
    rng = np.random.default_rng(0)
    for file in folder.glob("*.parquet"):
        table = pd.read_parquet(made / file.name)
        table["prompt"] = [
            _with_text(messages, text="".join(rng.choice(CHATTER, num_tokens))) for messages in table["prompt"]
        ]
        table.to_parquet(file)
    return folder


def _with_text(messages: list[dict[str, str]], *, text: str) -> list[dict[str, str]]:
    """Put a text behind the first user message, which is a part of every context."""
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{text}"}]


if __name__ == "__main__":
    main()
