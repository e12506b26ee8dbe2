"""The cursor API: what each step does to the tokens, how branches run side by side, and what becomes a leaf."""

import asyncio
import math
import random
import re
from pathlib import Path

import pytest
from scripted_llm import END, ScriptedClient, decode, encode, log_prob, run_loop
from scripted_llm import row as dataset_row
from typing_extensions import override
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import TokenOutput

from rollout_hooks.capture.call_kinds import CallKind
from rollout_hooks.capture.errors import describe_error
from rollout_hooks.capture.outputs import SessionFailed, TreeAgentLoopOutput
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.rows import LEFT_OUT_FIELD, RowLimits, session_rows
from rollout_hooks.capture.session_tree import SessionTree
from rollout_hooks.loops.base import BranchingAgentLoop, BranchSession

SAMPLING = {"temperature": 1.0, "logprobs": True}


def session(reply, *, prompt="Q", response_length=100, **kwargs):
    client = RecordingClient(ScriptedClient(reply, **kwargs.pop("client", {})), tree=SessionTree(decode=decode))
    return BranchSession(
        client, prompt_ids=encode(prompt), sampling_params=SAMPLING, response_length=response_length, **kwargs
    )


async def test_generate_observe_and_finish_keep_exact_books():
    branch = session(lambda prompt: "two" if "[1]" in prompt else "one").root
    output = await branch.generate()
    branch.observe(encode("[1]"))
    await branch.generate()
    branch.finish(0.5, extra_info={"acc": True})
    assert decode(output.token_ids) == "one" + END
    assert decode(branch.token_ids) == "Qone" + END + "[1]two" + END
    row = branch.as_output()
    assert (row.prompt_ids, decode(row.response_ids)) == (encode("Q"), "one" + END + "[1]two" + END)
    assert row.response_mask == branch.response_mask == [1] * 4 + [0] * 3 + [1] * 4
    expected = [
        log_prob(1 + i, token) if m else 0.0
        for i, (token, m) in enumerate(zip(row.response_ids, row.response_mask, strict=True))
    ]
    assert row.response_logprobs == pytest.approx(expected)
    assert (row.num_turns, row.leaf_reward, row.reward_score) == (4, 0.5, 0.5)
    assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 7
    assert row.extra_fields["reward_extra_info"] == {"acc": True}


async def test_forks_share_what_came_before_and_nothing_after():
    root = session(lambda _: "a").root
    await root.generate()
    left, right = root.fork(2)
    left.observe(encode("L"))
    right.observe(encode("RR"))
    await asyncio.gather(left.generate(), right.generate(), root.generate())
    sequences = [decode(branch.token_ids) for branch in (root, left, right)]
    a = "a" + END
    assert sequences == ["Q" + a + a, "Q" + a + "L" + a, "Q" + a + "RR" + a]
    assert (left.index, right.index) == (1, 2)


async def test_branches_run_concurrently():
    running = session(lambda _: "x", client={"delay": lambda _: 0.01})
    branches = running.root.fork(8)
    await asyncio.gather(*(branch.generate() for branch in branches))
    assert running.client._client.most_running == 8


async def test_rewind_drops_what_came_after_and_the_next_call_forks_there():
    running = session(lambda _: "abc")
    root = running.root
    start = root.position
    await root.generate()
    root.rewind(start + 2)  # inside the generated turn: its first two tokens stay, and stay trained
    await root.generate()
    root.finish(1.0)
    (output,) = running.outputs()
    assert start == 1
    assert decode(output.response_ids) == "ab" + "abc" + END
    assert output.response_mask == [1] * 6
    expected = [log_prob(1 + i, token) for i, token in enumerate(output.response_ids)]
    assert output.response_logprobs == pytest.approx(expected)
    tree = running.client.tree
    assert [call.kind for call in tree.calls] == [CallKind.ROOT, CallKind.FORK]
    # The loop named its leaves: the turn that it rewound is recorded, but no row.
    rows = session_rows(tree, [output], limits=RowLimits(8, 100, wants_log_probs=True))
    assert [row.response_ids for row in rows.outputs] == [output.response_ids]
    assert rows.outputs[0].response_mask == output.response_mask
    assert rows.num_dropped == 1


