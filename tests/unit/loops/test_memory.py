"""`memory`: what each context holds, what is trained on each leaf, and the store behind the notes."""

import asyncio
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import ASSISTANT, advantages, call, prompt, response, rewards, run, slow_tool, trained, user
from scripted_llm import END, encode
from scripted_llm import row as dataset_row
from typing_extensions import override

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.memory_store import MemoryStore, Note

ROW = dataset_row(raw_prompt=[{"role": "system", "content": "S"}, {"role": "user", "content": "alpha + beta?"}])
SHARED = (
    f"<|im_start|>system\ndouble broken memory_write memory_search {END}\n"
    f"<|im_start|>system\nS{END}\n<|im_start|>user\nalpha + beta?{END}\n"
)
FIRST, SECOND = call("memory_write", text="alpha is 7"), call("memory_write", text="beta is 8")


class Rewarded(MemoryAgentLoop):
    """A quarter for a turn that keeps a note, one for the right answer."""

    @override
    async def turn_reward(self, *, row, turn, number):
        assert turn.calls[0].name == "memory_write"
        return 0.25 * number

    @override
    async def final_reward(self, *, row, answer):
        return float(answer == "15")


def reply(text):
    """Turn 1 notes alpha, turn 2 notes beta, turn 3 answers."""
    if "2. beta is 8" in text:
        return "15"
    return SECOND if "1. alpha is 7" in text else FIRST


def test_the_tree_its_masks_rewards_and_advantages():
    """Two notes, then the answer.

    shared prompt ──┬── g ── write alpha                                      leaf 1, reward .25
                    └── Notes: 1. alpha is 7 ──┬── turn 1, result ── g ── write beta     leaf 2, .5
                                               └── 2. beta is 8, turn 2, result ── g ── 15     leaf 3, 1
    """
    outputs, client = run(Rewarded, reply, row=ROW)
    assert [prompt(output) for output in outputs] == [
        SHARED + ASSISTANT,
        SHARED + user("Notes:\n1. alpha is 7") + ASSISTANT + FIRST + f"{END}\n" + user("[Kept as note 1.]") + ASSISTANT,
        SHARED
        + user("Notes:\n1. alpha is 7\n2. beta is 8")
        + f"{ASSISTANT}{SECOND}{END}\n"
        + user("[Kept as note 2.]")
        + ASSISTANT,
    ]
    assert [trained(output) for output in outputs] == [[FIRST + END], [SECOND + END], ["15" + END]]
    assert all(set(output.response_mask) == {1} for output in outputs)
    assert rewards(outputs) == [0.25, 0.5, 1.0]
    # Weights 1/3: mean 7/12, deviations -4/12, -1/12, 5/12; variance (1/3)(42/144) / (2/3) = 21/144.
    expected = np.array([-4, -1, 5]) / np.sqrt(21)
    np.testing.assert_allclose(advantages(outputs), expected, rtol=1e-12)
    num_shared = [recorded.num_shared for recorded in client.tree.calls]
    # The second prompt parts from the first behind "<|im_start|>", the third from the second behind "alpha is 7".
    assert num_shared == [0, len(encode(SHARED)) + 1, len(encode(SHARED + user("Notes:\n1. alpha is 7"))) - 2]


def test_input_of_the_environment_keeps_a_session_going_and_is_read_by_its_turn_only():
    class Reader(Rewarded):
        @override
        async def turn_input(self, *, row, number):
            return f"chunk {number}" if number <= 2 else None

        @override
        async def turn_reward(self, *, row, turn, number):
            return 0.0

    outputs, _ = run(Reader, lambda _: "seen", row=ROW)
    assert [prompt(output) for output in outputs] == [
        SHARED + user("chunk 1") + ASSISTANT,
        SHARED + ASSISTANT + f"seen{END}\n" + user("chunk 2") + ASSISTANT,
    ]
    assert [response(output) for output in outputs] == ["seen" + END] * 2


def test_turns_without_a_reward_of_their_own_leave_it_to_the_final_leaf():
    outputs, _ = run(MemoryAgentLoop, reply, row=ROW)
    assert rewards(outputs) == [None] * 3


def test_search_tool_and_the_tools_of_the_row():
    def searching(text):
        if "[1. beta is 2]" in text:
            return "done"
        if "Kept" in text:
            return call("memory_search", query='beta" OR (') + call("double", x=4)
        return call("memory_write", text="beta is 2")

    outputs, _ = run(MemoryAgentLoop, searching, row=ROW, options={"max_notes": 0})
    assert len(outputs) == 3
    assert user("[1. beta is 2]") + user("[8]") + ASSISTANT in prompt(outputs[2])
    assert "Notes:" not in prompt(outputs[2])


def test_notes_that_do_not_fit_are_left_out_least_useful_first():
    """Of the two notes the second has two words of the task, so it is the one that stays."""

    def writing(text):
        both = call("memory_write", text="gamma " + "x" * 40) + call("memory_write", text="alpha beta " + "y" * 40)
        return both if "[Kept" not in text else "done"

    whole, _ = run(MemoryAgentLoop, writing, row=ROW)
    length = len(whole[1].prompt_ids)
    shorter, _ = run(MemoryAgentLoop, writing, row=ROW, prompt_length=length - 1)
    shortest, _ = run(MemoryAgentLoop, writing, row=ROW, prompt_length=length - 60)

    def shown(outputs):
        return [f"\n{number}. " in prompt(outputs[1]) for number in (1, 2)]

    assert (shown(whole), shown(shorter), shown(shortest)) == ([True, True], [False, True], [False, False])
    assert "[Kept as note 1.]" in prompt(shortest[1])
    assert "Notes:" not in prompt(shortest[1])


