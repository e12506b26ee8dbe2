"""What the judge of recipes/tree_search_reasoning said of the leaves of a run, and what it takes to ask it.

Reads the trees that a run with `default_agent_loop=judged` has stored in `tree.dump_dir`. Every leaf is compared with
the verifier of the task, which the run did not ask. Of some sessions all questions are asked again, one by one with
plain forwards of transformers, and timed beside `score_batch`. On one thread::

    python benchmarks/judged_leaves.py runs/judged/trees/*.parquet --folder .cache/tree_search_reasoning/* --out O.json
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from harness import environment, interleave, new_parser, print_table, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipes.demo.tasks import score_answer
from recipes.tree_search_reasoning.judge import LABELS, Judge, ask, grade_of
from verl_tree.records import StoredTree, read_trees
from verl_tree.tree import TokenForest

Session = tuple[list[str], str, list[float]]
"""Texts of the leaves, the reference, and the rewards that the run gave them."""


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


def agreement(sessions: Sequence[Session]) -> dict[str, float]:
    """Compare the rewards with what the verifier says of the same leaves."""
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
        "largest_difference_to_the_run": float(np.abs(np.array(flat) - given).max()),
        "largest_difference": float(np.abs(np.array(flat) - np.array(tree)).max()),
    }


def main() -> None:
    """Read, compare, time."""
    parser = new_parser(__doc__)
    parser.add_argument("trees", type=Path, nargs="+", help="files of `tree.dump_dir`")
    parser.add_argument("--folder", type=Path, required=True, help="what the recipe's prepare printed")
    parser.add_argument("--sessions", type=int, default=8, help="last sessions, which are asked about again")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.folder / "model")
    trees = [tree for path in sorted(options.trees) for tree in read_trees(path)]
    sessions = read_sessions(trees, tokenizer=tokenizer, tasks=options.folder / "train.parquet")
    found = {
        "agreement": agreement(sessions),
        "cost": cost(options.folder / "judge", sessions[-options.sessions :], repetitions=options.repetitions),
    }
    options.trees = len(options.trees)
    write_json(found | {"environment": environment(options)}, options.out)
    for part in found.values():
        print_table([{"": name, "value": f"{value:.4g}"} for name, value in part.items()])


if __name__ == "__main__":
    main()
