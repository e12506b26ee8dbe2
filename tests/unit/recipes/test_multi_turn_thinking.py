"""The recipe multi_turn_thinking: the template drops thinking, a session of the loop is a caterpillar."""

import functools
import random
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import scripted_llm
from recipe_cases import ANSWER, TASK, check_given_model, check_prepared, task_tools
from scripted_llm import ScriptedClient, log_prob, run_loop
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, ToolListWrap

from recipes.demo.leaves import Renderer
from recipes.demo.solver import MIXED, SKILLED
from recipes.demo.tasks import make_memory, make_tasks
from recipes.demo.tokenizer import build_tokenizer
from recipes.demo.tools import make_tools, write_memory
from recipes.multi_turn_thinking.loop import RenderedToolsLoop
from recipes.multi_turn_thinking.prepare import SETTINGS, prepare
from recipes.multi_turn_thinking.reward import compute_score
from recipes.multi_turn_thinking.solver import SYSTEM_PROMPT, ThinkingSolver, build_thinking_tokenizer, trace_leaves
from recipes.multi_turn_thinking.template import drop_thinking
from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.loops.blackbox import BlackboxAgentLoop
from verl_tree.tree import TokenForest

pytestmark = pytest.mark.timeout(60)

LIMITS = {"prompt_length": 64, "response_length": 224}
END = "<|im_end|>"
GO = "<|im_start|>assistant\n"
CALLS = (
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "84 + 23"}}\n</tool_call>',
    '<tool_call>\n{"name": "lookup", "arguments": {"key": "k41"}}\n</tool_call>',
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "53 - 17"}}\n</tool_call>',
)
RESULTS = ("84 + 23 = 107", "k41 = 53", "53 - 17 = 36")
THOUGHTS = tuple(
    f"<think>\n{thought}.\n</think>\n\n"
    for thought in ("Next: 84 + 23", "Next: k41", "Next: 53 - 17", "Known: 107, 36")
)
TURNS = tuple(thought + act for thought, act in zip(THOUGHTS, (*CALLS, ANSWER), strict=True))
PROMPT = f"<|im_start|>system\n{SYSTEM_PROMPT}\ncalculator\nlookup{END}\n<|im_start|>user\n84 + 23; k41 - 17{END}\n{GO}"


def answered(call: str, result: str) -> str:
    """Return a call in the history, without its thinking, and the result, up to the next turn."""
    return f"{call}{END}\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response>{END}\n{GO}"


TRUNK = [answered(call, result) for call, result in zip(CALLS, RESULTS, strict=True)]
# What the model reads before each turn, and the leaf that ends with that turn.
CONTEXTS = [PROMPT, PROMPT + TRUNK[0], PROMPT + TRUNK[0] + TRUNK[1], PROMPT + "".join(TRUNK)]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build_thinking_tokenizer()


@pytest.fixture
def tools(tmp_path: Path) -> list:
    return list(task_tools(tmp_path))


def schemas(tools: list) -> list:
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def run_session(
    monkeypatch: pytest.MonkeyPatch, tools: list, turns: list[str], *, loop=RenderedToolsLoop, **rollout: object
) -> SimpleNamespace:
    """Run a loop on a model that writes `turns`, with the recipe's tokenizer and tools, and make the rows."""
    monkeypatch.setattr(scripted_llm, "tokenizer", tokenizer)
    replies = iter(turns)
    client = RecordingClient(ScriptedClient(lambda _: next(replies)), tree=SessionTree(decode=tokenizer().decode))

    def make(**kwargs: object) -> AgentLoopBase:
        return loop(**{**kwargs, "tools": ToolListWrap(tools)})

    row = {"raw_prompt": TASK.chat(SYSTEM_PROMPT), "uid": "u", "session_id": 0, "schemas": schemas(tools)}
    output = run_loop(make, client, {"logprobs": True}, row=row, **{**LIMITS, **rollout})
    outputs = output if isinstance(output, list) else [output]
    rows = session_rows(client.tree, outputs, limits=RowLimits(**{**LIMITS, **rollout}, wants_log_probs=True))
    return SimpleNamespace(rows=rows.outputs, client=client, num_dropped=rows.num_dropped)