def test_a_context_beyond_prompt_length_uses_up_the_response_and_may_leave_no_room():
    def writing(text):
        return call("memory_write", text="y" * 60) if "[Kept" not in text else "done"

    limits = {"prompt_length": len(encode(SHARED + ASSISTANT)), "response_length": 400}
    outputs, _ = run(MemoryAgentLoop, writing, row=ROW, options={"max_notes": 0}, **limits)
    assert len(outputs[1].prompt_ids) == limits["prompt_length"]
    assert trained(outputs[1]) == ["done" + END]
    assert outputs[1].response_mask[0] == 0
    with pytest.raises(SessionFailed, match="left no room to generate"):
        run(Rewarded, writing, row=ROW, options={"max_notes": 0}, **{**limits, "response_length": 140})


def test_a_slow_tool_ends_the_branch_with_the_reason_and_rewarded_turns_stay():
    def slow(text):
        return call("slow", x=1) if "[Kept" in text else FIRST

    with pytest.raises(SessionFailed, match=r"tool 'slow' took longer than call_timeout_s=0\.5") as raised:
        run(Rewarded, slow, row=ROW, options={"call_timeout_s": 0.5}, more_tools=[slow_tool()])
    assert rewards(raised.value.outputs) == [0.25]


def test_tool_errors_are_told_or_end_the_branch():
    def broken(text):
        return "sorry" if "out of order" in text else call("broken", x=1)

    outputs, _ = run(MemoryAgentLoop, broken, row=ROW)
    assert response(outputs[-1]) == "sorry" + END
    with pytest.raises(SessionFailed, match="Error executing tool 'broken': out of order"):
        run(MemoryAgentLoop, broken, row=ROW, options={"tool_errors": "end"})
    # A wrong name is the model's own mistake, and told even then.
    outputs, _ = run(
        MemoryAgentLoop,
        lambda text: "ok" if "Unknown" in text else call("nope"),
        row=ROW,
        options={"tool_errors": "end"},
    )
    assert response(outputs[-1]) == "ok" + END


def test_length_of_a_turn():
    _, client = run(MemoryAgentLoop, lambda _: "abcdef", row=ROW, options={"max_turn_len": 3})
    assert client._client.sampling_params[0]["max_tokens"] == 3


def stored(*texts, embed=None):
    async def fill():
        store = MemoryStore(embed=embed)
        for text in texts:
            await store.write(text)
        return store

    return asyncio.run(fill())


def search(store, query, limit=10):
    return [note.number for note in asyncio.run(store.search(query, limit=limit))]


def test_search_ranks_by_words_and_older_notes_first_among_equals():
    store = stored("the cat sat", "a dog", "the cat and the dog", "a dog")
    assert search(store, "cat dog")[0] == 3
    assert search(store, "dog", limit=2) == [2, 4]
    assert search(store, "bird") == search(store, "") == search(store, '"*():^') == []
    assert asyncio.run(store.newest(limit=2)) == [Note(4, "a dog"), Note(3, "the cat and the dog")]
    with pytest.raises(ValueError, match="limit=0"):
        search(store, "dog", limit=0)


QUERIES = st.text(alphabet=st.one_of(st.sampled_from(list("\"'*():^-+{}ANDORNEAR \0é")), st.characters()))


@given(st.lists(QUERIES, max_size=4), QUERIES)
@settings(derandomize=True, deadline=None)
def test_no_text_or_query_is_an_error(texts, query):
    store = stored(*texts)
    assert len(store) == len(texts)
    assert set(search(store, query)) <= set(range(1, len(texts) + 1))


def test_lone_surrogates_of_a_models_json_are_replaced():
    store = stored("a\ud800 cat")
    assert asyncio.run(store.newest(limit=1)) == [Note(1, "a? cat")]
    assert search(store, "\udfffcat cat") == [1]


def test_embeddings_find_what_has_no_word_in_common():
    vectors = {"big cat": [1, 0], "stone": [0, 1], "tiger": [0.9, 0.1], "rock": [0.1, 2]}
    store = stored("big cat", "stone", embed=lambda texts: np.array([vectors[text] for text in texts]))
    assert search(store, "tiger", limit=1) == [1]
    assert search(store, "rock", limit=1) == [2]
    # First by words and second by cosine: 1/61 + 1/62; the other one 1/61 by cosine only.
    vectors["stone cold tiger"] = [1, 0.2]
    assert search(store, "stone cold tiger", limit=1) == [2]
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        stored("a", embed=lambda _: np.zeros(2))


async def test_concurrent_writes_are_numbered_in_the_order_of_the_calls():
    """The first embedding takes longest: without a queue it would be written last."""

    def embed(texts):
        time.sleep(0.02 if texts[0] == "0" else 0.0)
        return np.ones((1, 2))

    store = MemoryStore(embed=embed)
    notes = await asyncio.gather(*(store.write(str(number)) for number in range(5)))
    assert [(note.number, note.text) for note in notes] == [(i + 1, str(i)) for i in range(5)]


def test_leaves_have_roles_if_the_loop_is_told_to_name_them():
    (*others, last), _ = run(Rewarded, reply, row=ROW, options={"leaf_roles": True})
    assert others
    assert {output.extra_fields[ROLE] for output in others} == {"turn"}
    assert last.extra_fields[ROLE] == "answer"
    outputs, _ = run(Rewarded, reply, row=ROW)
    assert len(outputs) == 1 + len(others)
    assert all(ROLE not in output.extra_fields for output in outputs)