async def test_length_budget():
    running = session(lambda _: "abcdef", response_length=10)
    root = running.root
    await root.generate()  # 7 tokens
    root.observe(encode("[]"))
    last = await root.generate()  # 1 token is left
    full = await root.generate()
    assert [params["max_tokens"] for params in running.client._client.sampling_params] == [10, 1]
    assert decode(last.token_ids) == "a"
    assert (full.token_ids, full.stop_reason) == ([], "length")
    assert (running.root.num_remaining, running.root.failure) == (0, None)


async def test_sampling_parameters_of_one_call():
    running = session(lambda _: "abcdef")
    await running.root.generate({"temperature": 0.5, "max_tokens": 2})
    params, own = running.client._client.sampling_params[0], running.sampling_params
    assert params == {"temperature": 0.5, "logprobs": True, "max_tokens": 2}
    assert own == SAMPLING


def test_request_ids_are_sticky_or_unique():
    async def ids(**kwargs):
        running = session(lambda _: "a", request_id="s", **kwargs)
        for branch in [running.root, *running.root.fork(2)]:
            await branch.generate()
            await branch.generate()
        return running.client._client.request_ids

    assert asyncio.run(ids()) == ["s"] * 6
    assert asyncio.run(ids(unique_request_ids=True)) == [
        "s-call1",
        "s-call2",
        "s-0-call1",
        "s-0-call2",
        "s-1-call1",
        "s-1-call2",
    ]


async def test_a_failed_call_fails_its_branch_and_no_sibling_in_a_task_group():
    def reply(prompt):
        return RuntimeError("out of memory") if "2" in prompt else "fine"

    async def conclude(branch, text):
        branch.observe(encode(text))
        output = await branch.generate()
        if branch.failure is None:
            branch.finish(1.0)
        return output

    running = session(reply)
    branches = running.root.fork(3)
    async with asyncio.TaskGroup() as tasks:
        for number, branch in enumerate(branches, start=1):
            tasks.create_task(conclude(branch, str(number)))
    assert [branch.failure for branch in branches] == [None, "RuntimeError: out of memory", None]
    assert [decode(output.response_ids) for output in running.outputs()] == ["1fine" + END, "3fine" + END]
    assert [call.cause for call in running.client.tree.calls] == [None, "RuntimeError: out of memory", None]
    failed = branches[1]
    for action in (
        lambda: failed.observe([1]),
        lambda: failed.fork(),
        lambda: failed.rewind(1),
        lambda: failed.finish(),
    ):
        with pytest.raises(ValueError, match="out of memory"):
            action()
    failed.finish(-1.0)  # only an explicit reward makes a leaf of a broken trajectory
    assert [output.leaf_reward for output in running.outputs()] == [1.0, -1.0, 1.0]


async def test_an_aborted_call_keeps_its_tokens_and_fails_the_branch():
    aborted = TokenOutput(token_ids=encode("ab"), log_probs=[-1.0, -2.0], stop_reason="aborted")
    branch = session(lambda _: aborted).root
    output = await branch.generate()
    assert (output.stop_reason, branch.failure) == ("aborted", "the server aborted the call after 2 tokens")
    assert decode(branch.token_ids) == "Qab"


def test_misuse_is_refused_with_the_remedy():
    root = session(lambda _: "a").root
    root.observe(encode("xy"))
    with pytest.raises(ValueError, match=r"observe\('higher'\): takes token ids; for text use"):
        root.observe("higher")
    for to in (-1, 4):
        with pytest.raises(ValueError, match=r"between 0 and the cursor, 3"):
            root.rewind(to)
    with pytest.raises(ValueError, match="at least 1"):
        root.fork(0)
    for reward in (math.nan, "1"):
        with pytest.raises(ValueError, match=f"reward={reward!r} of branch 0: a reward must be finite"):
            root.finish(reward)
    with pytest.raises(ValueError, match="must be finite"):
        TreeAgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics={}, leaf_reward=math.inf)
    root.finish()
    with pytest.raises(ValueError, match="finished already"):
        root.finish(1.0)
    with pytest.raises(ValueError, match="fork before finishing"):
        asyncio.run(root.generate())
    with pytest.raises(ValueError, match="at least one token"):
        session(lambda _: "a", prompt="")
    with pytest.raises(ValueError, match="at least one token"):
        session(lambda _: "a").root.restart([])
    rewound = session(lambda _: "a").root
    rewound.rewind(0)
    with pytest.raises(ValueError, match="observe a prompt before"):
        asyncio.run(rewound.generate())


