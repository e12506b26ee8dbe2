"""`tree_search`: which places are expanded, what the trees look like, and what one failing chain costs."""

import itertools

import numpy as np
import pytest
from loop_cases import ASSISTANT, advantages, call, response, rewards, run, slow_tool, trained
from scripted_llm import END, encode
from scripted_llm import row as dataset_row
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop


class Rewarded(TreeSearchAgentLoop):
    """The answer is a number, and the reward."""

    async def leaf_reward(self, *, row, answer):
        assert row["uid"] == "u"
        return float(answer)


def result(text):
    return f"\n<|im_start|>user\n[{text}]{END}\n{ASSISTANT}"


def sampler(*answers):
    """Let the first turn call the tool; behind its result comes one answer after the other."""
    given = iter(answers)

    def reply(text):
        return next(given) if "[2]" in text else call("double", x=1)

    return reply


TURN = call("double", x=1) + END


def test_random_places_the_tree_its_masks_rewards_and_advantages():
    """One tree, N = 2 expansions in L = 1 round; the only turn behind a result is chosen, twice.

    prompt ── double 1 ── 2 ──┬── 0       first chain, reward 0
                              ├── 1       expansion
                              └── 2       expansion
    """
    outputs, client = run(Rewarded, sampler("0", "1", "2"))
    assert [response(output) for output in outputs] == [TURN + result(2) + f"{n}{END}" for n in "012"]
    assert [trained(output) for output in outputs] == [[TURN, f"{n}{END}"] for n in "012"]
    assert rewards(outputs) == [0.0, 1.0, 2.0]
    # Weights 1/3, mean 1, unbiased variance 1.
    np.testing.assert_allclose(advantages(outputs), [-1.0, 0.0, 1.0], atol=1e-12)
    assert len(client.tree.calls) == 4  # the shared turn was sampled once
    assert len(set(client._client.request_ids)) == 1


def test_number_of_leaves_and_the_two_trees_of_a_session():
    """M (1 + L N T) leaves; trees part at the prompt, and each round expands both."""
    numbers = map(str, itertools.count())

    def reply(text):
        return next(numbers) if text.count("[2]") == 2 else call("double", x=1)

    options = {"num_trees": 2, "num_expansions": 2, "num_rounds": 2, "num_samples": 3}
    outputs, _ = run(Rewarded, reply, options=options)
    assert len(outputs) == 2 * (1 + 2 * 2 * 3)
    assert {len(trained(output)) for output in outputs} == {3}


def texts(outputs):
    return [response(output) for output in outputs]


@pytest.mark.parametrize("select", ["random", "trace"])
def test_the_same_seed_makes_the_same_choices(select):
    """Chains of four turns have three places; what is drawn depends on the seed, the prompt and the session."""

    def reply(text):
        return "1" if text.count("[2]") == 3 else call("double", x=1)

    def chosen(seed, question="q", session_id=0):
        row = dataset_row(question, session_id=session_id)
        options = {"select": select, "seed": seed, "num_expansions": 1, "num_rounds": 3}
        _, client = run(Rewarded, reply, options=options, row=row)
        first = client._client.prompts[0]
        return [prompt[len(first) :].count("[2]") for prompt in client._client.prompts]

    assert chosen(0) == chosen(0)
    assert len({tuple(chosen(seed)) for seed in range(4)}) > 1
    assert len({tuple(chosen(0, question)) for question in "abcd"}) > 1
    assert len({tuple(chosen(0, "q", number)) for number in range(4)}) > 1


def test_every_place_can_be_drawn_and_none_is_the_prompt():
    """Two places: behind the first and the second result. Each expansion's own turns become places in later rounds."""

    def reply(text):
        return "1" if text.count("[2]") == 2 else call("double", x=1)

    depths = set()
    for seed in range(8):
        _, client = run(Rewarded, reply, options={"seed": seed, "num_expansions": 1})
        depths.add(client._client.prompts[3].count("[2]"))
    assert depths == {1, 2}


def test_a_chain_of_one_turn_is_expanded_at_the_prompt():
    answers = iter("123")
    outputs, _ = run(Rewarded, lambda _: next(answers))
    assert texts(outputs) == [f"{n}{END}" for n in "123"]


def uncertain(token_values):
    """Answers with digits and the given log-probs, whatever was asked."""
    replies = iter(token_values)

    def reply(_):
        text, log_probs = next(replies)
        return TokenOutput(token_ids=encode(text), log_probs=log_probs, stop_reason="completed")

    return reply


