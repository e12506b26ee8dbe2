"""What the recipes share: tasks and verifier, real tools, tokenizer and template, solver, warm start, preparation."""

import asyncio
import itertools
import json
import random
from pathlib import Path

import pytest
from recipe_cases import TASK, TINY, check_given_model, check_prepared, task_tools
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.tool_registry import initialize_tools_from_config
from verl.utils.tokenizer import hf_tokenizer, normalize_token_ids

from recipes.demo.leaves import Renderer
from recipes.demo.prepare import build_once
from recipes.demo.settings import Settings
from recipes.demo.solver import MIXED, SKILLED, Habits, Solver, Turn, trace_leaves
from recipes.demo.sums import prepare
from recipes.demo.tasks import make_memory, make_tasks, score_answer, score_conclusion
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.tools import Calculator, LookupMemory, calculate, read_memory
from recipes.demo.warm_start import flat_loss, make_model, tree_loss

WRONG = Habits(plan=0.0, conclude=0.0, go_on=0.0, answer=0.0)

Tools = tuple[Calculator, LookupMemory]


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return task_tools(tmp_path)


def solve(tools: Tools, habits: Habits, *, seed: int = 0) -> list[Turn]:
    calculator, lookup = tools
    return Solver(calculator=calculator, lookup=lookup, habits=habits, rng=random.Random(seed)).solve(TASK)


# Tasks and verifier


def test_memory_holds_every_number_once() -> None:
    memory = make_memory(seed=3)
    assert sorted(memory) == [f"k{number}" for number in range(10, 100)]
    assert sorted(memory.values()) == list(range(10, 100))
    assert memory != make_memory(seed=4)


def test_tasks_have_one_stored_operand_and_true_answers() -> None:
    memory = make_memory(seed=3)
    tasks = make_tasks(200, memory=memory, seed=7)
    assert tasks == make_tasks(200, memory=memory, seed=7)
    assert tasks != make_tasks(200, memory=memory, seed=10_007)
    positions = []
    for task in tasks:
        assert [part.key is None for part in task.parts].count(True) == 1
        for position, part in enumerate(task.parts):
            assert str(calculate(part.expression)) == part.answer
            if part.key is not None:
                positions.append(position)
                assert part.shown.replace(part.key, str(memory[part.key])) == part.expression
    assert {0, 1} == set(positions)


def test_seeds_of_the_splits_share_no_entry() -> None:
    settings = Settings()
    warm = settings.warm_start
    assert warm is not None
    num_steps = warm.num_skilled_steps + warm.num_mixed_steps
    spans = [
        (settings.train_seed, 2 * settings.num_train_tasks),
        (settings.validation_seed, 2 * settings.num_validation_tasks),
        (settings.warm_start_seed, 2 * warm.num_sessions * num_steps),
    ]
    for (first, length), (second, _) in itertools.pairwise(spans):
        assert first + length <= second


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<answer>107 36</answer>", 1.0),
        ("so <answer>1 2</answer> no, <answer>107, 36</answer>", 1.0),
        ("<answer>36 107</answer>", 0.0),
        ("<answer>107</answer>", 0.0),
        ("<answer>107 36 36</answer>", 0.0),
        ("<answer>107 360</answer>", 0.0),  # reasoning-gym alone gives a part of the reward here
        ("<answer></answer>", 0.0),
        ("107 36", 0.0),
    ],
)
def test_verifier(completion: str, reward: float) -> None:
    assert score_answer(completion, answer="107 36") == reward


@pytest.mark.parametrize(
    ("conclusion", "result", "reward"),
    [
        ("Partial result: 107", "84 + 23 = 107", 1.0),
        ("Partial result: -6", "17 - 23 = -6", 1.0),
        ("It is 107. Partial result: 107.", "84 + 23 = 107", 1.0),
        ("Partial result: 10", "84 + 23 = 107", 0.0),
        ("107", "84 + 23 = 107", 0.0),
        ("Partial result: error", "error: not an expression", 0.0),
    ],
)
def test_conclusions(conclusion: str, result: str, reward: float) -> None:
    assert score_conclusion(conclusion, result=result) == reward


# Tools


