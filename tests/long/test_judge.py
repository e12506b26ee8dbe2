"""The judge of tree_search_reasoning learns what it is for."""

from dataclasses import replace
from pathlib import Path

import torch

from recipes.demo.leaves import Renderer
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, Solver, trace_leaves
from recipes.demo.tasks import make_memory, make_tasks, score_answer
from recipes.demo.tools import make_tools, write_memory
from recipes.tree_search_reasoning.judge import Judge
from recipes.tree_search_reasoning.prepare import JUDGE
from recipes.tree_search_reasoning.teach_judge import build_judge_tokenizer, teach_judge


def test_the_judge_learns_to_tell_right_answers_from_wrong_ones(tmp_path: Path) -> None:
    """Taught as briefly as a test may take, it grades sessions that it has not seen."""
    settings = Settings(warm_start=replace(JUDGE, num_skilled_steps=160))
    memory = make_memory(seed=settings.seed)
    write_memory(tmp_path / "memory.sqlite", memory=memory)
    teach_judge(tmp_path / "judge", memory=tmp_path / "memory.sqlite", settings=settings)

    judge, tokenizer = Judge(tmp_path / "judge"), build_judge_tokenizer()
    calculator, lookup = make_tools(tmp_path / "memory.sqlite")
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])
    solver = Solver(calculator=calculator, lookup=lookup, habits=MIXED)
    grades: dict[float, list[float]] = {0.0: [], 1.0: []}
    for task in make_tasks(60, memory=memory, seed=settings.validation_seed):
        turns = solver.solve(task)
        text = tokenizer.decode(trace_leaves(task.messages, turns, renderer)[-1].token_ids)
        grades[score_answer(turns[-1].text, answer=task.answer)] += judge.grade([text], reference=task.answer)
    wrong, right_ones = (torch.tensor(grades[verdict]) for verdict in (0.0, 1.0))
    assert min(len(wrong), len(right_ones)) > 10
    assert (right_ones[:, None] > wrong).float().mean() > 0.95
    assert right_ones.mean() > wrong.mean() + 0.5
