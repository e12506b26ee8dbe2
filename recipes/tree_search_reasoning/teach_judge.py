"""Make the small judge: a Qwen3 from random weights, taught on a scripted solver's sessions with the real tools.

The solver has mixed habits, so most of its answers are wrong, and a tenth of its sessions are cut before their answer.
The judge is asked what an answer says, not what would be right: the questions of a run have the reference in them. In
its tokenizer both values of an answer are one token each, with the markup beside them. So a question is decided by one
token: the small model need not spell numbers.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipes.demo.leaves import Leaf, Renderer
from recipes.demo.prepare import say
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, Solver, trace_leaves
from recipes.demo.tasks import Task, make_memory, make_tasks
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.tools import make_tools
from recipes.demo.warm_start import save_taught_model
from recipes.tree_search_reasoning.judge import LABELS, OFFSETS, PLACES
from verl_tree.functional import tree_log_probs

CUT_FRACTION = 0.1
"""Share of the sessions that end before their answer."""
NUM_WRONG = 4
"""Wrong numbers that are asked for at each place of an answer, as few as lets a batch have many sessions."""
_VALUES = range(-89, 199)
_PHRASES = ("\nDoes it say", *LABELS, *(text for v in _VALUES for text in (f"<answer>{v}", f" {v}</answer>")))


def build_judge_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo's tokenizer with questions, labels and the values of an answer as one token each."""
    return build_tokenizer(_PHRASES)


def teach_judge(folder: Path, *, memory: Path, settings: Settings) -> None:
    """Make the judge as a model folder; its sessions look up what the SQLite file `memory` holds."""
    warm = settings.warm_start
    assert warm is not None
    say("a small judge of the leaves")
    calculator, lookup = make_tools(memory)
    tokenizer = build_judge_tokenizer()
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])

    def make_batch(step: int, _: bool) -> list[Leaf]:
        rng = random.Random(step)
        solver = Solver(calculator=calculator, lookup=lookup, habits=MIXED, rng=rng)
        seed = settings.warm_start_seed + 2 * warm.num_sessions * step
        tasks = make_tasks(warm.num_sessions, memory=make_memory(seed=settings.seed), seed=seed)
        return [leaf for task in tasks for leaf in lessons(task, solver, renderer, tokenizer)]

    save_taught_model(folder, tokenizer, settings=settings, make_batch=make_batch, compute_loss=label_loss)


def lessons(task: Task, solver: Solver, renderer: Renderer, tokenizer: PreTrainedTokenizerFast) -> list[Leaf]:
    """Return questions about a session of `solver`, each a leaf that ends with its label; only that is learnt.

    A yes is there as often as the wrong numbers of its place: it is computed once and counts as much as they do.
    """
    turns = solver.solve(task)
    stated = turns[-1].text.removeprefix("<answer>").removesuffix("</answer>").split()
    if solver.rng.random() < CUT_FRACTION:
        turns, stated = turns[:-1], []
    context = trace_leaves(task.messages, turns, renderer)[-1]

    def lesson(place: int, number: str, label: str) -> Leaf:
        text = PLACES[place].format(number) + label
        token_ids = context.token_ids + tokenizer.encode(text, add_special_tokens=False)
        return Leaf(token_ids, [0] * (len(token_ids) - 1) + [1])

    leaves = []
    for place, right in enumerate(task.answer.split()):
        near = int(stated[place]) if stated else int(right)
        others = [*reversed(stated), right, *(str(near + each) for each in solver.rng.sample(OFFSETS, NUM_WRONG))]
        wrong = [number for number in dict.fromkeys(others) if number not in stated[place : place + 1]][:NUM_WRONG]
        leaves += [lesson(place, number, LABELS[1]) for number in wrong]
        leaves += [lesson(place, number, LABELS[0]) for number in stated[place : place + 1]] * NUM_WRONG
    return leaves


def label_loss(model: Qwen3ForCausalLM, leaves: Sequence[Leaf]) -> torch.Tensor:
    """Return the mean cross-entropy of the labels."""
    out = tree_log_probs(model, [leaf.token_ids for leaf in leaves])
    return -torch.stack([log_probs[-1] for log_probs in out.log_probs]).mean()
