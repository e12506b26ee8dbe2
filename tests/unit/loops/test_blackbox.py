"""The loop `blackbox`: agents written with the public `openai` client, on verl's client with scripted answers."""

import asyncio

import anthropic
import hydra
import openai
import pytest
from gateway_cases import TOOLS, user
from omegaconf import OmegaConf
from scripted_llm import END, ScriptedClient, call_text, row, run_loop, tokenizer
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from rollout_hooks.capture.outputs import CALL_STATES_FIELD, SessionFailed
from rollout_hooks.capture.recording import RecordingClient
from rollout_hooks.capture.roles import ROLE
from rollout_hooks.capture.rows import CALLS_FIELD, LEFT_OUT_FIELD, RowLimits, session_rows
from rollout_hooks.capture.session_tree import CallStatus, SessionTree
from rollout_hooks.gateway.app import ROLE_HEADER
from rollout_hooks.loops.blackbox import BlackboxAgentLoop

pytestmark = pytest.mark.timeout(60)

LIMITS = RowLimits(prompt_length=256, response_length=256, wants_log_probs=True)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "logprobs": True}
TURN = call_text(3) + call_text(4)


async def agent(*, base_url, api_key, model, row):
    """Asks aside, lets the model call two tools, answers; what it returns is what the row says."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        create = client.chat.completions.create
        messages = list(row["raw_prompt"])
        first = await create(model=model, messages=messages, tools=TOOLS)
        aside = await create(model=model, messages=user("aside"))
        message = first.choices[0].message
        messages += [message.model_dump(exclude_none=True)]
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "[6]"} for c in message.tool_calls]
        final = await create(model=model, messages=messages, tools=TOOLS)
    ids = {"first": first.id, "aside": aside.id, "final": final.id}
    result = row["returns"]
    if isinstance(result, Exception):
        raise result
    if isinstance(result, dict) and "leaf_rewards" in result:
        return {**result, "leaf_rewards": {ids[name]: value for name, value in result["leaf_rewards"].items()}}
    return result


async def sleeper(*, base_url, api_key, model, row):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model=model, messages=row["raw_prompt"])
        await asyncio.sleep(60)


async def quitter(*, base_url, api_key, model, row):
    """Goes away while its call runs."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        asked = asyncio.create_task(client.chat.completions.create(model=model, messages=row["raw_prompt"]))
        while not row["scripted"].num_running:
            await asyncio.sleep(0.01)
        asked.cancel()
    return 1.0


