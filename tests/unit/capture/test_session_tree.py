"""The session tree on hand-made calls: kinds, trained tokens, leaves; and against a naive trie on random sessions."""

import random
import tracemalloc

import numpy as np
import pytest

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.recorded import LeftOut
from rollout_hooks.capture.session_tree import CallStatus, SessionTree

# A toy vocabulary in which different tokens may read the same: 0-25 are letters, 100 reads "ab", 101 reads "bc".
TEXT = {**{i: chr(ord("a") + i) for i in range(26)}, 100: "ab", 101: "bc"}
A, B, C, X = 0, 1, 2, 23
PROMPT = [10, 11, 12]


def decode(token_ids):
    return "".join(TEXT[token] for token in token_ids)


def add(tree, prompt, output, log_probs=None, **kwargs):
    call = tree.begin(prompt)
    tree.complete(call, output, log_probs=log_probs, **kwargs)
    return tree.calls[call]


def leaf_tokens(tree):
    return [path.token_ids.tolist() for path in tree.leaves()]


def trained_tokens(path):
    return path.token_ids[path.is_generated].tolist()


def test_first_call_is_a_root_and_its_output_is_trained():
    tree = SessionTree()
    call = add(tree, PROMPT, [A, B], [-0.5, -0.25], stop_reason="completed", min_global_steps=3, max_global_steps=4)
    assert (call.kind, call.num_shared, call.num_prompt, call.num_output) == (CallKind.ROOT, 0, 3, 2)
    assert (call.status, call.stop_reason) == (CallStatus.COMPLETED, "completed")
    assert (call.min_global_steps, call.max_global_steps) == (3, 4)
    (leaf,) = tree.leaves()
    assert leaf.token_ids.tolist() == [*PROMPT, A, B]
    assert leaf.source.tolist() == [-1, -1, -1, 0, 0]
    assert leaf.log_probs.tolist() == [0, 0, 0, -0.5, -0.25]
    assert (leaf.prompt_len, leaf.calls) == (3, (0,))


def test_continuation_keeps_earlier_output_trained_with_its_log_probs():
    tree = SessionTree()
    add(tree, PROMPT, [A], [-1.0])
    call = add(tree, [*PROMPT, A, 20, 21], [B], [-2.0])
    assert (call.kind, call.num_shared) == (CallKind.CONTINUATION, 4)
    (leaf,) = tree.leaves()
    assert leaf.token_ids.tolist() == [*PROMPT, A, 20, 21, B]
    assert leaf.source.tolist() == [-1, -1, -1, 0, -1, -1, 1]
    assert leaf.log_probs.tolist() == [0, 0, 0, -1.0, 0, 0, -2.0]
    assert leaf.calls == (0, 1)


def test_prompt_that_is_exactly_a_recorded_path_continues_it():
    """The loop lets the model go on without an observation in between (a length stop)."""
    tree = SessionTree()
    add(tree, PROMPT, [A])
    assert add(tree, [*PROMPT, A], [B]).kind is CallKind.CONTINUATION
    assert trained_tokens(tree.leaves()[0]) == [A, B]


@pytest.mark.parametrize(
    ("prompt", "num_shared"),
    [
        (PROMPT, 3),  # the same prompt again: parts where the first call's prompt ended
        ([*PROMPT, A, B, 22], 5),  # another answer of the environment: parts where the first output ended
        ([*PROMPT, A, B, 20, 22], 6),  # the same, but both answers begin with the same template token
        ([*PROMPT, A, B], 5),  # goes back to the end of the first turn
        ([*PROMPT, A], 4),  # goes back into the first turn
        ([*PROMPT, A, B, 20], 6),  # goes back into the answer
    ],
)
def test_fork(prompt, num_shared):
    tree = SessionTree(decode=decode)
    add(tree, PROMPT, [A, B])
    add(tree, [*PROMPT, A, B, 20, 21], [C])
    call = add(tree, prompt, [X])
    assert (call.kind, call.num_shared) == (CallKind.FORK, num_shared)
    assert leaf_tokens(tree) == [[*PROMPT, A, B, 20, 21, C], [*prompt, X]]
    # What the model generated before the fork is trained on the new leaf too, what follows it is not.
    assert trained_tokens(tree.leaves()[1]) == [t for t in [A, B] if t in prompt] + [X]


def test_third_sibling_forks_where_the_paths_part_themselves():
    tree = SessionTree()
    add(tree, PROMPT, [A])
    add(tree, [*PROMPT, A, 20, 21], [B])
    add(tree, [*PROMPT, A, 20, 22], [B])
    call = add(tree, [*PROMPT, A, 20, 23], [B])
    assert (call.kind, call.num_shared) == (CallKind.FORK, 5)
    assert len(tree.leaves()) == 3


