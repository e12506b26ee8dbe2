"""Healing of drift: by hand on a toy vocabulary, and on byte-level tokens; `test_fuzz` has long sessions."""

import random

import numpy as np
import pytest
from byte_tokens import WORDS, byte_level_tokenizer, encode, real_tokens, sampled
from tokenizers import pre_tokenizers
from typing_extensions import override
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.outputs import TreeAgentLoopOutput
from rollout_hooks.capture.realign import Realignment, Splice
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.report import CaptureReport
from rollout_hooks.capture.rows import RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree

# Letters, and tokens that read like several of them.
TEXT = {**{i: chr(ord("a") + i) for i in range(26)}, 100: "ab", 101: "bc", 102: "abc", 103: "cd", 104: "uv", 105: "de"}
A, B, C, D, E, T, U, V = 0, 1, 2, 3, 4, 19, 20, 21
AB, BC, ABC, CD, UV, DE = 100, 101, 102, 103, 104, 105
P = [10, 11, 12]


def decode(token_ids):
    return "".join(TEXT[token] for token in token_ids)


def recorded(*calls, **kwargs):
    tree = SessionTree(decode=decode, **kwargs)
    for prompt, output in calls:
        tree.complete(tree.begin(prompt), output, log_probs=[-1.0 - i for i in range(len(output))])
    return tree


@pytest.mark.parametrize(
    ("given", "healed", "splices"),
    [
        ([*P, AB, C, T], [*P, A, B, C, T], [(3, 4, 3, 5)]),
        ([*P, A, BC, T], [*P, A, B, C, T], [(4, 5, 4, 6)]),  # parts inside the output
        ([*P, ABC, T], [*P, A, B, C, T], [(3, 4, 3, 6)]),
        ([*P, AB], [*P, A, B], [(3, 4, 3, 5)]),  # ends inside the output
        ([*P, A, B, C, T], [*P, A, B, C, T], []),  # nothing to heal
        ([*P, AB, D, T], [*P, AB, D, T], []),  # another text behind it: the turn keeps the tokens given
        ([*P, A, BC, T, U], [*P, A, B, C, T, U], [(4, 5, 4, 6)]),
        ([*P, A, B, CD], [*P, A, B, CD], []),  # C and what follows it in one token: no common end
        ([15, 16], [15, 16], []),
    ],
)
def test_one_turn(given, healed, splices):
    realignment = recorded((P, [A, B, C])).realign(given)
    assert realignment.token_ids.tolist() == healed
    assert realignment.splices == tuple(splices)


def test_every_drifted_turn_of_a_prompt_heals_and_the_call_goes_on_from_sampled_tokens():
    tree = recorded((P, [A, B]), ([*P, A, B, T, T], [C, D, E]), ([*P, A, B, T, T, C, D, E, T], [A, B, C]))
    given = [*P, AB, T, T, CD, E, T, A, BC, U]
    realignment = tree.realign(given)
    assert realignment.token_ids.tolist() == [*P, A, B, T, T, C, D, E, T, A, B, C, U]
    assert realignment.splices == ((3, 4, 3, 5), (6, 7, 7, 9), (10, 11, 12, 14))
    call = tree.begin(realignment)
    tree.complete(call, [V], log_probs=[-9.0])
    assert (tree.calls[call].kind, tree.calls[call].num_splices) == (CallKind.CONTINUATION, 3)
    (leaf,) = tree.leaves()
    assert leaf.source.tolist() == [-1] * 3 + [0, 0, -1, -1, 1, 1, 1, -1, 2, 2, 2, -1, 3]
    report = CaptureReport.of_calls(tree)
    assert (report.num_realigned, report.num_drifts, report.num_continuations) == (1, 0, 3)


def test_without_healing_the_same_prompt_is_drift():
    tree = recorded((P, [A, B, C]), max_replaced=0)
    realignment = tree.realign([*P, AB, C, T])
    assert (realignment.token_ids.tolist(), realignment.splices) == ([*P, AB, C, T], ())
    call = tree.begin(realignment)
    assert tree.calls[call].kind is CallKind.DRIFT
    example = tree.drift_example
    assert (example.text, example.recorded_ids, example.given_ids) == ("klmabc", (A, B, C), (AB, C, T))
    assert not example.is_healed


def test_a_splice_is_bounded():
    assert recorded((P, [A, B, C]), max_replaced=2).realign([*P, ABC, T]).splices == ()
    assert recorded((P, [A, B, C]), max_replaced=3).realign([*P, ABC, T]).splices == ((3, 4, 3, 6),)
    assert recorded((P, [ABC]), max_replaced=2).realign([*P, A, B, C, T]).splices == ()
    assert recorded((P, [ABC]), max_replaced=3).realign([*P, A, B, C, T]).splices == ((3, 6, 3, 4),)