@pytest.mark.parametrize(
    ("expression", "value"), [("84 + 23", 107), ("-(3 - 5) * 4", 8), (" 7 ", 7), ("74 - -50", 124)]
)
def test_calculator(expression: str, value: int) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "k41 - 17", "2 ** 99", "__import__('os')", "1 +", "1.5", "True", "(1).real", "9" * 65, "9" * 13]
)
def test_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError, match=r"expression|only integers|too large"):
        calculate(expression)


def test_memory_is_read_from_the_file(tools: Tools) -> None:
    _, lookup = tools
    assert read_memory(Path(lookup.config["database"]), key="k41") == 53
    with pytest.raises(ValueError, match="nothing is stored"):
        read_memory(Path(lookup.config["database"]), key="k42")


def test_tools_answer_whatever_the_model_asks(tools: Tools) -> None:
    calculator, lookup = tools
    asked = [
        (calculator, {"expression": "84 + 23"}, "84 + 23 = 107"),
        (lookup, {"key": "k41"}, "k41 = 53"),
        (lookup, {"key": "84 + 23"}, "error: nothing is stored under this key"),
        (lookup, {"key": "'; DROP TABLE memory; --"}, "error: nothing is stored under this key"),
        (calculator, {"expression": "k41 - 17"}, "error: only integers with +, - and * are allowed"),
        (calculator, {"key": "k41"}, "error: expression must be given as a string"),
        (calculator, {"expression": 7}, "error: expression must be given as a string"),
    ]
    for tool, parameters, text in asked:
        response, reward, _ = asyncio.run(tool.execute("id", parameters))
        assert (response.text, reward) == (text, 0.0)


# Tokenizer and chat template


def test_tokenizer_survives_saving_and_verls_loading(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(TASK.messages, tokenize=False, add_generation_prompt=True)
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.unk_token_id not in token_ids
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), hf_tokenizer(str(tmp_path))):
        assert loaded.encode(text) == token_ids
        assert loaded.decode(token_ids) == text
        assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")
        assert normalize_token_ids(loaded.apply_chat_template(TASK.messages, add_generation_prompt=True)) == token_ids


def test_every_printable_character_round_trips() -> None:
    tokenizer = build_tokenizer()
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.unk_token_id not in token_ids
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]


def test_chat_template_renders_calls_and_results_as_qwen3_does() -> None:
    call = {"type": "function", "function": {"name": "lookup", "arguments": {"key": "k41"}}}
    messages = [
        {"role": "user", "content": "k41"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "k41 = 53"},
        {"role": "tool", "content": "k41 = 53"},
    ]
    written = '<tool_call>\n{"name": "lookup", "arguments": {"key": "k41"}}\n</tool_call>'
    answered = "<tool_response>\nk41 = 53\n</tool_response>"
    assert build_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\nk41<|im_end|>\n"
        f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n"
        f"<|im_start|>user\n{answered}\n{answered}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


# Solver


def test_right_session(tools: Tools) -> None:
    first, second, answer = solve(tools, SKILLED)
    assert first.results == ("84 + 23 = 107", "k41 = 53")
    assert first.conclusions == ("Partial result: 107", "Partial result: 53")
    assert second.results == ("53 - 17 = 36",)
    assert second.conclusions == ()  # a single call has no branch
    assert answer == Turn(text="<answer>107 36</answer>")


def test_wrong_habits_fail_in_many_ways(tools: Tools) -> None:
    sessions = [solve(tools, WRONG, seed=seed) for seed in range(60)]
    assert {len(turns[0].results) for turns in sessions} == {0, 1, 2}
    assert sum(score_answer(turns[-1].text, answer=TASK.answer) for turns in sessions) <= 2


def test_verls_parser_reads_the_solvers_calls(tools: Tools) -> None:
    tokenizer = build_tokenizer()
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    by_name = {tool.name: tool for tool in tools}
    for habits in (SKILLED, WRONG):
        for turn in solve(tools, habits, seed=1):
            token_ids = [*tokenizer.encode(turn.text), tokenizer.eos_token_id]
            _, calls = asyncio.run(parser.extract_tool_calls(token_ids))
            answers = tuple(by_name[call.name].answer(json.loads(call.arguments)) for call in calls)
            assert answers == turn.results