@pytest.mark.parametrize(
    "prompt",
    [
        [10, 13, 12, A, B, 20],  # the root prompt was changed
        [10, 11],  # the root prompt was cut
        [*PROMPT, A, X, 20],  # the first output was changed
        [*PROMPT, A, 20, 21],  # the first output was cut, and an answer put there
        [*PROMPT, A, B, 20, 22, 9, 5, 6, 20],  # the first answer was changed and the second output carried along
        [*PROMPT, A, B, 22, 9, 5, 6, 20],  # the same, changed from its first token on
    ],
)
def test_rewritten_history(prompt):
    tree = SessionTree(decode=decode)
    add(tree, PROMPT, [A, B])
    add(tree, [*PROMPT, A, B, 20, 21, 9], [5, 6])
    call = add(tree, prompt, [C])
    assert call.kind is CallKind.REWRITE
    # Both histories are leaves; on the rewritten one only what is token-exact from the root on is trained.
    assert leaf_tokens(tree) == [[*PROMPT, A, B, 20, 21, 9, 5, 6], [*prompt, C]]
    assert trained_tokens(tree.leaves()[1]) == [t for t in prompt[: call.num_shared] if t in (A, B)] + [C]


def test_reasoning_dropped_from_an_earlier_turn_is_rewritten_history():
    """Parts where the first prompt ended, as a forced answer would, but carries the end of the output along."""
    reasoning, answer = [5, 6, 7], [14, 15, 16, 17]
    tree = SessionTree(decode=decode)
    add(tree, PROMPT, reasoning + answer)
    assert add(tree, [*PROMPT, *answer, 20], [X]).kind is CallKind.REWRITE
    assert add(tree, [*PROMPT, 18, 19], [X]).kind is CallKind.FORK


@pytest.mark.parametrize(
    "prompt",
    [
        [*PROMPT, 100, 2, 20],  # a b c was generated, "ab" c came back
        [*PROMPT, A, 101, 20],  # a "bc" came back: parts inside the output
        [*PROMPT, 100],  # ends inside the output
    ],
)
def test_retokenisation_drift(prompt):
    tree = SessionTree(decode=decode)
    add(tree, PROMPT, [A, B, C])
    call = add(tree, prompt, [X])
    assert call.kind is CallKind.DRIFT
    # The generated tokens are trained where they were generated, their retokenised copy is not.
    first, second = tree.leaves()
    assert trained_tokens(first) == [A, B, C]
    assert trained_tokens(second) == ([A, X] if prompt[3] == A else [X])


def test_drift_at_the_seam_of_prompt_and_output():
    """The last prompt token and the first generated one merged: the prompts part inside the root prompt."""
    tree = SessionTree(decode=decode)
    add(tree, [10, A], [B, C])
    assert add(tree, [10, 100, C, 20], [X]).kind is CallKind.DRIFT


def test_drift_needs_the_same_text():
    tree = SessionTree(decode=decode)
    add(tree, PROMPT, [A, B, C])
    assert add(tree, [*PROMPT, 101, 20], [X]).kind is CallKind.FORK  # parts at a boundary, reads "bc", not "abc"
    assert add(tree, [*PROMPT, A, X, 20], [X]).kind is CallKind.REWRITE
    without_text = SessionTree()
    add(without_text, PROMPT, [A, B, C])
    assert add(without_text, [*PROMPT, A, 101, 20], [X]).kind is CallKind.REWRITE


def test_an_unrelated_prompt_is_another_root():
    tree = SessionTree()
    add(tree, PROMPT, [A])
    assert add(tree, [15, 16], [B]).kind is CallKind.ROOT
    assert leaf_tokens(tree) == [[*PROMPT, A], [15, 16, B]]


def test_concurrent_calls_are_forks_and_ordered_by_when_they_were_sent():
    tree = SessionTree()
    first, second, third = tree.begin(PROMPT), tree.begin(PROMPT), tree.begin([*PROMPT, 20])
    tree.complete(third, [C])
    tree.complete(second, [B])
    tree.complete(first, [A])
    assert [call.kind for call in tree.calls] == [CallKind.ROOT, CallKind.FORK, CallKind.FORK]
    assert leaf_tokens(tree) == [[*PROMPT, A], [*PROMPT, B], [*PROMPT, 20, C]]