def test_forks_at_the_least_certain_tokens_the_tree_its_masks_rewards_and_advantages():
    """Two expansions a round, at the least certain tokens.

    The third token (-3) and then the first (-2) are sampled again, with what follows; in round 2 the least certain of
    all tokens left is one of an expansion (9, -5).

    ──┬── 1 ── 2 ──┬── 3 ── 4        first chain, log-probs -2 -1 -3 -.5; reward 1234
      │            └──┬── 5 ── 9     round 1, log-probs -.1 -5
      │               └── 5 ── 7     round 2, at 9; log-prob -.1
      ├── 6                          round 1, log-prob -1.5
      └── 8                          round 2, at 6; log-prob -.1
    """
    script = [
        ("1234", [-2.0, -1.0, -3.0, -0.5]),
        ("59", [-0.1, -5.0]),
        ("6", [-1.5]),
        ("7", [-0.1]),
        ("8", [-0.1]),
    ]
    outputs, client = run(Rewarded, uncertain(script), options={"select": "entropy", "num_rounds": 2})
    assert texts(outputs) == ["1234", "1259", "1257", "6", "8"]
    by_text = {response(output): output for output in outputs}
    assert all(set(output.response_mask) == {1} for output in outputs)
    assert by_text["1257"].response_logprobs == [-2.0, -1.0, -0.1, -0.1]
    assert {text: output.leaf_reward for text, output in by_text.items()} == {t: float(t) for t in by_text}
    prompts = [prompt.split(ASSISTANT)[-1] for prompt in client._client.prompts]
    assert prompts == ["", "12", "", "125", ""]
    values = np.array([float(text) for text in by_text])
    expected = (values - values.mean()) / values.std(ddof=1)
    np.testing.assert_allclose(advantages(outputs), expected, rtol=1e-12)


def test_a_token_inside_a_tool_call_is_sampled_again_and_the_whole_turn_is_parsed():
    """The digit of the call is the least certain token: the rest of the call is sampled anew, and its result is new."""
    head = '<tool_call>{"name": "double", "arguments": {"x": '
    tail = "}}</tool_call>" + END

    def reply(text):
        if text.endswith(ASSISTANT) and "[" in text:
            value = "2" if "[2]" in text else "6"
            return TokenOutput(token_ids=encode(value), log_probs=[-0.1])
        written = "3" + tail if text.endswith(head) else head + "1" + tail
        values = [-5.0 if token == encode("1")[0] else -0.2 for token in encode(written)]
        return TokenOutput(token_ids=encode(written), log_probs=values)

    outputs, _ = run(Rewarded, reply, options={"select": "entropy", "num_expansions": 1})
    assert texts(outputs) == [head + "1" + tail + result(2) + "2", head + "3" + tail + result(6) + "6"]
    assert trained(outputs[1]) == [head + "3" + tail, "6"]
    assert rewards(outputs) == [2.0, 6.0]


def test_uncertainty_is_the_entropy_of_the_top_log_probs_where_a_server_gives_them():
    half = np.log(0.5)
    certain_but_rare = {"top_log_probs": [[half, half], [0.0]]}

    class Look(Rewarded):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            with_top = TokenOutput(token_ids=[5, 6], log_probs=[-0.1, -9.0], extra_fields=certain_but_rare)
            np.testing.assert_allclose(self.uncertainty(with_top), [np.log(2.0), 0.0])
            plain = TokenOutput(token_ids=[5, 6], log_probs=[-0.1, -9.0])
            np.testing.assert_allclose(self.uncertainty(plain), [0.1, 9.0])
            with pytest.raises(ValueError, match="no log-prob"):
                self.uncertainty(TokenOutput(token_ids=[5], log_probs=None))

    run(Look, lambda _: "1", options={"num_rounds": 0})


def test_entropy_asks_for_log_probs_whatever_the_rollout_does():
    _, client = run(Rewarded, lambda _: "1", options={"select": "entropy"})
    assert all(params["logprobs"] is True for params in client._client.sampling_params)


def test_failing_and_slow_chains_are_no_leaves_and_fail_nothing_else():
    answers = iter(["0", RuntimeError("gone"), "2"])

    def failing(text):
        return next(answers) if "[2]" in text else call("double", x=1)

    outputs, _ = run(Rewarded, failing)
    assert rewards(outputs) == [0.0, 2.0]

    calls = iter(["1", call("slow", x=1), "3"])
    options = {"call_timeout_s": 0.5}
    outputs, _ = run(Rewarded, lambda _: next(calls), options=options, more_tools=[slow_tool()])
    assert rewards(outputs) == [1.0, 3.0]


def test_a_session_without_a_leaf_fails_with_the_reasons():
    with pytest.raises(SessionFailed, match="finished no branch; RuntimeError: gone"):
        run(Rewarded, lambda _: RuntimeError("gone"))
    options = {"call_timeout_s": 0.5}
    with pytest.raises(SessionFailed, match="finished no branch; tool 'slow' took longer"):
        run(Rewarded, lambda _: call("slow", x=1), options=options, more_tools=[slow_tool()])


def test_the_reward_is_verls_for_every_leaf_unless_overridden():
    answers = iter(["#### 7", "#### 8", "#### 7"])
    row = dataset_row(data_source="openai/gsm8k", reward_model={"ground_truth": "7"})
    outputs, _ = run(TreeSearchAgentLoop, lambda _: next(answers), row=row)
    assert rewards(outputs) == [1.0, 0.0, 1.0]


def test_leaves_have_roles_if_the_loop_is_told_to_name_them():
    (*others, last), _ = run(Rewarded, sampler("0", "1", "2"), options={"leaf_roles": True})
    assert others
    assert {output.extra_fields[ROLE] for output in others} == {"answer"}
    assert last.extra_fields[ROLE] == "answer"
    outputs, _ = run(Rewarded, sampler("0", "1", "2"))
    assert len(outputs) == 1 + len(others)
    assert all(ROLE not in output.extra_fields for output in outputs)
