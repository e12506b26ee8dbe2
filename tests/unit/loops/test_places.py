"""Where `tree_search` expands a tree: each policy on drawn trees, its places worked out by hand.

A turn is named by the digit that it hands to a tool, and a place by the turns before it: "12" is what follows the
results of turns 1 and 2, "" the prompt. A tree is drawn as its turns in the order in which they are sampled, and the
answers are numbers, which are the rewards.
"""

import functools
import random
import re
from collections import defaultdict

import pytest
from loop_cases import call, rewards, run
from recipe_cases import loop_of, play
from scripted_llm import END, encode
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.loops.places import POLICIES, arpo, branpo, random_turns, trace, uncertain_tokens
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop


class Rewarded(TreeSearchAgentLoop):
    """The answer is a number, and the reward."""

    async def leaf_reward(self, *, row, answer):
        del row
        return float(answer)


def scripted(*turns):
    """Make the model of a drawn tree: (place, what is sampled there, log-probs), each place's turns in this order.

    What is sampled is "call 3" or an answer; a single log-prob is that of all its tokens.
    """
    given = defaultdict(list)
    for place, said, *log_probs in turns:
        text = call("double", x=int(said[-1])) if said.startswith("call") else said
        token_ids = encode(text + END)
        given[place].append(TokenOutput(token_ids=token_ids, log_probs=(*log_probs, -1.0)[:1] * len(token_ids)))

    def reply(text):
        found = given[digits(text)]
        return found.pop(0) if found else RuntimeError("gone")

    return reply


def digits(text):
    """Return the digits that the tool calls in a text hand over."""
    return "".join(re.findall('"x": (.)', text))


def name(place):
    """Return the turns before the beginning of a turn."""
    return digits("".join(turn.step.turn.text for turn in place.turn.path()[:-1]))


def names(places):
    assert all(place.position == place.turn.step.turn.start for place in places)
    return [name(place) for place in places]


def grow(*turns, rounds=(), num_trees=1):
    """Grow the drawn trees by expanding the named places, round by round; return them as a policy would see them next.

    An expansion is named (number of its tree, place) or, in a single tree, by the place.
    """
    seen = []
    steps = iter(rounds)

    def choose(trees, budget, *, rng):
        del budget, rng
        seen[:] = trees
        wanted = [each if isinstance(each, tuple) else (0, each) for each in next(steps, ())]
        by_name = [{name(place): place for place in tree.beginnings().values()} for tree in trees]
        return [by_name[number][place] for number, place in wanted]

    options = {"select": choose, "num_trees": num_trees, "num_rounds": len(rounds) + 1, "num_expansions": 8}
    try:
        run(Rewarded, scripted(*turns), options=options)
    except SessionFailed as error:
        if "gone" not in str(error):  # an answer that was not drawn, in a session without another leaf
            raise
    return seen


def expanded(select, *turns, **options):
    """Run the search; return the place of each call in their order, and the rewards of the leaves, ascending."""
    outputs, client = run(Rewarded, scripted(*turns), options={"select": select, **options})
    return [digits(prompt) for prompt in client._client.prompts], sorted(rewards(outputs))


RNG = random.Random(0)
CHAIN = [("", "call 1"), ("1", "call 2"), ("12", "call 3")]


# ARPO

SURPRISED = [("", "call 1", -1.0), ("1", "call 2", -2.0), ("12", "call 3", -0.5), ("123", "0", -1.5)]
"""Behind the results the model is less certain by 1, by -0.5 and by 0.5 nats than in its first turn."""


@pytest.mark.parametrize(
    ("budget", "options", "places"),
    [
        (1, {}, ["1"]),  # P = .5 + .2 * 1 = .7
        (2, {}, ["1", "123"]),  # .6; at 12 it is .4
        (4, {}, ["1", "123", "", ""]),  # what is left goes to the prompt
        (2, {"tau": 0.65}, ["1", ""]),
        (2, {"tau": 0.7}, ["", ""]),  # P > tau
        (3, {"alpha": 0.7}, ["1", "123", "12"]),  # .9, .8, .6
        (2, {"beta": -0.2}, ["12", ""]),  # .6
        (0, {}, []),
    ],
)
def test_arpo_branches_where_a_result_made_the_model_less_certain(budget, options, places):
    assert names(arpo(grow(*SURPRISED), budget, rng=RNG, **options)) == places