def test_leaves_are_ordered_by_their_calls_from_the_root_on():
    """Branch 1 sends its second call after branch 2 has sent its own: the first call decides."""
    tree = SessionTree()
    add(tree, PROMPT, [A])
    one, two = tree.begin([*PROMPT, A, 20]), tree.begin([*PROMPT, A, 21])
    tree.complete(two, [B])
    add(tree, [*PROMPT, A, 21, B, 22], [C])
    tree.complete(one, [B])
    add(tree, [*PROMPT, A, 20, B, 22], [C])
    assert [path.calls for path in tree.leaves()] == [(0, 1, 4), (0, 2, 3)]


def test_strict_prefixes_are_no_leaves_and_equal_samples_are():
    tree = SessionTree()
    add(tree, PROMPT, [A])
    add(tree, PROMPT, [A])
    assert leaf_tokens(tree) == [[*PROMPT, A], [*PROMPT, A]]
    assert [path.calls for path in tree.leaves()] == [(0,), (1,)]
    add(tree, [*PROMPT, A, 20], [B])
    assert leaf_tokens(tree) == [[*PROMPT, A, 20, B]]


def test_a_failed_call_leaves_its_cause_and_no_path():
    tree = SessionTree()
    add(tree, PROMPT, [A])
    call = tree.begin([*PROMPT, A, 20])
    tree.fail(call, "RuntimeError: server gone")
    assert (tree.calls[call].status, tree.calls[call].cause) == (CallStatus.FAILED, "RuntimeError: server gone")
    assert leaf_tokens(tree) == [[*PROMPT, A]]
    assert add(tree, [*PROMPT, A, 20], [B]).kind is CallKind.CONTINUATION  # the retry is what the call was


def test_a_call_that_is_left_out_ends_no_leaf_but_the_calls_before_it_stay():
    tree = SessionTree()
    add(tree, PROMPT, [A])
    tree.leave_out(add(tree, [*PROMPT, A, 20], [B]).index, LeftOut.ABANDONED)
    tree.leave_out(add(tree, PROMPT, [C]).index, LeftOut.DROPPED)
    running = tree.begin([*PROMPT, C, 20])
    tree.leave_out(running, LeftOut.ABANDONED)
    tree.fail(running, "gone")
    assert leaf_tokens(tree) == [[*PROMPT, A]]
    assert [(path.token_ids.tolist(), reason) for path, reason in tree.left_out_leaves()] == [
        ([*PROMPT, A, 20, B], LeftOut.ABANDONED),
        ([*PROMPT, C], LeftOut.DROPPED),
    ]
    add(tree, [*PROMPT, A, 20, B, 21], [X])  # whoever goes on from an answer has seen it
    assert [(path.token_ids.tolist(), trained_tokens(path)) for path in tree.leaves()] == [
        ([*PROMPT, A, 20, B, 21, X], [A, B, X])
    ]
    assert [reason for _, reason in tree.left_out_leaves()] == [LeftOut.DROPPED]


def test_abandoned_calls_are_leaves_where_they_are_kept_and_dropped_ones_are_not():
    tree = SessionTree(keeps_abandoned=True)
    for reason in LeftOut:
        tree.leave_out(add(tree, PROMPT, [A if reason is LeftOut.ABANDONED else B]).index, reason)
    assert leaf_tokens(tree) == [[*PROMPT, A]]


def test_an_aborted_call_keeps_its_tokens_and_an_empty_one_makes_no_path():
    tree = SessionTree()
    add(tree, PROMPT, [A], is_aborted=True, stop_reason="aborted")
    call = add(tree, [*PROMPT, A, 20], [], is_aborted=True, stop_reason="aborted")
    assert [call.status for call in tree.calls] == [CallStatus.ABORTED] * 2
    assert call.cause == "aborted after 0 tokens"
    assert leaf_tokens(tree) == [[*PROMPT, A]]


def test_text_that_the_loop_put_there_is_not_trained_even_if_another_call_generates_the_same():
    tree = SessionTree()
    add(tree, [*PROMPT, A], [B])  # the loop forces the answer to begin with A
    add(tree, PROMPT, [A, C])  # the model begins with A by itself
    forced, free = tree.leaves()
    assert (trained_tokens(forced), trained_tokens(free)) == ([B], [A, C])


def test_a_sample_that_another_prompt_shows_as_text_is_a_leaf():
    """The agent drops the thinking from its history; then the model answers the first turn without thinking."""
    tree = SessionTree()
    add(tree, PROMPT, [7, 7, A, B])
    add(tree, [*PROMPT, A, B, 20], [C])
    add(tree, PROMPT, [A, B], [-3.0, -4.0])
    assert leaf_tokens(tree) == [[*PROMPT, 7, 7, A, B], [*PROMPT, A, B, 20, C], [*PROMPT, A, B]]
    assert [trained_tokens(path) for path in tree.leaves()] == [[7, 7, A, B], [C], [A, B]]
    # Once a call goes on from it, it is no leaf.
    add(tree, [*PROMPT, A, B, 21], [X])
    assert [path.calls for path in tree.leaves()] == [(0,), (1,), (2, 3)]


