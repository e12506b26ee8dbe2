"""Where the calls of a branch begin, and the loop's keys of their states, reach the row."""

from branch_reward_cases import LIMITS, decode, encode, session, written
from scripted_llm import END, tokenizer

from rollout_hooks.capture.outputs import CALL_STATES_FIELD
from rollout_hooks.capture.rows import RowLimits


def states_of(running, limits=LIMITS):
    rows = written(running, limits)
    return {decode(row["responses"]): row["extra_fields"][CALL_STATES_FIELD] for row in rows}


async def test_forks_have_the_calls_before_and_their_own():
    running = session("ab", "c", "de")
    root = running.root
    await root.generate(state="start")
    root.observe(encode("T"))
    (fork,) = root.fork(1)
    await root.generate()
    await fork.generate(state="tool")
    root.finish(1.0)
    fork.finish(0.0)
    assert states_of(running) == {
        "abTc": [(1, "start"), (4, None)],
        "abTde": [(1, "start"), (4, "tool")],
    }


async def test_a_rewind_drops_the_calls_whose_tokens_go_and_a_restart_all():
    running = session("abc", "d", "e", "f")
    root = running.root
    await root.generate(state="first")
    root.rewind(3)  # in the middle of the turn
    await root.generate(state="second")
    (fork,) = root.fork(1)
    root.finish(1.0)
    fork.restart(encode("QR"))
    await fork.generate(state="third")
    fork.rewind(2)
    await fork.generate(state="fourth")
    fork.finish(1.0)
    assert states_of(running) == {"abd": [(1, "first"), (3, "second")], "f": [(2, "fourth")]}


async def test_a_call_without_tokens_is_none():
    running = session("ab", response_length=2)
    await running.root.generate(state="first")
    await running.root.generate(state="full")
    running.root.finish(1.0)
    limits = RowLimits(prompt_length=8, response_length=2, wants_log_probs=True)
    assert states_of(running, limits) == {"ab": [(1, "first")]}


async def test_positions_move_with_their_tokens_where_drift_is_healed():
    """The agent sends `END` back as its letters; the row has the one token that was sampled."""
    running = session("a" + END, "b")
    root = running.root
    start = root.position
    await root.generate()
    root.rewind(start)
    root.observe(encode("a") + [tokenizer().convert_tokens_to_ids(letter) for letter in END] + encode("T"))
    await root.generate(state="tool")
    root.finish(0.5)
    assert running.outputs()[0].extra_fields[CALL_STATES_FIELD] == [(2 + len(END) + 1, "tool")]
    assert states_of(running) == {"a" + END + "Tb": [(4, "tool")]}