def test_missing_log_probs_are_refused():
    root = session(lambda _: TokenOutput(token_ids=[5], log_probs=None)).root
    with pytest.raises(ValueError, match="calculate_log_probs=False"):
        asyncio.run(root.generate())


def test_leaf_rewards_survive_verls_copy_of_the_last_reward():
    def output(reward, extra_info=None):
        leaf = TreeAgentLoopOutput(
            prompt_ids=[1],
            response_ids=[2, 3],
            response_mask=[1, 1],
            num_turns=2,
            metrics={},
            extra_fields={"reward_extra_info": {}},
            leaf_reward=reward,
            leaf_reward_extra_info=extra_info,
        )
        leaf.reward_score = 9.0  # verl: `output.reward_score = final_output.reward_score`
        leaf.extra_fields["reward_extra_info"] = {"acc": 9}
        return leaf

    rows = [output(0.0, {"acc": 0}).as_dict(), output(None).as_dict(), output(2.0).as_dict()]
    assert [row["rm_scores"].tolist() for row in rows] == [[0.0, 0.0], [0.0, 9.0], [0.0, 2.0]]
    assert [row["extra_fields"]["reward_extra_info"]["acc"] for row in rows] == [0, 9, 9]
    assert "leaf_reward" not in rows[0]
    assert "leaf_reward_extra_info" not in rows[0]
    batch = list_of_dict_to_tensordict(rows)
    assert batch["rm_scores"].sum(dim=1).tolist() == [0.0, 9.0, 2.0]


class Explore(BranchingAgentLoop):
    """Two attempts of two turns each, then an answer on the main branch."""

    fail_main = False

    async def run_branches(self, root, **row):
        await root.generate()
        branches = root.fork(2)
        await asyncio.gather(*(self.attempt(branch, n) for n, branch in enumerate(branches)))
        if self.fail_main:
            raise KeyError("no such file")
        root.observe(self.tokenizer.encode("main", add_special_tokens=False))
        await root.generate()
        root.finish(row.get("answer_reward"))

    async def attempt(self, branch, number):
        await asyncio.sleep(0.01 * (1 - number))  # the second one gets there first
        branch.observe(self.tokenizer.encode(str(number), add_special_tokens=False))
        await branch.generate()
        if branch.failure is None:
            branch.finish(float(number))


def run_explore(reply, loop_class=Explore, **kwargs):
    client = RecordingClient(ScriptedClient(reply), tree=SessionTree(decode=decode))
    return run_loop(loop_class, client, SAMPLING, **kwargs), client.tree


def test_loop_returns_leaves_in_order_of_forking_and_the_root_last():
    outputs, tree = run_explore(lambda _: "x")
    texts = [decode(output.response_ids) for output in outputs]
    x = "x" + END
    assert texts == [x + "0" + x, x + "1" + x, x + "main" + x]
    assert [output.leaf_reward for output in outputs] == [0.0, 1.0, None]
    assert tree.count_kinds() == {CallKind.ROOT: 1, CallKind.CONTINUATION: 1, CallKind.FORK: 2}
    prompt = decode(outputs[0].prompt_ids)
    assert prompt == f"<|im_start|>user\nq{END}\n<|im_start|>assistant\n"
    rows = session_rows(tree, outputs, limits=RowLimits(256, 256, wants_log_probs=True))
    assert [row.response_mask for row in rows.outputs] == [output.response_mask for output in outputs]
    assert (rows.num_dropped, rows.num_truncated) == (0, 0)


class Choose(Explore):
    """Takes the second attempt."""

    async def attempt(self, branch, number):
        await super().attempt(branch.fork()[0] if number else branch, number)
        if number:
            branch.finish(trained=False, role="candidate")