def test_environment_text_heals_only_on_the_way_to_generated_text():
    tree = recorded((P, [A, B]), ([*P, A, B, U, V], [C, D]))
    assert tree.realign([*P, A, B, UV, C, D, T]).token_ids.tolist() == [*P, A, B, U, V, C, D, T]
    assert tree.realign([*P, A, B, UV, CD, T]).token_ids.tolist() == [*P, A, B, U, V, C, D, T]
    assert tree.realign([*P, A, B, UV, T]).splices == ()  # the same answer, nothing of the model behind it
    assert tree.realign([*P, AB, UV, T]).token_ids.tolist() == [*P, A, B, UV, T]


def test_the_seam_of_prompt_and_output_heals():
    tree = recorded(([10, A], [B, C]))
    assert tree.realign([10, AB, C, T]).token_ids.tolist() == [10, A, B, C, T]


def test_a_changed_history_keeps_its_tokens_from_the_changed_turn_on():
    tree = recorded((P, [A, B]), ([*P, A, B, T], [C, D, E]))
    # The first turn has drifted; the second has drifted too, and its end was changed.
    realignment = tree.realign([*P, AB, T, CD, U])
    assert realignment.token_ids.tolist() == [*P, A, B, T, CD, U]
    assert realignment.splices == ((3, 4, 3, 5),)


def test_of_siblings_that_read_the_same_the_one_that_the_prompt_follows_is_taken():
    tree = recorded((P, [A, BC]), (P, [AB, C]), ([*P, A, BC, U], [D]), ([*P, AB, C, V], [D]))
    assert tree.realign([*P, ABC, U, D, T]).token_ids.tolist() == [*P, A, BC, U, D, T]
    assert tree.realign([*P, ABC, V, D, T]).token_ids.tolist() == [*P, AB, C, V, D, T]


def test_prompts_of_running_calls_and_failed_ones_heal_nothing():
    tree = SessionTree(decode=decode)
    call = tree.begin([*P, A, B])
    assert tree.realign([*P, AB, T]).splices == ()
    tree.fail(call, "gone")
    assert tree.realign([*P, AB, T]).splices == ()


