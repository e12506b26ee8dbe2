"""Sessions of the scripted solver as stored trees: rewarded where they are right."""

from pathlib import Path

from recipe_cases import TASK, task_tools

from recipes.demo.leaves import Renderer
from recipes.demo.solved_trees import solve_tree
from recipes.demo.solver import MIXED, SKILLED, Solver
from recipes.demo.tokenizer import build_tokenizer


def test_sessions_of_a_task_are_one_tree_with_rewards(tmp_path: Path) -> None:
    calculator, lookup = task_tools(tmp_path)
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, [calculator.tool_schema, lookup.tool_schema])

    def leaves_of(habits: object, num_sessions: int) -> tuple:
        solver = Solver(calculator=calculator, lookup=lookup, habits=habits)  # type: ignore[arg-type]
        return solve_tree(TASK, uid="a", solver=solver, renderer=renderer, num_sessions=num_sessions).leaves

    skilled = leaves_of(SKILLED, 1)
    assert [leaf.reward for leaf in skilled] == [1.0, 1.0, 1.0]
    texts = [tokenizer.decode(leaf.token_ids[leaf.is_trained]) for leaf in skilled]
    assert "Partial result: 107" in texts[0]
    assert "Partial result: 53" in texts[1]
    assert "<answer>107 36</answer>" in texts[2]
    assert all(not leaf.is_trained[: leaf.prompt_len].any() for leaf in skilled)

    mixed = leaves_of(MIXED, 20)
    rewards = {leaf.session: leaf.reward for leaf in mixed}
    assert set(rewards.values()) == {0.0, 1.0}
    for leaf in mixed:
        assert leaf.reward == rewards[leaf.session], "a session has one reward"
    for session, reward in rewards.items():
        answer = tokenizer.decode([leaf for leaf in mixed if leaf.session == session][-1].token_ids)
        assert ("<answer>107 36</answer>" in answer) == (reward == 1.0)