def test_arpo_looks_at_the_first_tokens_of_a_turn_only():
    """The answer "00" begins with 3 nats and ends certain: the mean over its 3 tokens is 1, over the first 3."""

    def reply(text):
        if '"x"' not in text:
            token_ids = encode(call("double", x=1) + END)
            return TokenOutput(token_ids=token_ids, log_probs=[-1.5] * len(token_ids))
        return TokenOutput(token_ids=encode("00" + END), log_probs=[-3.0, 0.0, 0.0])

    def begun(**options):
        options = {"select": functools.partial(arpo, **options), "num_expansions": 1}
        return digits(run(Rewarded, reply, options=options)[1]._client.prompts[2])

    assert begun() == ""
    assert begun(num_tokens=1) == "1"


def test_arpo_compares_with_the_beginning_of_the_same_path_and_takes_a_place_once():
    """The second chain begins with 3 nats, so 2 behind its result are fewer; 1 and 123 have been expanded.

    ──┬── 1 ──┬── 2 ── 3 ──┬── 0
      │       │            └── 0
      │       └── 0
      └── 4 ── 0
    """
    rounds = [["1", "123", ""]]
    trees = grow(*SURPRISED, ("1", "0"), ("123", "0"), ("", "call 4", -3.0), ("4", "0", -2.0), rounds=rounds)
    assert names(arpo(trees, 2, rng=RNG)) == ["", ""]
    assert names(arpo(trees, 2, rng=RNG, alpha=0.8)) == ["12", "4"]  # .7, .6


def test_arpo_in_a_search():
    """Round 1 at 1, where a second call and an answer follow, and at 123; round 2 at 15, and at the prompt."""
    new = [("1", "call 5", -1.0), ("15", "1", -1.1), ("123", "2", -1.0), ("15", "3", -1.0), ("", "4", -1.0)]
    calls, found = expanded("arpo", *SURPRISED, *new, num_rounds=2)
    assert calls == ["", "1", "12", "123", *["1", "123", "15"], *["15", ""]]
    assert found == [0.0, 1.0, 2.0, 3.0, 4.0]


# BranPO


@pytest.mark.parametrize(
    ("answers", "rounds", "places"),
    [
        (["0"], [], ["123"]),
        (["0", "0"], [["123"]], ["12"]),  # no other outcome: one turn further back
        (["0", "1"], [["123"]], []),  # right and wrong part there
        (["0", "0"], [["123"], ["12"]], ["1"]),  # what 12 led to failed
        (["0", "0"], [["123"], ["12"], ["1"]], []),  # three turns at most, so not the prompt
        (["1"], [], ["123"]),
        (["1", "1"], [["123"]], []),  # all are right: one turn at most
    ],
)
def test_branpo_cuts_one_turn_more_until_another_outcome_is_found(answers, rounds, places):
    """The leaves are answers behind 123."""
    trees = grow(*CHAIN, *[("123", answer) for answer in answers], rounds=rounds)
    for budget in range(3):
        assert names(branpo(trees, budget, rng=RNG)) == places[:budget]


def test_branpo_on_a_drawn_tree():
    """Two of five leaves are right, so wrong ones are cut by up to three turns and right ones by two.

    ──┬── 1 ──┬── 2 ──┬── 1     parts from 0 at 12
      │       │       └── 0
      │       └── 3 ── 0        cut at 13; then it parts from 1 at 1
      └── 4 ── 5 ──┬── 6 ── 1   cut at 456
                   └── 7 ── 0   cut at 457: shorter than those at 45, which has both outcomes
    """
    new = [("1", "call 3"), ("13", "0"), ("", "call 4"), ("4", "call 5"), ("45", "call 6"), ("456", "1")]
    rounds = [["12", "1", ""], ["45"]]
    drawn = [*CHAIN[:2], ("12", "1"), ("12", "0"), *new, ("45", "call 7"), ("457", "0")]
    trees = grow(*drawn, rounds=rounds)
    assert names(branpo(trees, 5, rng=RNG)) == ["13", "457", "456"]
    assert names(branpo(trees, 2, rng=RNG)) == ["13", "457"]
    # With a success of 2 all are wrong. Those behind 12 are not cut again: 12, 1 and the prompt have been expanded.
    assert names(branpo(trees, 5, rng=RNG, success=2.0)) == ["13", "456", "457"]