def test_values_and_positions_follow_the_splices():
    realignment = Realignment(np.arange(9), (Splice(2, 3, 2, 4), Splice(5, 8, 6, 7)))
    given = np.array([0, 0, 1, 1, 0, 0, 1, 0, 1, 1])  # a, b, [x], c, d, [y, y, y], e, f
    assert realignment.spread(given).tolist() == [0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert [realignment.position(i) for i in range(11)] == [0, 1, 2, 4, 5, 6, 6, 6, 7, 8, 9]


def output(prompt_ids, response_ids, mask, **fields):
    return AgentLoopOutput(
        prompt_ids=prompt_ids, response_ids=response_ids, response_mask=mask, metrics=AgentLoopMetrics(), **fields
    )


def drifted_session(**kwargs):
    """P | a b c | t | d e: sent with the first turn healed, and what the loop makes of it with its own tokens."""
    tree = recorded((P, [A, B, C]), **kwargs)
    call = tree.begin(tree.realign([*P, AB, C, T]))
    tree.complete(call, [D, E], log_probs=[-7.0, -8.0])
    mask = [1, 1, 0, 1, 1]
    own = output(P, [AB, C, T, D, E], mask, response_logprobs=[-5.0] * 5, reward_score=0.5, num_turns=4)
    return tree, own


def test_the_loops_own_row_is_the_sequence_that_the_model_saw():
    tree, own = drifted_session()
    rows = session_rows(tree, [own], limits=RowLimits(8, 8, wants_log_probs=True))
    (row,) = rows.outputs
    assert (row.prompt_ids, row.response_ids) == (P, [A, B, C, T, D, E])
    assert row.response_mask == [1, 1, 1, 0, 1, 1]
    assert row.response_logprobs == [-1.0, -2.0, -3.0, 0.0, -7.0, -8.0]
    assert isinstance(row, TreeAgentLoopOutput)
    assert (row.leaf_reward, row.num_turns, rows.num_dropped, rows.num_truncated) == (0.5, 4, 0, 0)


def test_tokens_that_the_loop_does_not_train_stay_untrained():
    tree, own = drifted_session()
    own = own.model_copy(update={"response_mask": [0, 0, 0, 1, 1]})
    (row,) = session_rows(tree, [own], limits=RowLimits(8, 8, wants_log_probs=True)).outputs
    assert row.response_mask == [0, 0, 0, 0, 1, 1]


def test_a_healed_row_is_cut_to_the_limits():
    tree, own = drifted_session()
    rows = session_rows(tree, [own], limits=RowLimits(8, 5, wants_log_probs=True))
    assert rows.outputs[0].response_ids == [A, B, C, T, D]
    assert rows.num_truncated == 1


@pytest.mark.parametrize("trains", [1, 0])
def test_a_healed_row_that_was_cut_until_it_trains_nothing_stands_for_no_sample(trains):
    """Healed, its prompt has one token more, which the response gets; the one that the loop trains is cut off."""
    tree = recorded((P, [A, B]))
    tree.complete(tree.begin(tree.realign([*P, AB])), [D], log_probs=[-7.0])
    rows = session_rows(tree, [output([*P, AB], [D], [trains])], limits=RowLimits(4, 1, wants_log_probs=True))
    # A loop that trains nothing of its row wants none of it.
    expected = [(P, [A], [1])] if trains else []
    assert [(row.prompt_ids, row.response_ids, row.response_mask) for row in rows.outputs] == expected
    assert rows.num_dropped == 1


def test_without_healing_the_drifted_row_trains_only_what_was_sampled_there():
    tree, own = drifted_session(max_replaced=0)
    rows = session_rows(tree, [own], limits=RowLimits(8, 8, wants_log_probs=True))
    assert [row.response_ids for row in rows.outputs] == [[A, B, C], [AB, C, T, D, E]]
    assert [row.response_mask for row in rows.outputs] == [[1, 1, 1], [0, 0, 0, 1, 1]]


async def test_client_sends_the_healed_tokens():
    sent, outputs = [], iter([[A, B, C], [D]])

    class Client(LLMServerClient):
        @override
        async def generate(self, request_id, *, prompt_ids, sampling_params, **kwargs):
            sent.append(prompt_ids)
            return TokenOutput(token_ids=next(outputs), stop_reason="completed")

    recording = RecordingClient(Client(config=None), tree=SessionTree(decode=decode))
    drifted = [*P, AB, C, T]
    for prompt_ids in (P, drifted):
        await recording.generate("r", prompt_ids=prompt_ids, sampling_params={})
    assert sent == [P, [*P, A, B, C, T]]
    assert drifted == [*P, AB, C, T]  # the loop's own list is not touched
    assert [call.num_splices for call in recording.tree.calls] == [0, 1]


# Byte-level tokens.


@pytest.fixture(params=[False, True], ids=["small", "pretrained"])
def _tokens(request):
    with real_tokens(request.param):
        yield


@pytest.mark.usefixtures("_tokens")
@pytest.mark.parametrize("seed", range(20))
def test_parts_of_characters_heal(seed):
    rng = random.Random(seed)
    real = byte_level_tokenizer()
    prompt, text = encode("<|im_start|>q 漢<|im_end|>"), " ".join(rng.choices(WORDS, k=30)) + "🙂<|im_end|>"
    token_ids = sampled(text, rng, share=0.5)
    tree = SessionTree(decode=real.decode)
    tree.complete(tree.begin(prompt), token_ids)
    given = real.decode([*prompt, *token_ids]) + " and on"
    realignment = tree.realign(encode(given))
    assert encode(given)[: len(prompt) + len(token_ids)] != prompt + token_ids  # the test would be vacuous
    assert realignment.token_ids[: len(prompt) + len(token_ids)].tolist() == prompt + token_ids
    assert real.decode(realignment.token_ids.tolist()) == given
    call = tree.begin(realignment)
    assert tree.calls[call].kind is CallKind.CONTINUATION


@pytest.mark.usefixtures("_tokens")
def test_an_output_that_ends_within_a_character_heals_only_to_the_same_text():
    real = byte_level_tokenizer()
    prompt, character = encode("<|im_start|>q"), encode("a" + "漢")
    broken = real.convert_tokens_to_ids(list(pre_tokenized("a漢")))[:-1]  # the last byte is missing: a length stop
    assert real.decode(broken) == "a\ufffd"
    assert len(character) > 0
    tree = SessionTree(decode=real.decode)
    tree.complete(tree.begin(prompt), broken)
    given = real.decode([*prompt, *broken]) + "<|im_end|> go on"
    healed = tree.realign(encode(given)).token_ids.tolist()
    assert real.decode(healed) == given
    assert healed[: len(prompt) + len(broken)] == prompt + broken
    other = real.decode(prompt) + "a漢<|im_end|> go on"
    assert real.decode(tree.realign(encode(other)).token_ids.tolist()) == other


def pre_tokenized(text):
    ((piece, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return piece