def test_leaves_are_what_the_chat_template_renders(tools: Tools) -> None:
    tokenizer = build_tokenizer()
    schemas = [tool.tool_schema for tool in tools]
    shown = [schema.model_dump(exclude_unset=True, exclude_none=True) for schema in schemas]
    turns = solve(tools, SKILLED)
    leaves = trace_leaves(TASK.messages, turns, Renderer(tokenizer, schemas))

    def rendered(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tools=shown, tokenize=False).removesuffix("\n")

    asked = [*TASK.messages, {"role": "assistant", "content": turns[0].text}]
    results = [{"role": "tool", "content": result} for result in turns[0].results]
    conclusions = [{"role": "assistant", "content": conclusion} for conclusion in turns[0].conclusions]
    final = [
        {"role": "assistant", "content": turns[1].text},
        {"role": "tool", "content": turns[1].results[0]},
        {"role": "assistant", "content": turns[2].text},
    ]
    expected = [
        rendered([*asked, results[0], conclusions[0]]),
        rendered([*asked, results[1], conclusions[1]]),
        rendered([*asked, *results, *final]),
    ]
    assert [tokenizer.decode(leaf.token_ids) for leaf in leaves] == expected
    assert [tokenizer.encode(text) for text in expected] == [leaf.token_ids for leaf in leaves]
    # Trained: what the model writes with its end of turn; the shared first turn in the main leaf only.
    trained = [
        "".join(tokenizer.decode([token]) for token, keep in zip(leaf.token_ids, leaf.trained, strict=True) if keep)
        for leaf in leaves
    ]
    end = "<|im_end|>"
    assert trained == [
        turns[0].conclusions[0] + end,
        turns[0].conclusions[1] + end,
        end.join(turn.text for turn in turns) + end,
    ]
    assert max(len(leaf.token_ids) for leaf in leaves) < 160


# Warm start


def test_a_demonstration_is_the_main_leaf_and_a_quarter_of_the_branches(tools: Tools) -> None:
    calculator, lookup = tools
    renderer = Renderer(build_tokenizer(), [tool.tool_schema for tool in tools])
    solver = Solver(calculator=calculator, lookup=lookup, habits=SKILLED)
    shown = [solver.demonstrate(TASK, renderer) for _ in range(200)]
    *_, main = trace_leaves(TASK.messages, solver.solve(TASK), renderer)
    assert all(first == main for first, *_ in shown)
    assert 65 <= sum(len(leaves) - 1 for leaves in shown) <= 135  # 100 of 400, plus or minus four standard deviations


def test_loss_on_trees_is_the_loss_on_rows(tools: Tools) -> None:
    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, [tool.tool_schema for tool in tools])
    leaves = [
        leaf for seed in range(4) for leaf in trace_leaves(TASK.messages, solve(tools, MIXED, seed=seed), renderer)
    ]
    model = make_model(tokenizer, settings=TINY, seed=1).double()
    gradients = []
    for compute_loss in (flat_loss, tree_loss):
        model.zero_grad()
        loss = compute_loss(model, leaves)
        loss.backward()
        gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
    # The norms of the layers round to float32.
    for flat, tree in zip(*gradients, strict=True):
        assert (tree - flat).norm() < 1e-6 * flat.norm()


# Preparation


def test_prepared_folder_is_complete_and_reused(tmp_path: Path) -> None:
    settings = Settings()
    memory = make_memory(seed=settings.seed)
    first, *_ = make_tasks(8, memory=memory, seed=settings.train_seed)
    folder, rows = check_prepared(prepare, tmp_path, settings=settings, first=first)
    assert list(rows.prompt[0]) == first.messages
    tools = initialize_tools_from_config(folder / "tools.yaml")
    assert [tool.name for tool in tools] == ["calculator", "lookup"]
    assert tools[1].answer({"key": "k41"}) == f"k41 = {memory['k41']}"

    own = check_given_model(prepare, tmp_path, model=folder / "model", settings=settings)
    assert own != folder
    assert hf_tokenizer(str(own / "model")).encode("84 + 23") == build_tokenizer().encode("84 + 23")


def test_two_preparations_at_once_make_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "key"

    def build(building: Path, final_folder: Path) -> None:
        for path, content in ((building, "mine"), (final_folder, "theirs")):  # the other process is a little faster
            path.mkdir(exist_ok=True)
            (path / "rows").write_text(content)

    assert build_once(folder, build=build) == folder
    assert (folder / "rows").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [folder]