def test_a_branch_that_is_not_trained_is_shown_and_makes_no_row():
    outputs, tree = run_explore(lambda _: "x", Choose)
    rows = session_rows(tree, outputs, limits=RowLimits(256, 256, wants_log_probs=True))
    x = "x" + END
    assert [decode(row.response_ids) for row in rows.outputs] == [x + "0" + x, x + "1" + x, x + "main" + x]
    ((reason, prompt_len, token_ids, calls, role),) = rows.outputs[-1].extra_fields[LEFT_OUT_FIELD]
    assert (reason, decode(token_ids[prompt_len:]), [call for call, *_ in calls]) == ("dropped", x, [0])
    assert role == "candidate"
    assert rows.num_dropped == 1
    root = session(lambda _: "a").root
    with pytest.raises(ValueError, match=r"finish\(1\.0, trained=False\) on branch 0: what is left out has no reward"):
        root.finish(1.0, trained=False)


class WithRoles(Explore):
    """Its attempts have roles, the main leaf has none."""

    async def attempt(self, branch, number):
        branch.observe(self.tokenizer.encode(str(number), add_special_tokens=False))
        await branch.generate()
        branch.finish(1.0, role=f"attempt/{number}")

    async def reward_leaves(self, leaves, *, row):
        del row
        assert [leaf.role for leaf in leaves] == ["attempt/0", "attempt/1", None]
        return [leaf.reward for leaf in leaves]


def test_a_leaf_may_have_a_role():
    outputs, tree = run_explore(lambda _: "x", WithRoles)
    rows = session_rows(tree, outputs, limits=RowLimits(256, 256, wants_log_probs=True)).outputs
    assert [row.extra_fields.get(ROLE) for row in rows] == ["attempt/0", "attempt/1", None]
    assert ROLE not in rows[-1].extra_fields
    assert [row.as_dict()["extra_fields"].get(ROLE) for row in rows] == ["attempt/0", "attempt/1", None]


@pytest.mark.parametrize("role", ["", "two words", "näme", "a" * 65, "a|b", "a\n", 3, True, ["a"]])
def test_a_role_of_another_form_is_refused(role):
    message = f"role={re.escape(repr(role))} of branch 0: give 1 to 64 letters, digits and _ - "
    with pytest.raises(ValueError, match=message):
        session(lambda _: "a").root.finish(1.0, role=role)
    outputs, tree = run_explore(lambda _: "x")
    outputs[1].extra_fields[ROLE] = role  # as any loop may
    with pytest.raises(ValueError, match="of output 1: give 1 to 64 letters"):
        session_rows(tree, outputs, limits=RowLimits(256, 256, wants_log_probs=True))


@pytest.mark.parametrize("role", ["a", "Tool-2/sub_agent.x", "a" * 64])
def test_what_a_role_may_look_like(role):
    branch = session(lambda _: "a").root
    branch.finish(1.0, role=role)
    assert branch.as_output().extra_fields[ROLE] == role


class Compared(Explore):
    """Rewards by comparison: the share of the leaves that end alike. The main leaf has none of its own."""

    rewards = None

    async def reward_leaves(self, leaves, *, row):
        if self.rewards is not None:
            return self.rewards
        assert row["uid"] == "u"
        assert [leaf.lineage for leaf in leaves] == [(0,), (1,), ()]
        assert [leaf.reward for leaf in leaves] == [0.0, 1.0, None]
        ends = [leaf.token_ids[-2] for leaf in leaves]
        return [ends.count(end) / len(ends) for end in ends]


def test_a_reward_may_see_the_whole_tree():
    outputs, _ = run_explore(lambda prompt: "y" if prompt.endswith("1") else "x", Compared)
    assert [output.leaf_reward for output in outputs] == pytest.approx([2 / 3, 1 / 3, 2 / 3])
    assert [output.as_dict()["rm_scores"][-1].item() for output in outputs] == pytest.approx([2 / 3, 1 / 3, 2 / 3])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([1.0], r"Wrong\.reward_leaves gave \[1\.0\] for 3 leaves: give a list"),
        ({0: 5.0, 1: 5.0, 2: 5.0}, "for 3 leaves: give a list"),
        ("555", "gave '555' for 3 leaves: give a list"),
        ([5.0, 5.0, math.inf], "reward=inf of branch 0"),
    ],
)
def test_rewards_that_do_not_fit_the_tree_fail_the_session_and_change_nothing(rewards, message):
    class Wrong(Compared):
        pass

    Wrong.rewards = rewards
    with pytest.raises(SessionFailed, match=message) as raised:
        run_explore(lambda _: "x", Wrong)
    assert [output.leaf_reward for output in raised.value.outputs] == [0.0, 1.0]


