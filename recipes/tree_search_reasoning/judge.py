"""A judge model grades the leaves of a search: 32 yes/no questions about each, all of a session in one tree.

The judge reads a leaf, prompt and tool results included. It is asked whether the answer says the two values of the
reference, and in the place of each 15 wrong numbers. `verl_tree.functional.score_batch` runs every leaf once, what the
leaves share once for all of them, and the questions as branches of the leaves.

The grade is the share of yes among the right numbers minus that among the wrong ones: 1 for a right answer, about .5 if
one value is right, and 0 for every leaf if the judge always says yes, or always no.

Legend: Q questions about one leaf.
"""

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typing_extensions import override

from rollout_hooks.loops.base import Branch
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop
from verl_tree.functional import score_batch

PLACES = ("\nDoes it say <answer>{}", "\nDoes it say {}</answer>")
LABELS = (" Yes", " No")
NUM_WRONG = 15
"""Wrong numbers that are asked for at each place."""
OFFSETS = (1, -1, 2, -2, 3, -3, 5, -5, 10, -10, 20, -20, 30, -30, 50, -50)
"""Distances of wrong numbers from the right one; the other value of the answer is wrong, too, and asked for first."""
CAPACITY = 8192
"""Tree tokens that the judge runs at a time."""

# A model serves one call of `score_batch` at a time, and the event loop of the worker must not wait for it.
_THREAD = ThreadPoolExecutor(max_workers=1, thread_name_prefix="judge")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about an answer; `is_right` says whether a right answer has a yes."""

    text: str
    is_right: bool


def ask(reference: str) -> list[Question]:
    """Return the Q = 32 questions about an answer whose right values are `reference`, such as ``107 36``."""
    values = [int(value) for value in reference.split()]
    questions = []
    for place, right in zip(PLACES, values, strict=True):
        others = dict.fromkeys([*reversed(values), *(right + offset for offset in OFFSETS)])
        wrong = [number for number in others if number != right][:NUM_WRONG]
        questions += [Question(place.format(number), number == right) for number in (right, *wrong)]
    return questions


def grade_of(yes_Q: Tensor, questions: Sequence[Question]) -> float:
    """Return the grade of a leaf from the judge's probabilities of a yes."""
    is_right_Q = torch.tensor([question.is_right for question in questions])
    return float(yes_Q[is_right_Q].mean() - yes_Q[~is_right_Q].mean())


class Judge:
    """A causal LM on the CPU with its tokenizer, read from a Hugging Face model folder. One thread may use it."""

    def __init__(self, folder: str | Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.labels = [self.tokens(label)[0] for label in LABELS]

    def tokens(self, text: str, *, is_start: bool = False) -> list[int]:
        """Return the ids of a text, behind others unless it is the start."""
        return self._tokenizer.encode(text, add_special_tokens=is_start)

    def grade(self, texts: Sequence[str], *, reference: str) -> list[float]:
        """Return the grades of some leaves, whose texts share what is computed once, in the order given."""
        questions = ask(reference)
        asked = [self.tokens(question.text) for question in questions]
        contexts = [(self.tokens(text, is_start=True), asked) for text in texts]
        found = score_batch(self._model, contexts, labels=self.labels, capacity=CAPACITY)
        return [grade_of(torch.stack(each.log_probs).softmax(-1)[:, 0], questions) for each in found]


# In the one thread, so a worker loads a judge once.
load_judge = functools.cache(Judge)


class JudgedSearch(TreeSearchAgentLoop):
    """`tree_search` whose leaves are graded by a judge model when the search is complete.

    `judge` is the judge's model folder. None: what `prepare.py` made.
    """

    def __init__(self, *args: Any, judge: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.judge = Path(self.config.recipe.folder, "judge") if judge is None else Path(judge)
        if not (self.judge / "config.json").exists():
            raise ValueError(
                f"judge={judge}: {self.judge} has no config.json; name a Hugging Face model folder in loops.yaml. "
                "prepare.py makes a judge for the small model only, not for a MODEL of yours"
            )

    @override
    async def leaf_reward(self, *, row: dict[str, Any], answer: str) -> None:
        """Leave the reward to `reward_leaves`."""

    @override
    async def reward_leaves(self, leaves: Sequence[Branch], *, row: dict[str, Any]) -> Sequence[float]:
        texts = [self.tokenizer.decode(leaf.token_ids) for leaf in leaves]
        grade = functools.partial(self._grade, texts, reference=row["reward_model"]["ground_truth"])
        return await asyncio.get_running_loop().run_in_executor(_THREAD, grade)

    def _grade(self, texts: Sequence[str], *, reference: str) -> list[float]:
        return load_judge(self.judge).grade(texts, reference=reference)