async def twice(*, base_url, api_key, model, row):
    """Asks the same twice."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        first = await client.chat.completions.create(model=model, messages=row["raw_prompt"])
        second = await client.chat.completions.create(model=model, messages=row["raw_prompt"])
    return {"leaf_rewards": {first.id: 1.0, second.id: -1.0}}


async def silent(**_):
    return 1.0


def not_async(**_):
    return 1.0


def loop_class(agent="agent", **settings):
    class Loop(BlackboxAgentLoop):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, agent=f"{__name__}:{agent}", **settings, **kwargs)

    return Loop


def reply(prompt):
    if "aside" in prompt:
        return "beside"
    return "6 and 6" if "[6]" in prompt else TURN


def capture(returns=None, *, loop=None, sampling=SAMPLING, script=reply, delay=None, num_dropped=0, **options):
    """Run the loop and make the rows as the worker does; return the rows and the tree, which has these options."""
    tree = SessionTree(decode=tokenizer().decode, **options)
    client = RecordingClient(ScriptedClient(script, delay), tree=tree)
    client.scripted = client._client
    outputs = run_loop(loop or loop_class(), client, sampling, row=row(returns=returns, scripted=client.scripted))
    rows = session_rows(client.tree, outputs, limits=LIMITS)
    assert rows.num_dropped == num_dropped
    return rows.outputs, client


def text(output):
    trained = [token for token, mask in zip(output.response_ids, output.response_mask, strict=True) if mask]
    return tokenizer().decode(trained)


def test_leaves_are_rows_and_the_agents_number_is_the_reward_of_all():
    rows, client = capture(0.5)
    assert [text(each) for each in rows] == ["beside" + END, TURN + END + "6 and 6" + END]
    assert [(each.leaf_reward, each.reward_score) for each in rows] == [(0.5, 0.5)] * 2
    assert all(len(each.response_logprobs) == len(each.response_ids) for each in rows)
    assert len(set(client.scripted.request_ids)) == 1
    assert {params["max_tokens"] for params in client.scripted.sampling_params} == {256}


def test_without_a_reward_verl_scores_the_last_leaf():
    rows, _ = capture(None)
    assert [(each.leaf_reward, each.reward_score) for each in rows] == [(None, None)] * 2
    assert text(rows[-1]) == TURN + END + "6 and 6" + END


def test_rewards_of_single_leaves_and_what_is_reported_with_them():
    rows, _ = capture({"reward": 1, "leaf_rewards": {"aside": -1.0}, "acc": 0.0})
    assert [each.leaf_reward for each in rows] == [-1.0, 1.0]
    assert [each.leaf_reward_extra_info for each in rows] == [{"acc": 0.0}] * 2
    assert [each.as_dict()["extra_fields"]["reward_extra_info"] for each in rows] == [{"acc": 0.0}] * 2
    with pytest.raises(ValueError, match="no leaf of the session ends with that response"):
        capture({"leaf_rewards": {"first": 1.0}})


def test_an_answer_that_the_agent_drops_makes_no_row():
    rows, _ = capture({"reward": 1.0, "leaf_rewards": {"aside": "drop"}}, num_dropped=1)
    assert [(text(each), each.leaf_reward) for each in rows] == [(TURN + END + "6 and 6" + END, 1.0)]
    ((reason, _, token_ids, ((call, *_),), _),) = rows[-1].extra_fields[LEFT_OUT_FIELD]
    assert (reason, call, tokenizer().decode(token_ids)[-16:]) == ("dropped", 1, "beside" + END)
    assert all(LEFT_OUT_FIELD not in row.extra_fields for row in rows[:-1])
    # What led to a dropped answer was not dropped.
    rows, _ = capture({"reward": 1.0, "leaf_rewards": {"final": "drop"}}, num_dropped=1)
    assert [text(each) for each in rows] == [TURN + END, "beside" + END]
    assert [LEFT_OUT_FIELD in row.extra_fields for row in rows] == [False, True]
    with pytest.raises(ValueError, match="no leaf of the session ends with that response"):
        capture({"leaf_rewards": {"first": "drop"}})


async def chooser(*, base_url, api_key, model, row):
    """Ask for three candidates and drop those that the row names."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        answer = await client.chat.completions.create(model=model, messages=row["raw_prompt"], n=3)
    dropped = {f"{answer.id}/{choice.index}": "drop" for choice in answer.choices if choice.index in row["returns"]}
    return {"reward": 1.0, "leaf_rewards": dropped}


async def asks_with_roles(*, base_url, api_key, model, row):
    """Asks over all protocols; what a planner began, a call without a role ends."""
    del row
    roles = [{"default_headers": {ROLE_HEADER: name}} for name in ("aside/1", "planner")]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        aside, planner = (client.with_options(**options) for options in roles)
        await aside.chat.completions.create(model=model, messages=user("aside"), n=2)
        first = await planner.responses.create(model=model, input="q")
        await client.responses.create(model=model, input="on", previous_response_id=first.id)
        await planner.responses.create(model=model, input="other")
    url = base_url.removesuffix("/v1")
    async with anthropic.AsyncAnthropic(base_url=url, api_key=api_key, max_retries=0) as client:
        headers = {ROLE_HEADER: "critic"}
        ask = client.messages.create
        await ask(model=model, max_tokens=9, messages=user("aside, please"), extra_headers=headers)
        dropped = await ask(model=model, max_tokens=9, messages=user("aside, too"), extra_headers=headers)
    return {"reward": 1.0, "leaf_rewards": {dropped.id: "drop"}}


def test_a_header_names_the_role_of_the_leaf_that_a_call_ends():
    rows, _ = capture(loop=loop_class("asks_with_roles"), num_dropped=1)
    # The first two sampled the same; the third began as a planner's, and its last call has no header.
    assert [row.extra_fields.get(ROLE) for row in rows] == ["aside/1", "aside/1", None, "planner", "critic"]
    assert ROLE not in rows[2].extra_fields
    assert [leaf.role for leaf in rows[-1].extra_fields[LEFT_OUT_FIELD]] == ["critic"]


def test_a_candidate_among_several_is_chosen():
    rows, _ = capture((0, 2), loop=loop_class("chooser"), num_dropped=2)
    assert [output.extra_fields[CALLS_FIELD][-1][0] for output in rows] == [1]
    with pytest.raises(SessionFailed, match="or dropped all"):
        capture((0, 1, 2), loop=loop_class("chooser"))