def test_the_agent_of_the_documentation_runs_as_printed():
    """docs/own_loop.md: the first guess of both is wrong and of the right form, then one is right and one fails."""
    text = (Path(__file__).parents[3] / "docs/own_loop.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "class TwoGuesses" in block]
    scope = {}
    exec(source, scope)
    replies = iter(["7", "8", "9", RuntimeError("gone")])
    fields = dataset_row(reward_model={"ground_truth": "9"})
    outputs, tree = run_explore(lambda _: next(replies), scope["TwoGuesses"], row=fields)
    (leaf,) = outputs
    assert leaf.leaf_reward == 1.0
    assert [value for _, value in leaf.node_rewards] == [0.1, 0.1]
    assert "Wrong, once more." in decode(leaf.response_ids)
    assert decode(leaf.response_ids).endswith("9" + END)
    assert [call.status.value for call in tree.calls] == ["completed"] * 3 + ["failed"]


def test_a_hook_that_is_not_async_is_named():
    class Plain(Explore):
        @override
        def reward_leaves(self, leaves, *, row):
            return [1.0] * len(leaves)

    with pytest.raises(SessionFailed, match=r"Plain\.reward_leaves gave .*: it must be `async def`"):
        run_explore(lambda _: "x", Plain)


def test_session_that_fails_carries_its_cause_and_the_rewarded_leaves():
    class Broken(Explore):
        fail_main = True

    with pytest.raises(SessionFailed, match="KeyError: 'no such file'") as raised:
        run_explore(lambda _: "x", Broken)
    assert [output.leaf_reward for output in raised.value.outputs] == [0.0, 1.0]
    with pytest.raises(SessionFailed, match="RuntimeError: gone") as raised:
        run_explore(lambda prompt: RuntimeError("gone") if "main" in prompt else "x")
    assert len(raised.value.outputs) == 2


def test_session_without_a_finished_branch_fails():
    class Idle(BranchingAgentLoop):
        @override
        async def run_branches(self, root, **row):
            await root.generate()

    with pytest.raises(SessionFailed, match=r"Idle\.run_branches finished no branch"):
        run_explore(lambda _: "x", Idle)


def test_observe_messages_uses_verls_template_code_and_stops_at_the_limit():
    class Chat(BranchingAgentLoop):
        async def run_branches(self, root, **row):
            history = [*row["raw_prompt"], {"role": "assistant", "content": "x"}]
            await root.generate()
            before = root.position
            fits = await self.observe_messages(root, [{"role": "user", "content": "more"}], history=history)
            root.add_tool_reward(float(fits))
            root.add_tool_reward(float(root.position - before))
            root.finish(0.0)

    outputs, _ = run_explore(lambda _: "x", Chat)
    observed = f"\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"
    assert decode(outputs[0].response_ids) == "x" + END + observed
    assert outputs[0].response_mask == [1, 1] + [0] * len(encode(observed))
    outputs, _ = run_explore(lambda _: "x", Chat, response_length=len(encode(observed)) + 2)
    assert outputs[0].extra_fields["tool_rewards"] == [0.0, 0.0]


def test_a_turn_that_was_cut_stays_open():
    """docs/own_loop.md: verl adds what follows a stop token, and no stop token."""

    class Cut(BranchingAgentLoop):
        async def run_branches(self, root, **row):
            history = [*row["raw_prompt"], {"role": "assistant", "content": "x"}]
            await root.generate({"max_tokens": 1})
            await self.observe_messages(root, [{"role": "user", "content": "more"}], history=history)
            root.finish(0.0)

    outputs, _ = run_explore(lambda _: "xyz", Cut)
    assert decode(outputs[0].response_ids) == f"x<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


def test_an_error_in_a_task_group_fails_the_session_unless_its_branch_is_told():
    class Searching(BranchingAgentLoop):
        catches = False

        async def run_branches(self, root, **_):
            async with asyncio.TaskGroup() as tasks:
                for number, branch in enumerate(root.fork(2)):
                    tasks.create_task(self.search(branch, number))

        async def search(self, branch, number):
            await branch.generate()
            try:
                if number == 0:
                    raise TimeoutError("slow")
            except TimeoutError as error:
                if not self.catches:
                    raise
                branch.fail(f"search: {error}")
                return
            await branch.generate()
            branch.finish(1.0)

    with pytest.raises(SessionFailed, match="TimeoutError: slow") as failed:
        run_explore(lambda _: "x", Searching)
    assert failed.value.outputs == []
    Searching.catches = True
    (leaf,), _ = run_explore(lambda _: "x", Searching)
    assert leaf.leaf_reward == 1.0


def test_full_determinism_gives_stable_unique_request_ids():
    client = ScriptedClient(lambda _: "x")
    run_loop(Explore, client, SAMPLING, full_determinism=True, row=dataset_row(priority=4, session_id=2))
    assert sorted(client.request_ids) == [
        "det-4-2-0-call1",
        "det-4-2-1-call1",
        "det-4-2-call1",
        "det-4-2-call2",
    ]


def test_router_replay_is_refused():
    with pytest.raises(ValueError, match="enable_rollout_routing_replay"):
        run_explore(lambda _: "x", enable_rollout_routing_replay=True)


def test_errors_in_a_task_group_are_named_each_once_in_whatever_order_they_came():
    group = BaseExceptionGroup("g", [ValueError("a"), ExceptionGroup("h", [KeyError("b"), ValueError("a")])])
    assert describe_error(group) == "KeyError: 'b'; ValueError: a"
    assert describe_error(ExceptionGroup("g", [KeyError("b"), ValueError("a")])) == describe_error(group)


class Program:
    """A random program of branch operations, with expected books beside it.

    They are the prompt and, behind it, one (token, trained) pair a token.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.finished = []

    async def run(self, branch, prompt, pairs, is_open=False, depth=0):
        for _ in range(self.rng.randint(1, 4)):
            step = self.rng.choice(["generate", "observe", "fork", "rewind", "restart"])
            if step == "generate":
                output = await branch.generate()
                if branch.failure is not None:
                    return
                pairs, is_open = pairs + [(token, 1) for token in output.token_ids], False
            elif step == "observe":
                observed = encode(self.rng.choice(["a", "ab", "xyz"]))
                branch.observe(observed)
                if is_open:
                    prompt = prompt + observed
                else:
                    pairs = pairs + [(token, 0) for token in observed]
            elif step == "fork" and depth < 3:
                forks = branch.fork(self.rng.randint(1, 2))
                await asyncio.gather(*(self.run(fork, prompt, list(pairs), is_open, depth + 1) for fork in forks))
            elif step == "rewind":
                keep = self.rng.randint(0, len(pairs))
                branch.rewind(len(prompt) + keep)
                pairs = pairs[:keep]
            elif step == "restart":
                prompt, pairs, is_open = encode(self.rng.choice(["Q", "Qa", "R"])), [], True
                branch.restart(prompt)
        branch.finish(self.rng.random())
        self.finished.append((branch, prompt, pairs))


@pytest.mark.parametrize("seed", range(25))
async def test_random_programs_keep_exact_books_and_agree_with_what_was_recorded(seed):
    """The model answers with few different letters, as the environment does, so that paths often coincide."""
    rng = random.Random(1000 + seed)

    def reply(_):
        return RuntimeError("gone") if rng.random() < 0.1 else rng.choice(["a", "ab", "b", "abab"])

    program = Program(seed)
    running = session(reply, response_length=1000, client={"delay": lambda _: 0.001 * rng.random()})
    await program.run(running.root, encode("Q"), [])
    outputs = running.outputs()
    expected = sorted(program.finished, key=lambda leaf: (leaf[0].index == 0, leaf[0].lineage))
    assert len(outputs) == len(expected)
    for (_, prompt, pairs), output in zip(expected, outputs, strict=True):
        assert output.prompt_ids == prompt
        assert list(zip(output.response_ids, output.response_mask, strict=True)) == pairs
    rows = session_rows(running.client.tree, outputs, limits=RowLimits(8, 1000, wants_log_probs=True)).outputs
    if not outputs:
        return  # every branch failed: the session fails, see above
    trained = [output for output in outputs if any(output.response_mask)]
    assert [row.response_mask for row in rows] == [output.response_mask for output in trained]
    assert [row.response_logprobs for row in rows] == [output.response_logprobs for output in trained]
    for row in rows:
        for position, (token, mask, value) in enumerate(
            zip(row.response_ids, row.response_mask, row.response_logprobs, strict=True), start=len(row.prompt_ids)
        ):
            assert value == (pytest.approx(log_prob(position, token)) if mask else 0.0)


async def test_restart_shares_what_the_prompts_have_in_common_and_the_row_gets_its_own_prompt():
    """Root prompt QR; another prompt QS is a fork behind Q, and its row is prompt QS, response what follows."""
    running = session(lambda _: "a", prompt="QR", response_length=4)
    root = running.root
    await root.generate()
    (kept,) = root.fork()
    kept.finish(1.0)
    root.restart(encode("QS"))
    assert (root.num_remaining, root.response_mask) == (4, [])
    root.observe(encode("t"))  # still the prompt: the model has not generated yet
    await root.generate()
    root.observe(encode("u"))
    root.finish(0.0)
    kept, restarted = running.outputs()
    assert (decode(kept.prompt_ids), decode(kept.response_ids)) == ("QR", "a" + END)
    assert (decode(restarted.prompt_ids), decode(restarted.response_ids)) == ("QSt", "a" + END + "u")
    assert restarted.response_mask == [1, 1, 0]
    assert restarted.response_logprobs[:2] == pytest.approx(
        [log_prob(3 + i, t) for i, t in enumerate(encode("a" + END))]
    )
    rows = session_rows(running.client.tree, [kept, restarted], limits=RowLimits(8, 4, wants_log_probs=True))
    assert [row.response_mask for row in rows.outputs] == [[1, 1], [1, 1, 0]]
    assert rows.num_dropped == 0


async def test_a_new_prompt_beyond_prompt_length_uses_up_the_response():
    running = session(lambda _: "abc", prompt="Q", response_length=4, prompt_length=2)
    root = running.root
    root.restart(encode("RSTU"))  # two tokens of prompt, two of response: two are left
    assert root.num_remaining == 2
    await root.generate()
    root.finish(0.0)
    (output,) = running.outputs()
    assert (decode(output.prompt_ids), decode(output.response_ids)) == ("RS", "TUab")
    assert output.response_mask == [0, 0, 1, 1]


async def test_weight_versions_are_those_of_the_tokens_that_are_left():
    replies = iter([1, 2, 3])

    def reply(_):
        step = next(replies)
        return TokenOutput(
            token_ids=encode("a"), log_probs=[-1.0], extra_fields={"min_global_steps": step, "max_global_steps": step}
        )

    root = session(reply).root
    for _ in range(3):
        await root.generate()
    root.rewind(root.position - 1)
    root.finish(0.0)
    fields = root.as_output().extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"]) == (1, 2)


def rows_of_two_answers(first_ends_first):
    """Two concurrent branches sample the same first token with different weights."""
    answers = iter([([5, 6, 1], -0.5, 7), ([5, 8, 1], -0.9, 8)])

    class Client(ScriptedClient):
        @override
        async def generate(self, request_id, **kwargs):
            tokens, value, version = next(answers)
            for _ in range(1 if (version == 7) == first_ends_first else 5):
                await asyncio.sleep(0)
            versions = {"min_global_steps": version, "max_global_steps": version}
            return TokenOutput(token_ids=tokens, log_probs=[value] * 3, stop_reason="completed", extra_fields=versions)

    async def run():
        client = RecordingClient(Client(lambda _: ""), tree=SessionTree())
        session = BranchSession(client, prompt_ids=[2, 3], sampling_params=SAMPLING, response_length=9)
        (fork,) = session.root.fork()
        await asyncio.gather(session.root.generate(), fork.generate())
        session.root.finish(1.0)
        fork.finish(0.0)
        limits = RowLimits(prompt_length=9, response_length=9, wants_log_probs=True)
        return session_rows(client.tree, session.outputs(), limits=limits).outputs

    return asyncio.run(run())


def test_a_row_names_the_call_of_its_branch_whichever_call_ended_first():
    for first_ends_first in (True, False):
        fork, root = rows_of_two_answers(first_ends_first)
        assert fork.extra_fields["recorded_calls"] == [(1, "fork", 2, 5, 8, 8)]
        assert root.extra_fields["recorded_calls"] == [(0, "root", 2, 5, 7, 7)]


class Researcher(BranchingAgentLoop):
    """Plans, lets two branches search, and goes on with what they found."""

    @override
    async def run_branches(self, root, **row):
        await root.generate()
        history = [*row["raw_prompt"], {"role": "assistant", "content": "plan"}]
        forks = root.fork(2)
        for fork, question in zip(forks, "ab", strict=True):
            await self.observe_messages(fork, [{"role": "user", "content": f"search {question}"}], history=history)
            await fork.generate()
            fork.finish(1.0)
        found = "found: " + " and ".join(decode(fork.token_ids).split("\n")[-1] for fork in forks)
        await self.observe_messages(root, [{"role": "user", "content": found}], history=history)
        await root.generate()
        root.finish(1.0)


def test_a_main_line_that_quotes_its_branches_is_a_fork():
    replies = {"search a": "the first", "search b": "the second", "found": "both"}
    client = RecordingClient(
        ScriptedClient(lambda prompt: next((r for q, r in replies.items() if q in prompt), "plan")),
        tree=SessionTree(decode=decode),
    )
    run_loop(Researcher, client, SAMPLING)
    assert "found: the first<|im_end|> and the second<|im_end|><|im_end|>" in client._client.prompts[-1]
    kinds = [call.kind for call in client.tree.calls]
    assert kinds == [CallKind.ROOT, CallKind.CONTINUATION, CallKind.FORK, CallKind.FORK]


async def test_order_of_leaves_does_not_depend_on_which_branch_forked_first():
    root = session(lambda _: "a").root
    left, right = root.fork(2)
    (of_right,) = right.fork()
    (of_left,) = left.fork()
    for name, branch in enumerate([root, left, right, of_right, of_left]):
        branch.finish(float(name))
    assert [output.leaf_reward for output in root._session.outputs()] == [1.0, 4.0, 2.0, 3.0, 0.0]


async def test_a_call_that_takes_too_long_fails_its_branch_with_the_limit_named():
    delay = {"delay": lambda prompt: 30.0 if "slow" in prompt else 0.0}
    running = session(lambda _: "a", call_timeout_s=0.05, client=delay)
    slow, quick = running.root.fork(2)
    slow.observe(encode("slow"))
    outputs = await asyncio.gather(slow.generate(), quick.generate())
    quick.finish(1.0)
    assert slow.failure == "the call to the LLM took longer than call_timeout_s=0.05"
    assert [(output.stop_reason, len(output.token_ids)) for output in outputs] == [("failed", 0), ("completed", 2)]
    assert [call.cause for call in running.client.tree.calls] == ["cancelled", None]
    assert len(running.outputs()) == 1


def test_fail_ends_a_branch_and_names_the_session_failure_when_no_leaf_is_left():
    class Failing(BranchingAgentLoop):
        @override
        async def run_branches(self, root, **row):
            for branch, reason in zip(root.fork(2), ("no luck", "no room"), strict=True):
                branch.fail(reason)

    with pytest.raises(SessionFailed, match="finished no branch; no luck; no room"):
        run_explore(lambda _: "x", Failing)

    class Penalised(BranchingAgentLoop):
        @override
        async def run_branches(self, root, **row):
            await root.generate()
            root.fail("gave up")
            root.finish(-1.0)

    outputs, _ = run_explore(lambda _: "x", Penalised)
    assert [output.leaf_reward for output in outputs] == [-1.0]