def test_a_sample_is_a_leaf_if_the_call_that_covers_it_is_covered_by_one_that_read_it():
    """Call 1 goes on from call 0; call 2, sent before these, samples what call 1 does and more behind a copy."""
    tree = SessionTree()
    early = tree.begin([*PROMPT, A, 20])
    add(tree, PROMPT, [A])
    add(tree, [*PROMPT, A, 20], [B])
    tree.complete(early, [B, C])
    assert [(path.calls, trained_tokens(path)) for path in tree.leaves()] == [((0,), [B, C]), ((1, 2), [A, B])]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_who_finished_first_decides_nothing(order):
    """Two of three concurrent calls sample the same first token; a call goes on from the last of them."""
    tree, outputs = SessionTree(), [[5, 6], [7], [5, 8]]
    for prompt in (PROMPT, [*PROMPT, 9], PROMPT):
        tree.begin(prompt)
    for call in order:
        tree.complete(call, outputs[call], log_probs=[-1.0 - call] * len(outputs[call]))
    add(tree, [*PROMPT, 5, 8, 3], [4], [-9.0])
    assert [path.calls for path in tree.leaves()] == [(0,), (1,), (2, 3)]
    assert tree.leaves()[-1].log_probs.tolist() == [0, 0, 0, -3.0, -3.0, 0, -9.0]
    # Of equal samples, that with the log-probs that the path has.
    assert tree.locate([*PROMPT, 5]).calls == (0,)
    assert tree.locate([*PROMPT, 5], log_probs=[None, None, None, -3.0]).calls == (2,)
    # A loop went back behind the last sampled token and read it as text: its log-prob is not known.
    add(tree, PROMPT, [5, 8], [-8.0, -8.0])
    assert tree.locate([*PROMPT, 5, 8], log_probs=[None, None, None, -8.0, None]).calls == (4,)


def test_the_callers_array_may_change_afterwards():
    tree, prompt = SessionTree(decode=decode), np.array(PROMPT, dtype=np.int32)
    healed = tree.realign(prompt)
    prompt[0] = X
    add(tree, healed, [A])
    assert leaf_tokens(tree) == [[*PROMPT, A]]


G, U = [40, 41], [42]
"""Tokens before a turn of the model, and before one of the environment."""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ([*U, B, B, C, C, 30, B, C, 31], CallKind.FORK),  # what the branches found, quoted
        ([*U, 9, 30, *G, B, B, C, C, 30, *U, 31], CallKind.REWRITE),  # a changed question with the turn after it
        ([*U, 9, 30, *G, B, C, C, 30, *U, 31], CallKind.REWRITE),  # the same, its reasoning dropped
        ([*U, B, C, 30, *G, B, B, C, C, 30, *U, 31], CallKind.REWRITE),  # quoted and carried along
    ],
)
def test_a_main_line_that_quotes_its_branches_has_changed_nothing(text, kind):
    tree, plan = SessionTree(), [*PROMPT, *G]
    add(tree, plan, [A, A, A, A, A, 30])
    for question, output in (([9, 8], [B, B, C, C, 30]), ([9, 9], [B, C, 31])):
        add(tree, [*plan, A, A, A, A, A, 30, *U, *question, *G], output)
    assert add(tree, [*plan, A, A, A, A, A, 30, *text, *G], [X]).kind is kind


@pytest.mark.parametrize(
    ("output", "log_probs"), [([A, -1], None), ([A, 2**31], None), ([A, B], [-1.0]), ([A], [None, "x"]), ([[A]], None)]
)
def test_a_call_whose_tokens_cannot_be_recorded_has_failed(output, log_probs):
    tree = SessionTree()
    call = tree.begin(PROMPT)
    with pytest.raises(ValueError, match="token"):
        tree.complete(call, output, log_probs=log_probs)
    assert tree.calls[call].status is CallStatus.FAILED
    assert "token" in (tree.calls[call].cause or "")
    assert not tree.leaves()


def test_wrong_input_is_refused_with_the_remedy():
    tree = SessionTree()
    with pytest.raises(ValueError, match="at least one token"):
        tree.begin([])
    with pytest.raises(ValueError, match="1 log_probs for 2 generated tokens"):
        tree.complete(tree.begin(PROMPT), [A, B], log_probs=[-1.0])