def test_branpo_counts_the_leaves_of_all_trees():
    """Wrong leaves before right ones; with more than 3/4 right, only the wrong ones are cut."""
    for num_right, places in ((1, ["2", "1"]), (3, ["4", "1", "2", "3"]), (4, ["5"])):
        answers = {str(number): "1" for number in range(1, num_right + 1)} | {str(num_right + 1): "0"}
        first = [("", f"call {number}") for number in answers]
        assert names(branpo(grow(*first, *answers.items(), num_trees=len(answers)), 9, rng=RNG)) == places


def test_branpo_in_a_search():
    """The last turn gives another wrong answer; the turn before it, in round 2, the right one. Round 3 has nothing."""
    new = [("123", "0"), ("12", "1")]
    calls, found = expanded("branpo", *CHAIN, ("123", "0"), *new, num_rounds=3)
    assert calls == ["", "1", "12", "123", "123", "12"]
    assert found == [0.0, 0.0, 1.0]


# TRACE

DECIDED = [*CHAIN[:2], ("12", "1"), ("12", "1"), ("1", "call 5"), ("15", "0")]
"""──── 1 ──┬── 2 ──┬── 1       12: 2 of 2 leaves, p = 3/4, p (1 - p) = 3/16 = .1875
            │       └── 1       1 and the prompt: 2 of 3, p = 3/5, 6/25 = .24
            └── 5 ── 0          15: 0 of 1, p = 1/3, 2/9 = .2222"""


def test_trace_takes_what_is_least_decided_and_draws_among_equals():
    trees = grow(*DECIDED, rounds=[["12", "1"]])
    orders = set()
    for seed in range(8):
        places = names(trace(trees, 9, rng=random.Random(seed)))
        assert places == names(trace(trees, 9, rng=random.Random(seed)))
        assert places[2:] == ["15", "12"]
        assert names(trace(trees, 3, rng=random.Random(seed))) == places[:3]
        orders.add(tuple(places[:2]))
    assert orders == {("", "1"), ("1", "")}
    # A success of 2: none of 3, of 2 and of 1 are right, p = 1/5, 1/4 and 1/3.
    assert names(trace(trees, 2, rng=RNG, success=2.0)) == ["15", "12"]


def test_trace_draws_any_place_of_a_lone_chain():
    """A right leaf and a wrong one have p = 2/3 and 1/3, which must be equally undecided."""
    for answers in ("1", "0"), ("0", "1"):
        trees = grow(*[("", "call 1")] * 2, *[("1", answer) for answer in answers], num_trees=2)
        firsts = [trace(trees, 1, rng=random.Random(seed))[0] for seed in range(40)]
        assert {(name(place), place.turn in trees[0].turns) for place in firsts} == {
            ("", True), ("1", True), ("", False), ("1", False)
        }  # fmt: skip


def test_trace_in_a_search():
    """Round 1 expands all three places, round 2 both that are least decided.

    ──┬── 1 ──┬── 2 ──┬── 1        12: 1 of 1 + 1, 1/4
      │       │       └── 0
      │       └── 1                1: 2 of 3, .24;   the prompt: 2 of 4, 1/4
      └── 0
    """
    new = [("12", "0"), ("1", "1"), ("", "0"), ("12", "3"), ("", "4")]
    calls, found = expanded("trace", *CHAIN[:2], ("12", "1"), *new, num_rounds=1, num_expansions=3)
    assert sorted(calls[3:]) == ["", "1", "12"]
    assert sorted(found) == [0.0, 0.0, 1.0, 1.0]
    trees = grow(*CHAIN[:2], ("12", "1"), *new, rounds=[["12", "1", ""]])
    assert sorted(names(trace(trees, 2, rng=RNG))) == ["", "12"]


# All