def text(token_ids: list[int]) -> str:
    return tokenizer().decode(token_ids)


def trained(row: object) -> str:
    return text([token for token, mask in zip(row.response_ids, row.response_mask, strict=True) if mask])


# Template


def test_template_drops_the_thinking_of_earlier_turns_only() -> None:
    messages = [
        {"role": "user", "content": "a</think>b"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nfirst"},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>\ny\n</think>\n\nthird"},
    ]
    render = functools.partial(tokenizer().apply_chat_template, tokenize=False)
    history = (
        f"<|im_start|>user\na</think>b{END}\n{GO}first{END}\n<|im_start|>user\n<tool_response>\nr\n</tool_response>{END}\n"
        f"{GO}second{END}\n<|im_start|>user\nc{END}\n"
    )
    assert render(messages) == f"{history}{GO}<think>\ny\n</think>\n\nthird{END}\n"
    assert render(messages[:-1], add_generation_prompt=True) == history + GO
    after = [*messages, {"role": "user", "content": "d"}]
    assert render(after) == f"{history}{GO}third{END}\n<|im_start|>user\nd{END}\n"


def test_the_rule_goes_before_any_template() -> None:
    """One like Qwen3's, which keeps the thinking behind the last question, is given messages without it."""
    own = "{% for m in messages %}[{{ m.role }}:{{ m.content }}{{ m.tool_calls }}]{% endfor %}"
    chat = [
        {"role": "assistant", "content": "<think>x</think>\n\nt", "tool_calls": "+"},
        {"role": "tool", "content": "r"},
    ]
    render = functools.partial(tokenizer().apply_chat_template, tokenize=False)
    assert render(chat, chat_template=own) == "[assistant:<think>x</think>\n\nt+][tool:r]"
    assert render(chat, chat_template=drop_thinking(own)) == "[assistant:t+][tool:r]"


def test_phrases_are_tokens_and_text_survives() -> None:
    for sample in (SYSTEM_PROMPT, *TURNS):
        token_ids = tokenizer().encode(sample)
        assert text(token_ids) == sample
        assert tokenizer().unk_token_id not in token_ids
    assert len(tokenizer().encode(SYSTEM_PROMPT)) == 1
    assert len(tokenizer().encode("<think>\nNext: ")) == 3


# Loop


