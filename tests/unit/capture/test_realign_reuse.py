"""What a session remembers of earlier prompts changes nothing: against a healer without memory, on the same trie."""

import random

import fuzz_drivers
import pytest
from test_realign import TEXT, P, decode

from rollout_hooks.capture.realign import Healer
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.capture.token_arrays import token_array

A, B, C, D, T, U, V = 0, 1, 2, 3, 19, 20, 21
AB, BC, ABC, CD, UV = 100, 101, 102, 103, 104


class CheckedTree(SessionTree):
    """Heals each prompt as a new healer does too, and asserts that both are equal."""

    def __init__(self, *, decode, max_replaced):
        super().__init__(decode=decode, max_replaced=max_replaced)
        self.max_replaced = max_replaced
        self.num_spliced = 0

    def realign(self, token_ids):
        healed = super().realign(token_ids)
        naive = Healer(self._trie, decode=self._decode, max_tokens=self.max_replaced).heal(token_array(token_ids))
        assert healed.token_ids.tolist() == naive.token_ids.tolist()
        assert healed.splices == naive.splices
        self.num_spliced += len(healed.splices)
        return healed

    @property
    def comparisons(self):
        return self._healer.compare.cache_info()


def checked_tree(*calls, decode=decode, max_replaced=64):
    tree = CheckedTree(decode=decode, max_replaced=max_replaced)
    for prompt, output in calls:
        tree.complete(tree.begin(prompt), output)
    return tree


def encode(text, rng, *, share=1.0):
    """Write a text in tokens, of which this share is drawn among those that fit; the others are letters."""
    token_ids = []
    while text:
        fitting = [token for token, each in TEXT.items() if text.startswith(each)]
        token_ids.append(rng.choice(fitting) if rng.random() < share else fitting[0])
        text = text[len(TEXT[token_ids[-1]]) :]
    return token_ids


def test_a_prompt_takes_over_what_it_shares_and_nothing_that_has_changed():
    tail = [T, U, V] * 27  # longer than what decides a splice
    tree = checked_tree((P, [A, B, C]), ([*P, A, B, C, *tail], [C, D, A]), ([*P, A, B, C, *tail, C, D, A, *tail], [B]))
    given = [*P, AB, C, *tail, CD, A, *tail]
    tree.realign(given)
    assert tree.comparisons.hits == 0
    assert len(tree.realign([*given, D]).splices) == 2
    assert tree.comparisons.hits == 1  # the second place; the first is taken over whole
    assert len(tree.realign([*P, AB, C, *tail, C, D, B]).splices) == 1  # parts from the last prompt behind one of them
    assert tree.comparisons.hits == 2
    assert tree.realign([*P, AB, D]).splices == ()  # begins alike, and has another end


def test_a_path_recorded_since_is_followed():
    """The given tokens become a path of their own, and so do others that read the same and lead farther."""
    tail = [T] * 80  # so that all that decides lies before the end of the prompt
    tree = checked_tree((P, [A, BC]), (P, [AB, C]), ([*P, A, BC, *tail], [D]))
    given = [*P, ABC, *tail, D, U, V]
    assert tree.realign(given).token_ids.tolist()[3:5] == [A, BC]
    tree.complete(tree.begin([*P, AB, C, *tail, D, U, V]), [A])
    assert tree.realign(given).token_ids.tolist()[3:5] == [AB, C]
    tree.complete(tree.begin(given), [A])
    assert tree.realign([*given, A]).splices == ()


def test_a_splice_that_stood_for_what_followed_does_not_stand_without_it():
    """Environment text heals on the way to an output; another prompt shares the text and not the output."""
    text = [T, V] * 6
    tree = checked_tree((P, [A, B]), ([*P, A, B, U, V, *text], [C, D]))
    assert len(tree.realign([*P, AB, UV, *text, CD, T]).splices) == 3
    assert len(tree.realign([*P, AB, UV, *text[:9], A, A]).splices) == 1


def test_a_failed_call_takes_its_boundary_along():
    """The first splice stands for the boundary where the running call's prompt ends; the second one never stands."""
    tail = [T, V] * 6
    tree = checked_tree((P, [A, B, *tail, C, D, *tail, T]))
    given = [*P, AB, *tail, CD, *tail, U]
    call = tree.begin([*P, A, B, *tail])
    assert len(tree.realign(given).splices) == 1
    tree.fail(call, "gone")
    assert tree.realign(given).splices == ()


