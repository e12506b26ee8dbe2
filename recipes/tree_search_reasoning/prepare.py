"""Prepares a run: what arithmetic_tools prepares, the loops that search, and validation rows that name the plain agent.

    python -m recipes.tree_search_reasoning.prepare                  with the small model of arithmetic_tools
    python -m recipes.tree_search_reasoning.prepare --model PATH     a Hugging Face model folder of yours

prints the folder. Train tasks, tools and model in it are links to the folder of arithmetic_tools, which is made first.
"""

import hashlib
from pathlib import Path

from recipes.arithmetic_tools.prepare import DEFAULT_CACHE_DIR as TASKS_CACHE_DIR
from recipes.arithmetic_tools.prepare import prepare_default as prepare_tasks
from recipes.prepared import build_once, run_command_line

DEFAULT_CACHE_DIR = Path(".cache/tree_search_reasoning")
PLAIN = "plain"
"""The loop of the validation rows: one chain, nothing is searched."""

SEARCH = "rollout_hooks.loops.tree_search.TreeSearchAgentLoop"
LOOPS = (
    {"name": "tree_grpo", "_target_": SEARCH, "num_expansions": 2, "num_rounds": 2},
    {"name": "treerl", "_target_": SEARCH, "num_expansions": 2, "num_rounds": 2, "select": "entropy"},
    {"name": PLAIN, "_target_": SEARCH, "num_rounds": 0},
)
"""verl's agent loop config. A session is one tree (`num_trees` is 1), so `rollout.n` is the papers' M."""


def prepare(cache_dir: Path, *, tasks: Path) -> Path:
    """Makes what a run needs unless `cache_dir` has it.

    Args:
        cache_dir: where prepared folders are kept.
        tasks: the folder that arithmetic_tools prepared.

    Returns:
        The prepared folder, an absolute path.
    """
    code = hashlib.sha256(Path(__file__).read_bytes() + str(tasks.resolve()).encode())
    folder = cache_dir.resolve() / code.hexdigest()[:12]
    return build_once(folder, build=lambda building: _build(building, tasks=tasks.resolve()))


def _build(folder: Path, *, tasks: Path) -> None:
    # Imported here, so that a second call, which makes nothing, takes no time.
    import pandas as pd
    import yaml

    for name in ("train.parquet", "tools.yaml", "model"):
        (folder / name).symlink_to(tasks / name)
    # verl reports the last leaf of a session, and that of a search is whatever was expanded last.
    validation = pd.read_parquet(tasks / "validation.parquet")
    validation.assign(agent_name=PLAIN).to_parquet(folder / "validation.parquet")
    (folder / "loops.yaml").write_text(yaml.safe_dump(list(LOOPS)))


def prepare_default(cache_dir: Path, model: Path | None) -> Path:
    """Prepares the tasks and model of arithmetic_tools with its default settings, and the run from these."""
    return prepare(cache_dir, tasks=prepare_tasks(TASKS_CACHE_DIR, model))


if __name__ == "__main__":
    run_command_line(__doc__, cache_dir=DEFAULT_CACHE_DIR, prepare=prepare_default)
