"""Store sessions of the scripted solver as trees, each with its reward, for fine-tuning by rejection sampling.

    python -m recipes.demo.solved_trees FOLDER --out trees.parquet [--tasks 64] [--first-task 0]

FOLDER is what `python -m recipes.arithmetic_tools.prepare` printed. The solver has mixed habits, so some of the
sessions of a task succeed; all leaves of a session have its reward, 1 or 0.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from recipes.demo.leaves import Leaf, Message, Renderer
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, Solver, Turn, trace_leaves
from recipes.demo.tasks import Task, make_memory, make_tasks, score_answer
from recipes.demo.tools import make_tools
from verl_tree.records import StoredLeaf, StoredTree, write_trees

SEED_STEPS = 3
"""Seeds of training, validation and warm start come before these tasks'; see `Settings`."""


def stored_leaf(leaf: Leaf, *, session: int, number: int, prompt_len: int, reward: float) -> StoredLeaf:
    """Return a leaf with the reward at its last token."""
    token_rewards = np.zeros(len(leaf.token_ids) - prompt_len)
    token_rewards[-1] = reward
    return StoredLeaf(
        session=session,
        leaf=number,
        token_ids=np.array(leaf.token_ids),
        prompt_len=prompt_len,
        is_trained=np.array(leaf.trained, dtype=bool),
        log_probs=np.full(len(leaf.token_ids), np.nan),
        token_rewards=token_rewards,
    )


def solve_tree(task: Task, *, uid: str, solver: Solver, renderer: Renderer, num_sessions: int) -> StoredTree:
    """Let the solver take a task several times and return the tree of its sessions."""
    sessions = [solver.solve(task) for _ in range(num_sessions)]
    return stored_tree(task.messages, sessions, answer=task.answer, uid=uid, renderer=renderer)


def stored_tree(
    messages: Sequence[Message], sessions: Iterable[Sequence[Turn]], *, answer: str, uid: str, renderer: Renderer
) -> StoredTree:
    """Return the tree of some sessions that start with `messages`; a session's turns end with its answer."""
    prompt_len = len(renderer.read(messages).token_ids)
    leaves: list[StoredLeaf] = []
    for session, turns in enumerate(sessions):
        reward = score_answer(turns[-1].text, answer=answer)
        leaves += [
            stored_leaf(leaf, session=session, number=number, prompt_len=prompt_len, reward=reward)
            for number, leaf in enumerate(trace_leaves(messages, turns, renderer))
        ]
    return StoredTree(step=0, uid=uid, leaves=tuple(leaves))


def solve_trees(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, settings: Settings, tasks: range, num_sessions: int
) -> Sequence[StoredTree]:
    """Return the trees of some tasks, a function of the arguments; `folder` has the memory of the lookup tool."""
    calculator, lookup = make_tools(folder / "memory.sqlite")
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])
    memory, seed = make_memory(seed=settings.seed), settings.train_seed + SEED_STEPS * settings.seed_step
    trees = []
    for number in tasks:
        (task,) = make_tasks(1, memory=memory, seed=seed + 2 * number)
        solver = Solver(calculator=calculator, lookup=lookup, habits=MIXED, rng=random.Random(number))
        trees.append(solve_tree(task, uid=str(number), solver=solver, renderer=renderer, num_sessions=num_sessions))
    return trees


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--first-task", type=int, default=0, help="other tasks than those of another file")
    parser.add_argument("--sessions", type=int, default=8, help="of each task")
    options = parser.parse_args()
    trees = solve_trees(
        options.folder,
        AutoTokenizer.from_pretrained(options.folder / "model"),
        settings=Settings(),
        tasks=range(options.first_task, options.first_task + options.tasks),
        num_sessions=options.sessions,
    )
    write_trees(options.out, trees)
    leaves = [leaf for tree in trees for leaf in tree.leaves]
    print(
        f"{options.out}: {len(trees)} trees, {len(leaves)} leaves, {sum(leaf.reward == 1 for leaf in leaves)} rewarded"
    )


if __name__ == "__main__":
    main()