@pytest.mark.parametrize("max_replaced", [2, 5, 64])
@pytest.mark.parametrize("seed", range(25))
def test_random_histories_heal_as_without_memory(seed, max_replaced):
    """Texts of few letters in random encodings: prompts that go on from, cut, repeat or change earlier ones."""
    rng = random.Random(seed)
    vocabulary = [token for token, text in TEXT.items() if set(text) <= set("abcde")]
    tree, running, texts = checked_tree(max_replaced=max_replaced), [], ["kl"]

    for _ in range(120):
        if running and rng.random() < 0.6:
            call, text = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.15:
                tree.fail(call, "gone")
                continue
            output = rng.choices(vocabulary, k=rng.randint(0, 12))
            tree.complete(call, output)
            texts.append(text + decode(output))
            continue
        text = rng.choice(texts[-4:] if rng.random() < 0.8 else texts)
        if rng.random() < 0.3:
            text = text[: rng.randint(2, len(text))]
        text += "".join(rng.choices("abcde", k=rng.randint(0, 14)))
        given = encode(text, rng)
        prompt = tree.realign(given)
        tree.realign(given)  # the same again, and what begins with it, before the trie has changed
        tree.realign(given + encode("abc", rng))
        if rng.random() < 0.5:
            running.append((tree.begin(prompt if rng.random() < 0.8 else given), text))
    assert tree.num_spliced > 30


@pytest.mark.parametrize("seed", [0, 1])
async def test_long_sessions_heal_as_without_memory(seed, monkeypatch):
    trees = []

    def new_tree(_):
        trees.append(checked_tree(decode=fuzz_drivers.decode))
        return trees[-1]

    monkeypatch.setattr(fuzz_drivers, "new_tree", new_tree)
    await fuzz_drivers.tokens(f"long-{seed}", num_rounds=500)
    assert trees[0].num_spliced > 500
    assert trees[0].comparisons.hits > 20


@pytest.mark.parametrize("num_branches", [1, 3])
def test_a_place_of_drift_is_looked_for_a_few_times_however_often_it_is_sent(num_branches, monkeypatch):
    """Branches take turns; each of their turns drifts once and comes back in all of its later prompts."""
    tree, looked = SessionTree(decode=decode), []
    find = Healer._find_splice
    monkeypatch.setattr(Healer, "_find_splice", lambda *args, **kwargs: looked.append(1) or find(*args, **kwargs))
    given = [[*P, U + branch] for branch in range(num_branches)]
    for turn in range(60):
        for prompt in given:
            healed = tree.realign(prompt)
            assert len(healed.splices) == turn
            tree.complete(tree.begin(healed), [A, B, C])
            prompt += [AB, C, *[T] * 80, turn % 4 + 4]
    assert len(looked) < 5 * 60 * num_branches


@pytest.mark.parametrize("seed", range(6))
def test_long_random_histories_heal_as_without_memory(seed, monkeypatch):
    """Long turns, so that steps are taken over: agents that take turns, go back, change a turn; calls that overlap."""
    rng = random.Random(seed)
    tree, running, taken_over = checked_tree(max_replaced=(2, 4, 64)[seed % 3]), [], []
    known = Healer._known
    monkeypatch.setattr(Healer, "_known", lambda *args: taken_over.extend(steps := known(*args)) or steps)
    histories = [["kl"]]

    for _ in range(300):
        if running and rng.random() < 0.7:
            call, history = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.05:
                tree.fail(call, "gone")
                continue
            output = encode("".join(rng.choices("abcde", k=rng.randint(1, 40))), rng, share=0.3)
            tree.complete(call, output)
            histories.append([*history, decode(output)])
            continue
        history = list(rng.choice(histories[-2:]))
        if rng.random() < 0.04:
            del history[rng.randint(1, len(history)) :]
        if rng.random() < 0.03:
            place = rng.randrange(len(history))
            history[place] = history[place][1:] + rng.choice("abc")
        history.append("".join(rng.choices("abcdtu", k=rng.choice([1, 5, 90]))))
        # The text of earlier turns is always cut into the same tokens, as a tokenizer does.
        state = rng.getstate()
        given = []
        for text in history:
            rng.seed(text)
            given += encode(text, rng, share=0.3)
        rng.setstate(state)
        prompt = tree.realign(given)
        if rng.random() < 0.8:
            running.append((tree.begin(prompt if rng.random() < 0.95 else given), history))
    assert tree.num_spliced > 100
    assert len(taken_over) > 20


def test_what_is_remembered_is_bounded_by_the_tree():
    """Each turn drifts once; what 40 turns leave behind is for 40 places, however often they were sent."""
    tree, history, given = checked_tree(), list(P), list(P)
    for turn in range(40):
        tree.complete(tree.begin(tree.realign(given)), [A, B, C])
        history += [A, B, C, *[T] * 80, turn % 4 + 4]
        given += [AB, C, *[T] * 80, turn % 4 + 4]
    assert len(tree.realign(given).splices) == 40
    assert tree.comparisons.currsize <= 41
    assert tree.num_tokens == len(history) - 81  # what follows the last output was not sent