def degenerate():
    """Return trees with nothing to choose from, by what they lack."""
    return {
        "tools": grow(("", "1")),
        "wrong leaves": grow(*CHAIN, ("123", "1"), ("123", "1"), rounds=[["123"]]),
        "leaves": grow(*CHAIN),
        "two answers of one tree": grow(("", "1"), ("", "call 1"), num_trees=2),
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_exceeds_the_budget_or_names_a_place_twice(policy):
    """Twice are only what `random` draws where it has too few, and the prompt, where `arpo` begins new chains."""
    drawn = {"a tree": grow(*DECIDED, rounds=[["12", "1"]]), **degenerate()}
    for lacks, trees in drawn.items():
        for budget in range(7):
            places = POLICIES[policy](trees, budget, rng=random.Random(1))
            assert len(places) <= budget, lacks
            assert all(any(place.turn in tree.turns for tree in trees) for place in places)
            behind = [place for place in places if place.turn.parent]
            distinct = policy != "random" or budget <= 2
            assert len(set(behind)) == len(behind) or not distinct, lacks
            if policy in ("entropy", "branpo", "trace"):
                assert len(set(places)) == len(places), lacks


@pytest.mark.parametrize(
    ("policy", "tools", "wrong", "leaves"),
    [
        ("random", ["", ""], {"1", "12", "123"}, {"1", "12"}),
        ("arpo", ["", ""], {""}, {""}),
        ("branpo", [""], set(), set()),
        ("trace", [""], {"", "1", "12", "123"}, set()),
    ],
)
def test_where_there_is_nothing_to_choose_from(policy, tools, wrong, leaves):
    """A chain of one answer; two right leaves that part at 123; a chain whose call failed behind 123."""
    trees = degenerate()
    assert names(POLICIES[policy](trees["tools"], 2, rng=RNG)) == tools
    draws = [
        [names(POLICIES[policy](trees[lacks], 2, rng=random.Random(seed))) for seed in range(20)]
        for lacks in ("wrong leaves", "leaves")
    ]
    assert [{place for each in found for place in each} for found in draws] == [wrong, leaves]


def test_random_and_entropy_give_each_tree_an_equal_share():
    """Of two trees the first has all the uncertain tokens."""
    turns = [("", "call 1", -5.0), ("", "call 2", -1.0), ("1", "1", -5.0), ("2", "1", -1.0)]
    trees = grow(*turns, num_trees=2)
    for policy in random_turns, uncertain_tokens:
        places = policy(trees, 4, rng=RNG)
        assert [place.turn in trees[0].turns for place in places] == [True, True, False, False]


@pytest.mark.parametrize("select", ["branpo", "trace"])
def test_policies_that_read_rewards_are_refused_where_the_loop_gives_them_later(select):
    class Later(TreeSearchAgentLoop):
        async def leaf_reward(self, *, row, answer):
            """Leave it to `reward_leaves`."""

    with pytest.raises(SessionFailed, match=r"branpo and trace read the rewards of leaves .* `leaf_reward` gave None"):
        run(Later, scripted(*CHAIN, ("123", "1")), options={"select": select})
    outputs, _ = run(Later, scripted(*[("", "1")] * 3), options={"select": "random"})
    assert rewards(outputs) == [None] * 3


def test_arpo_needs_log_probs():
    def reply(text):
        return TokenOutput(token_ids=encode(("1" if '"x"' in text else call("double", x=1)) + END), log_probs=[])

    with pytest.raises(SessionFailed, match="log-prob"):
        run(Rewarded, reply, options={"select": "arpo"})


def test_a_policy_of_ones_own_that_names_too_many_places_is_refused():
    def greedy(trees, budget, *, rng):
        del rng
        return [trees[0].beginnings()[None]] * (budget + 1)

    with pytest.raises(SessionFailed, match=r"greedy.* chose 3 places: num_expansions=2 in 1 trees allow 2"):
        run(Rewarded, scripted(("", "1")), options={"select": greedy})


def test_a_function_named_in_the_loops_file_with_its_arguments():
    """`tau` is out of reach, so both expansions begin at the prompt."""
    select = {"_target_": "rollout_hooks.loops.places.arpo", "_partial_": True, "tau": 9.0}
    entry = {**loop_of("tree_search_reasoning", "treerl"), "select": select, "num_rounds": 1}
    rows, client = play(entry, scripted(("", "call 1"), ("1", "0"), ("", "call 2"), ("2", "0"), ("", "1")))
    assert len(rows) == 3
    assert len({prompt for prompt in client.prompts if '"x"' not in prompt}) == 1
    assert [len(re.findall('"x"', prompt)) for prompt in client.prompts] == [0, 1, 0, 0, 1]