class NaiveTrie:
    """The same bookkeeping with one dict entry per token prefix."""

    def __init__(self):
        self.generated_by = {}  # prefix of tokens -> the calls that generated its last token
        self.num_prompts = {}  # call -> tokens of its prompt
        self.running = {}  # call -> tokens and sources of its prompt
        self.paths = {}  # completed call -> tokens, and per token the call that generated it or -1

    def prefixes(self):
        recorded = [tokens for tokens, _ in [*self.running.values(), *self.paths.values()]]
        return {tokens[: i + 1] for tokens in recorded for i in range(len(tokens))}

    def begin(self, call, prompt):
        self.num_prompts[call] = len(prompt)
        self.running[call] = tuple(prompt), self.locate(prompt)

    def complete(self, call, output):
        prompt, source = self.running.pop(call)
        tokens = (*prompt, *output)
        for i in range(len(prompt), len(tokens)):
            self.generated_by.setdefault(tokens[: i + 1], set()).add(call)
        if output:
            self.paths[call] = tokens, source + [call] * len(output)

    def locate(self, tokens):
        """Of the calls that generated a token, name the one that goes on farthest; then the longest; then the first."""
        calls = [self.generated_by.get(tuple(tokens[: i + 1]), ()) for i in range(len(tokens))]
        ends = {call: i + 1 for i, those in enumerate(calls) for call in those}
        return [max(those, key=lambda c: (ends[c], -self.num_prompts[c], -c), default=-1) for those in calls]

    def leaves(self):
        def goes_on(path, other):
            trains = all(new >= 0 for new, old in zip(other[1], path[1], strict=False) if old >= 0)
            return len(other[0]) > len(path[0]) and other[0][: len(path[0])] == path[0] and trains

        paths = self.paths.values()
        return [path for path in paths if not any(goes_on(path, other) for other in paths)]


def test_memory_grows_with_the_tokens_of_the_tree_and_not_with_the_tokens_of_the_calls():
    held = {}
    for num_turns in (100, 400):
        tree, history = SessionTree(), list(range(100))
        tracemalloc.start()
        for turn in range(num_turns):
            tree.complete(tree.begin(history), [turn] * 100, log_probs=[-1.0] * 100)
            history += [turn] * 100 + [7] * 100
        held[num_turns] = tracemalloc.get_traced_memory()[0] - len(history) * 8
        tracemalloc.stop()
        assert tree.num_tokens == len(history) - 100
    assert held[400] < 6 * held[100]


@pytest.mark.parametrize("seed", range(40))
def test_random_sessions_agree_with_a_naive_trie(seed):
    """Calls that overlap, fail, or generate nothing; prompts that go on from any recorded place."""
    rng = random.Random(seed)
    tree, naive = SessionTree(), NaiveTrie()
    while len(tree.calls) < 2 + seed or naive.running:
        if len(tree.calls) < 2 + seed and len(naive.running) < rng.randint(1, 4):
            recorded = [tokens for tokens, _ in naive.paths.values()]
            base = list(rng.choice(recorded or [tuple(PROMPT)]))
            base = base[: rng.randint(1, len(base))] if rng.random() < 0.5 else base
            prompt = base + [rng.randrange(3) for _ in range(rng.randrange(3))]
            known = naive.prefixes()
            num_shared = max((i for i in range(len(prompt) + 1) if tuple(prompt[:i]) in known), default=0)
            call = tree.begin(prompt)
            assert tree.calls[call].num_shared == num_shared
            naive.begin(call, prompt)
        else:
            call = rng.choice(list(naive.running))
            output = [rng.randrange(3) for _ in range(rng.randint(0, 3))]
            if rng.random() < 0.2:
                output = []
                tree.fail(call, "gone")
            else:
                tree.complete(call, output, log_probs=[-0.1 * (call + 1)] * len(output))
            naive.complete(call, output)
        assert tree.num_tokens == len(naive.prefixes())
    for tokens, _ in naive.paths.values():
        assert tree.locate([*tokens, 7]).source.tolist() == naive.locate([*tokens, 7])
    leaves = [(tuple(path.token_ids.tolist()), path.source.tolist()) for path in tree.leaves()]
    assert sorted(leaves) == sorted(naive.leaves())
    assert [path.calls for path in tree.leaves()] == sorted(path.calls for path in tree.leaves())
    for path in tree.leaves():
        np.testing.assert_allclose(path.log_probs, np.where(path.source >= 0, -0.1 * (path.source + 1), 0.0))