def test_a_session_is_a_caterpillar(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    session = run_session(monkeypatch, tools, list(TURNS))
    assert session.client._client.prompts == CONTEXTS
    assert [call.kind for call in session.client.tree.calls] == [CallKind.ROOT, *[CallKind.REWRITE] * 3]
    assert session.num_dropped == 0

    leaves = [text(row.prompt_ids + row.response_ids) for row in session.rows]
    assert leaves == [context + turn + END for context, turn in zip(CONTEXTS, TURNS, strict=True)]
    # Every turn is trained once, thinking included, on its own leaf; its copy in the trunk is text.
    assert [trained(row) for row in session.rows] == [turn + END for turn in TURNS]
    for row in session.rows:
        num_read = len(row.prompt_ids)
        for position, (token, mask) in enumerate(zip(row.response_ids, row.response_mask, strict=True), start=num_read):
            expected = log_prob(position, token) if mask else 0.0
            assert row.response_logprobs[position - num_read] == pytest.approx(expected)


async def chat_agent(*, base_url: str, api_key: str, model: str, row: dict) -> float:
    """Be any agent that keeps its chat as messages."""
    messages, results = list(row["raw_prompt"]), iter(RESULTS)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        while True:
            answer = await client.chat.completions.create(model=model, messages=messages, tools=row["schemas"])
            turn = answer.choices[0].message
            if not turn.tool_calls:
                return 1.0
            (call,) = turn.tool_calls
            messages.append(turn.model_dump(exclude_none=True))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": next(results)})


def test_an_agent_behind_the_gateway_gives_the_same_tree(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    blackbox = functools.partial(BlackboxAgentLoop, agent=f"{__name__}:chat_agent")
    session = run_session(monkeypatch, tools, list(TURNS), loop=blackbox)
    leaves = [text(row.prompt_ids + row.response_ids) for row in session.rows]
    assert leaves == [context + turn + END for context, turn in zip(CONTEXTS, TURNS, strict=True)]
    assert [trained(row) for row in session.rows] == [turn + END for turn in TURNS]


def test_tokens_of_a_session(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    """Counted by hand: the prompt has 26 tokens, then the pieces of the trunk, and each leaf its turn."""
    session = run_session(monkeypatch, tools, list(TURNS))
    rows = [row.prompt_ids + row.response_ids for row in session.rows]
    forest = TokenForest.from_sequences(rows)
    trunk, turns = (33, 30, 32), (24, 22, 24, 19)
    assert [len(row) for row in rows] == [26 + 24, 26 + 33 + 22, 26 + 33 + 30 + 24, 26 + 33 + 30 + 32 + 19]
    assert [sum(row.response_mask) for row in session.rows] == list(turns)
    assert (forest.num_leaves, forest.num_nodes) == (4, 8 - 1)
    assert (forest.num_tokens, forest.num_flat_tokens) == (26 + sum(trunk) + sum(turns), 384)
    assert forest.num_tokens == 210


def test_a_turn_without_thinking_goes_on_from_the_sampled_tokens(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    session = run_session(monkeypatch, tools, [CALLS[0], TURNS[1], CALLS[2], ANSWER])
    kinds = [CallKind.ROOT, CallKind.CONTINUATION, CallKind.REWRITE, CallKind.CONTINUATION]
    assert [call.kind for call in session.client.tree.calls] == kinds
    first, last = session.rows
    assert trained(first) == CALLS[0] + END + TURNS[1] + END
    assert text(last.prompt_ids + last.response_ids) == CONTEXTS[3] + ANSWER + END
    # The first call is shared with the other leaf, and sampled at that very place: trained on both, as in any tree.
    assert trained(last) == CALLS[0] + END + CALLS[2] + END + ANSWER + END


def test_history_holds_the_models_own_words(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    """A call that no template would write like that, with a token that no tokenizer would choose."""
    odd = '<tool_call>{"arguments":{"expression":"84+23"},  "name":"calculator"}</tool_call>'
    session = run_session(monkeypatch, tools, [THOUGHTS[0] + odd, ANSWER])
    assert session.client._client.prompts[1] == PROMPT + answered(odd, "84+23 = 107")


def test_session_ends_where_the_next_result_does_not_fit(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    first = len(tokenizer().encode(TURNS[0] + END))
    session = run_session(monkeypatch, tools, list(TURNS), response_length=first + 1)
    assert [trained(row) for row in session.rows] == [TURNS[0] + END]


def test_prompts_that_change_before_the_first_turn(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    """As with Qwen3's template without thinking, whose generation prompt holds an empty thought that history lacks."""
    template = tokenizer().chat_template
    empty = '{%- if add_generation_prompt -%}{{ "<think>\\n\\n</think>\\n\\n" }}{%- endif -%}'
    monkeypatch.setattr(tokenizer(), "chat_template", template + empty)
    session = run_session(monkeypatch, tools, [CALLS[0], ANSWER])
    no_thought = "<think>\n\n</think>\n\n"
    leaves = [text(row.prompt_ids + row.response_ids) for row in session.rows]
    assert leaves == [PROMPT + no_thought + CALLS[0] + END, PROMPT + TRUNK[0] + no_thought + ANSWER + END]
    assert [trained(row) for row in session.rows] == [CALLS[0] + END, ANSWER + END]


# Solver, warm start, reward


def test_solver_thinks_and_calls_one_tool_after_the_other(tools: list) -> None:
    calculator, lookup = tools
    turns = ThinkingSolver(calculator=calculator, lookup=lookup, habits=SKILLED).solve(TASK)
    assert tuple(turn.text for turn in turns) == TURNS
    assert [turn.results for turn in turns] == [*((result,) for result in RESULTS), ()]


def test_mixed_habits_succeed_now_and_then(tmp_path: Path) -> None:
    memory = make_memory(seed=1)
    write_memory(tmp_path / "memory.sqlite", memory=memory)
    calculator, lookup = make_tools(tmp_path / "memory.sqlite")
    solver = ThinkingSolver(calculator=calculator, lookup=lookup, habits=MIXED, rng=random.Random(0))
    tasks = make_tasks(200, memory=memory, seed=1)
    sessions = [solver.solve(task) for task in tasks]
    rewards = [
        compute_score(solution_str=turns[-1].text, ground_truth=task.answer)
        for task, turns in zip(tasks, sessions, strict=True)
    ]
    assert 0.1 < sum(rewards) / len(rewards) < 0.5
    assert {len(turns) for turns in sessions} == {1, 2, 3, 4}


def test_solvers_leaves_are_what_the_loop_gives(monkeypatch: pytest.MonkeyPatch, tools: list) -> None:
    calculator, lookup = tools
    turns = ThinkingSolver(calculator=calculator, lookup=lookup, habits=SKILLED).solve(TASK)
    leaves = trace_leaves(TASK, turns, Renderer(tokenizer(), [tool.tool_schema for tool in tools]))
    session = run_session(monkeypatch, tools, [turn.text for turn in turns])
    assert [leaf.token_ids for leaf in leaves] == [row.prompt_ids + row.response_ids for row in session.rows]
    assert [leaf.trained for leaf in leaves] == [[0] * len(row.prompt_ids) + row.response_mask for row in session.rows]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (TURNS[3], 1.0),
        ("".join(TRUNK) + TURNS[3], 1.0),
        ("<answer>36 107</answer>", 0.0),
        ("<think>\n<answer>107 36</answer>\n</think>\n\nSo.", 0.0),
        ("", 0.0),
    ],
)
def test_reward(response: str, reward: float) -> None:
    row = {"data_source": "arithmetic_tools", "ground_truth": "107 36", "extra_info": {}}
    assert compute_score(solution_str=response, **row) == reward


# Preparation


def test_prepared_folder_is_complete_and_reused(tmp_path: Path) -> None:
    first, *_ = make_tasks(8, memory=make_memory(seed=SETTINGS.seed), seed=SETTINGS.train_seed)
    folder, rows = check_prepared(prepare, tmp_path, settings=SETTINGS, first=first)
    assert list(rows.prompt[0]) == first.chat(SYSTEM_PROMPT)
    saved = AutoTokenizer.from_pretrained(folder / "model")
    assert saved.chat_template == tokenizer().chat_template
    assert saved.encode(TURNS[0]) == tokenizer().encode(TURNS[0])


def test_a_model_of_your_own_is_linked_with_another_template(tmp_path: Path) -> None:
    model = tmp_path / "mine"
    saved = build_tokenizer()
    saved.chat_template = "{{ messages }}"
    saved.save_pretrained(model)
    (model / "config.json").write_text("{}")
    folder = check_given_model(prepare, tmp_path, model=model, settings=SETTINGS) / "model"
    assert AutoTokenizer.from_pretrained(folder).chat_template == drop_thinking("{{ messages }}")
    assert AutoTokenizer.from_pretrained(model).chat_template == "{{ messages }}"
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat template"):
        check_given_model(prepare, tmp_path / "none", model=model, settings=SETTINGS)
