"""What the judge of recipes/tree_search_reasoning says of leaves, and what it takes to ask it.

The leaves are five sessions of the scripted solver for each of some tasks that the judge was not taught on, or those of
a run with `default_agent_loop=judged`, from the trees that it stored in `tree.dump_dir`. Every grade is compared with
the verifier of the task. Of some sessions all questions are asked again, one by one with plain forwards of
transformers, and timed beside `score_batch`. On one thread::

    python -m recipes.tree_search_reasoning.prepare        prints FOLDER
    python benchmarks/judged_leaves.py [runs/judged/trees/*.parquet] --folder FOLDER --out judged_leaves.json
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from harness import environment, interleave, new_parser, print_table, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.demo.leaves import Renderer
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, Solver, trace_leaves
from recipes.demo.tasks import make_memory, make_tasks, score_answer
from recipes.demo.tools import make_tools
from recipes.tree_search_reasoning.judge import LABELS, Judge, ask, grade_of
from verl_tree.records import StoredTree, read_trees
from verl_tree.tree import TokenForest

NUM_TASKS = 64
NUM_LEAVES = 5
"""Leaves of a session, as in the recipe."""

Session = tuple[list[str], str, list[float]]
"""Texts of the leaves, the reference, and the grades that the leaves have as rewards."""


def read_sessions(trees: Sequence[StoredTree], *, tokenizer: PreTrainedTokenizerBase, tasks: Path) -> list[Session]:
    """Return the sessions of stored trees; the reference of a task is found by its question."""
    rows = pd.read_parquet(tasks)
    references = {
        prompt[-1]["content"]: model["ground_truth"]
        for prompt, model in zip(rows.prompt, rows.reward_model, strict=True)
    }
    found: dict[tuple[int, str, int], Session] = {}
    for tree in trees:
        for leaf in tree.leaves:
            text = tokenizer.decode(leaf.token_ids)
            question = text.split("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0]
            session = found.setdefault((tree.step, tree.uid, leaf.session), ([], references[question], []))
            assert leaf.reward is not None
            session[0].append(text)
            session[2].append(leaf.reward)
    return list(found.values())


def solver_sessions(folder: Path, *, num_tasks: int) -> list[Session]:
    """Return sessions of the solver with mixed habits on the first tasks of a prepared folder."""
    settings, judge = Settings(), Judge(folder / "judge")
    calculator, lookup = make_tools(folder / "memory.sqlite")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])
    solver = Solver(calculator=calculator, lookup=lookup, habits=MIXED)
    sessions = []
    for task in make_tasks(num_tasks, memory=make_memory(seed=settings.seed), seed=settings.train_seed):
        leaves = [trace_leaves(task, solver.solve(task), renderer)[-1] for _ in range(NUM_LEAVES)]
        texts = [tokenizer.decode(leaf.token_ids) for leaf in leaves]
        sessions.append((texts, task.answer, judge.grade(texts, reference=task.answer)))
    return sessions


def agreement(sessions: Sequence[Session]) -> dict[str, float]:
    """Compare the grades with what the verifier says of the same leaves."""
    rewards: dict[bool, list[float]] = defaultdict(list)
    for texts, reference, given in sessions:
        for text, reward in zip(texts, given, strict=True):
            last_turn = text.rpartition("<|im_start|>assistant\n")[2]
            rewards[score_answer(last_turn, answer=reference) == 1.0].append(reward)
    right, wrong = np.array(rewards[True]), np.array(rewards[False])
    pairs = right[:, None] - wrong
    return {
        "right_leaves": len(right),
        "wrong_leaves": len(wrong),
        "mean_grade_of_right": right.mean(),
        "least_grade_of_right": right.min(),
        "mean_grade_of_wrong": wrong.mean(),
        "largest_grade_of_wrong": wrong.max(),
        "pairs_in_order": ((pairs > 0) + 0.5 * (pairs == 0)).mean(),
    }


@torch.no_grad()
def one_by_one(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], reference: str
) -> list[float]:
    """Grade leaves with a forward of transformers for each question."""
    labels, questions = tokenizer.convert_tokens_to_ids(list(LABELS)), ask(reference)
    grades = []
    for text in texts:
        rows = [torch.tensor([tokenizer.encode(text + question.text)]) for question in questions]
        logits = [model(row, use_cache=False, logits_to_keep=1).logits[0, -1, labels] for row in rows]
        grades.append(grade_of(torch.stack(logits).softmax(-1)[:, 0], questions))
    return grades


def cost(folder: Path, sessions: Sequence[Session], *, repetitions: int) -> dict[str, float]:
    """Ask all questions about some sessions in both ways; count tokens and seconds a session."""
    judge, tokenizer = Judge(folder), AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    num_flat = num_tree = 0
    for texts, reference, _ in sessions:
        rows = [tokenizer.encode(text + question.text) for text in texts for question in ask(reference)]
        forest = TokenForest.from_sequences(rows)
        num_flat, num_tree = num_flat + forest.num_flat_tokens, num_tree + forest.num_tokens
    flat, tree = [], []

    def ask_flat() -> None:
        flat[:] = [
            grade for texts, reference, _ in sessions for grade in one_by_one(model, tokenizer, texts, reference)
        ]

    def ask_tree() -> None:
        tree[:] = [grade for texts, reference, _ in sessions for grade in judge.grade(texts, reference=reference)]

    times = interleave({"one by one": ask_flat, "score_batch": ask_tree}, repetitions=repetitions, num_warmups=1)
    given = np.array([reward for *_, rewards in sessions for reward in rewards])
    one_by_one_s, tree_s = (times[name].median_cpu_s / len(sessions) for name in ("one by one", "score_batch"))
    return {
        "sessions": len(sessions),
        "flat_tokens": num_flat,
        "tree_tokens": num_tree,
        "bound": num_flat / num_tree,
        "one_by_one_s": one_by_one_s,
        "score_batch_s": tree_s,
        "faster": one_by_one_s / tree_s,
        "largest_difference_to_the_rewards": float(np.abs(np.array(flat) - given).max()),
        "largest_difference": float(np.abs(np.array(flat) - np.array(tree)).max()),
    }


def main() -> None:
    """Read, compare, time."""
    parser = new_parser(__doc__)
    parser.add_argument("trees", type=Path, nargs="*", help="files of `tree.dump_dir`; none: the solver's sessions")
    parser.add_argument("--folder", type=Path, required=True, help="what the recipe's prepare printed")
    parser.add_argument("--sessions", type=int, default=8, help="last sessions, which are asked about again")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.trees:
        tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
        trees = [tree for path in sorted(options.trees) for tree in read_trees(path)]
        sessions = read_sessions(trees, tokenizer=tokenizer, tasks=options.folder / "train.parquet")
    else:
        sessions = solver_sessions(options.folder, num_tasks=NUM_TASKS)
    found = {
        "agreement": agreement(sessions),
        "cost": cost(options.folder / "judge", sessions[-options.sessions :], repetitions=options.repetitions),
    }
    options.trees, options.folder = len(options.trees), options.folder.name
    write_json(found | {"environment": environment(options)}, options.out)
    for part in found.values():
        print_table([{"": name, "value": f"{value:.4g}"} for name, value in part.items()])


if __name__ == "__main__":
    main()