def test_calls_that_sampled_the_same_are_leaves_with_rewards_of_their_own():
    rows, _ = capture(loop=loop_class("twice"))
    assert [(text(each), each.leaf_reward) for each in rows] == [(TURN + END, 1.0), (TURN + END, -1.0)]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("1.0", "return a number, None, or a mapping"),
        ({"score": 1.0}, "return a number, None, or a mapping"),
        (float("nan"), "must be finite"),
        ({"leaf_rewards": {"aside": float("inf")}}, "must be finite"),
        ({"leaf_rewards": {"aside": "much"}}, "a reward is a number"),
        ({"reward": 1.0, 2: 3.0}, "its keys names"),
        (10**400, "must be finite"),
    ],
)
def test_other_results_are_refused(returns, message):
    with pytest.raises(ValueError, match=message):
        capture(returns)


def test_an_agent_that_fails_fails_its_session():
    with pytest.raises(SessionFailed, match="KeyError: 'tool'"):
        capture(KeyError("tool"))
    with pytest.raises(SessionFailed, match="ran longer than timeout_s"):
        capture(loop=loop_class("sleeper", timeout_s=0.5))
    with pytest.raises(SessionFailed, match="no call that gave a token"):
        capture(loop=loop_class("silent"))


def test_calls_of_clients_that_went_away_are_waited_for():
    rows, client = capture(loop=loop_class("quitter"), delay=lambda _: 0.6, keeps_abandoned=True)
    assert [text(each) for each in rows] == [TURN + END]
    assert [call.status for call in client.tree.calls] == [CallStatus.COMPLETED]
    with pytest.raises(SessionFailed, match="no call that gave a token"):
        capture(loop=loop_class("quitter", drain_s=0.05), delay=lambda _: 0.6, keeps_abandoned=True)
    with pytest.raises(SessionFailed, match="read no answer to its end"):
        capture(loop=loop_class("quitter"), delay=lambda _: 0.6)


def test_fixed_sampling_and_unusable_settings():
    _, client = capture(0.0, loop=loop_class(fixed_sampling=["temperature"]))
    assert {params["temperature"] for params in client.scripted.sampling_params} == {1.0}
    with pytest.raises(ValueError, match="agent=None: name an async function"):
        run_loop(BlackboxAgentLoop, client, SAMPLING)
    with pytest.raises(ValueError, match="is not an async function"):
        capture(loop=loop_class("not_async"))
    with pytest.raises(ValueError, match="timeout_s=0"):
        capture(loop=loop_class(timeout_s=0))
    with pytest.raises(ValueError, match="agent_loop_manager_class"):
        run_loop(loop_class(), ScriptedClient(reply), SAMPLING, row=row(returns=0.0))


def test_an_entry_of_the_loop_configuration_makes_the_loop():
    """As verl's worker makes it: Hydra with the entry's own keys, lists included."""
    entry = {"name": "mine", "_target_": _agent_loop_registry["blackbox"]["_target_"], "agent": f"{__name__}:agent"}
    entry |= {"timeout_s": 30, "fixed_sampling": ["temperature"]}
    client = RecordingClient(ScriptedClient(reply), tree=SessionTree(decode=tokenizer().decode))

    def make(**kwargs):
        return hydra.utils.instantiate(config=OmegaConf.create(entry), **kwargs)

    (first, last) = run_loop(make, client, SAMPLING, row=row(returns=0.5))
    assert (text(first), last.leaf_reward) == ("beside" + END, 0.5)


async def naming(*, base_url, api_key, model, row):
    """Names the state of its environment in two of three calls, the last of which another client makes."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(messages, **headers):
            answer = await client.chat.completions.create(model=model, messages=messages, extra_headers=headers)
            return [*messages, {"role": "assistant", "content": answer.choices[0].message.content}, *user("on")]

        messages = await ask(row["raw_prompt"], **{"X-Environment-State": "room 1"})
        messages = await ask(await ask(messages), **{"X-Environment-State": "room 2"})
        await ask(user("aside"))
    return 1.0


def test_states_that_an_agent_names_in_a_header_are_those_of_its_calls():
    client = RecordingClient(ScriptedClient(lambda _: "a"), tree=SessionTree(decode=tokenizer().decode))
    outputs = run_loop(loop_class("naming"), client, SAMPLING, row=row())
    named, aside = outputs
    states = named.extra_fields[CALL_STATES_FIELD]
    assert [key for _, key in states] == ["room 1", None, "room 2"]
    assert [start for start, _ in states] == [start for _, _, start, *_ in named.extra_fields[CALLS_FIELD]]
    assert CALL_STATES_FIELD not in aside.extra_fields
    again = session_rows(client.tree, outputs, limits=LIMITS).outputs
    assert again[0].extra_fields[CALL_STATES_FIELD] == states
