"""Loops with environments that fork: a leaf has the one that its tokens tell of, and nothing is left of a session."""

import asyncio
import re
from collections import Counter
from uuid import uuid4

import pytest
from loop_cases import call, response, rewards, run
from scripted_llm import decode, encode
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

from rollout_hooks.capture.outputs import SessionFailed
from rollout_hooks.environments import CopiedEnvironment, FolderEnvironment
from rollout_hooks.loops.base import BranchingAgentLoop
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.subagents import SubagentsAgentLoop
from rollout_hooks.loops.tool_turns import ToolTurnsLoop
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop
from rollout_hooks.loops.turns import text_tool

NOTE = text_tool("note", "Keep a note and read all.", "text", "The note.")


class NoteTool(BaseTool):
    """Keeps notes for as long as an instance lives, and answers a call with all of them."""

    def __init__(self):
        super().__init__({}, NOTE)
        self.notes, self.kinds = {}, Counter()

    def keep(self, kind, notes):
        self.kinds[kind] += 1
        name = uuid4().hex
        self.notes[name] = list(notes)
        return name

    async def create(self, *, create_kwargs):
        return self.keep("create", create_kwargs.get("notes", "")), ToolResponse()

    async def execute(self, instance_id, parameters, **_):
        self.notes[instance_id].append(parameters["text"])
        return ToolResponse(text="".join(self.notes[instance_id])), 0.0, {}

    async def release(self, instance_id, **_):
        del self.notes[instance_id]


class ForkingNoteTool(NoteTool):
    async def snapshot(self, instance_id):
        return self.keep("snapshot", self.notes[instance_id])

    async def fork(self, snapshot):
        return self.keep("fork", self.notes[snapshot])


class SharedNoteTool(NoteTool):
    """As tools of verl keep a state from call to call: beside the instances, for all branches."""

    keeps_state = False  # not true

    async def create(self, **_):
        self.notes.setdefault("all", [])
        return "all", ToolResponse()

    async def release(self, instance_id, **_):
        """Keep it."""


class FolderTool(BaseTool):
    """Writes a file of the session's environment, in place, and answers with what is in it."""

    def __init__(self):
        super().__init__({}, NOTE)

    async def execute(self, _, parameters, *, agent_data):
        folder = (await agent_data.environment()).state
        with (folder / "notes").open("a") as file:
            file.write(parameters["text"])
        return ToolResponse(text=(folder / "notes").read_text()), 0.0, {}


def told(output):
    """Return what the calls on a leaf's path have noted, and what the last of them read."""
    noted = "".join(re.findall(r'"text": "(.)"', response(output)))
    read = re.findall(r"\[(\w*)\]", response(output))
    return noted, read[-1] if read else ""


class Search(TreeSearchAgentLoop):
    """Searches, and looks at the notes of each leaf when all are there."""

    async def leaf_reward(self, **_):
        return None

    async def notes_of(self, leaf):
        tool = self.tools["note"]
        name = (await leaf.environment("note")).instance_id if isinstance(tool, ForkingNoteTool) else "all"
        return "".join(tool.notes[name])

    async def reward_leaves(self, leaves, **_):
        texts = [re.findall(r'"text": "(.)"', decode(leaf.token_ids)) for leaf in leaves]
        return [float("".join(text) == await self.notes_of(leaf)) for text, leaf in zip(texts, leaves, strict=True)]


class Plain(TreeSearchAgentLoop):
    async def leaf_reward(self, **_):
        return 1.0


def searching(loop=Search, *, tool, **options):
    """Search with a model that answers behind three calls, each of which notes another letter; return the rows."""
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    options = {"num_rounds": 2, "num_expansions": 2, **options}

    def reply(text):
        return "done" if text.count("<tool_call>") == 3 else call("note", text=next(letters))

    outputs, _ = run(loop, reply, options=options, more_tools=[tool])
    return outputs


def test_leaves_of_a_search_have_the_notes_that_they_tell_of_if_and_only_if_the_tool_forks():
    """M (1 + L N T) = 5 leaves."""
    outputs = searching(tool=SharedNoteTool())
    assert rewards(outputs) == [0.0] * 5
    tool = ForkingNoteTool()
    outputs = searching(tool=tool)
    assert rewards(outputs) == [1.0] * 5
    assert len({noted for noted, _ in map(told, outputs)}) >= 3
    assert all(noted == read for noted, read in map(told, outputs))
    assert tool.kinds["create"] == 1
    assert tool.notes == {}, "the end of the session releases all"


@pytest.mark.parametrize("select", ["random", "entropy"])
def test_a_folder_of_the_session_forks_and_nothing_of_it_is_left(select, tmp_path):
    (tmp_path / "source").mkdir()
    root = tmp_path / "root"

    class InFolder(Search):
        async def open_environment(self, *, row):
            assert row["uid"] == "u"
            return await asyncio.to_thread(FolderEnvironment, tmp_path / "source", root=root)

        async def notes_of(self, leaf):
            return ((await leaf.environment()).state / "notes").read_text()

    outputs = searching(InFolder, tool=FolderTool(), select=select)
    assert rewards(outputs) == [1.0] * 5
    assert not list(root.glob("*/*"))
    assert not list((tmp_path / "source").iterdir())


def test_a_place_that_others_hold_is_kept_once_and_the_first_to_go_on_takes_it_over():
    """The tree's root stays before the first call, and the leaf of the first chain behind it: two snapshots.

    prompt ── note a ──┬── done
                       └── note b ── done      the expansion goes on in the instance that the first chain has left
    """
    tool, given = ForkingNoteTool(), iter([call("note", text="a"), "done", call("note", text="b"), "done"])
    outputs, _ = run(Plain, lambda _: next(given), options={"num_expansions": 1}, more_tools=[tool])
    assert [told(output) for output in outputs] == [("a", "a"), ("ab", "ab")]
    assert tool.kinds == {"create": 1, "snapshot": 2}


def turns(number):
    return {"multi_turn__max_assistant_turns": number}


class Finishing(ToolTurnsLoop):
    async def run_branches(self, root, **row):
        if await self.converse(root, list(row["raw_prompt"]), tools=self.row_tools(row), row=row) is not None:
            root.finish(1.0)


def test_a_session_that_does_not_branch_takes_no_snapshot():
    tool = ForkingNoteTool()
    letters = iter("abc")
    outputs, _ = run(Finishing, lambda _: call("note", text=next(letters)), more_tools=[tool], **turns(3))
    assert told(outputs[0]) == ("abc", "ab")  # the call of the last turn is not made
    assert tool.kinds == {"create": 1}


def test_the_limit_of_snapshots_ends_branches_and_names_the_option():
    tool = ForkingNoteTool()
    with pytest.raises(
        SessionFailed, match=r"its environment: .*max_snapshots=0: the session holds as many.*raise the opt"
    ):
        searching(tool=tool, max_snapshots=0)
    assert tool.notes == {}
    tool = ForkingNoteTool()
    outputs = searching(Plain, tool=tool, max_snapshots=3)  # those of the first chain
    assert 1 <= len(outputs) < 5
    assert all(noted == read for noted, read in map(told, outputs))
    assert tool.kinds["snapshot"] == 3


def test_a_tool_with_a_state_that_does_not_fork_is_refused_by_name():
    with pytest.raises(SessionFailed, match=r"tool 'note' keeps a state.*give NoteTool the methods `snapshot`"):
        searching(tool=NoteTool())
    letters = iter("ab")
    outputs, _ = run(Finishing, lambda _: call("note", text=next(letters)), more_tools=[NoteTool()], **turns(2))
    assert told(outputs[0]) == ("ab", "a")  # alone with it


def test_a_session_that_fails_or_is_cancelled_releases_what_it_has():
    tool = ForkingNoteTool()

    class Failing(Search):
        async def leaf_reward(self, **_):
            raise LookupError("no reward")

    with pytest.raises(SessionFailed, match="no reward"):
        searching(Failing, tool=tool)
    assert tool.kinds["create"] == 1
    assert tool.notes == {}


def test_subagents_act_in_the_environment_of_their_parent():
    tool = ForkingNoteTool()

    def reply(text):
        if "subagent" in text.partition("assistant")[0]:
            return "noted" if "[" in text else call("note", text="c")
        if "[noted]" in text:
            return "done" if "[acd]" in text else call("note", text="d")
        return call("spawn", task="t") if "[a]" in text else call("note", text="a")

    outputs, _ = run(SubagentsAgentLoop, reply, more_tools=[tool])
    assert [re.findall(r"\[(\w+)\]", response(output)) for output in outputs] == [["ac"], ["a", "noted", "acd"]]
    assert tool.kinds == {"create": 1}


def test_a_context_that_begins_anew_goes_on_in_the_same_environment():
    tool, letters = ForkingNoteTool(), iter("abc")
    outputs, client = run(MemoryAgentLoop, lambda _: call("note", text=next(letters)), more_tools=[tool], **turns(3))
    assert len(outputs) == 3
    assert "[ab]" in client._client.prompts[-1]
    assert tool.kinds == {"create": 1}


class Cursor(BranchingAgentLoop):
    """A session of nothing but environments: `steps` are run on its root."""

    steps = None

    async def open_environment(self, **_):
        return CopiedEnvironment([])

    async def run_branches(self, root, **_):
        await type(self).steps(root)
        root.finish(1.0)


async def act(branch, note):
    (await branch.environment()).state.append(note)
    branch.observe(encode(note))


async def look(branch):
    return "".join((await branch.environment()).state)


def steer(steps):
    run(type("Steered", (Cursor,), {"steps": staticmethod(steps)}), lambda _: "x")


def test_a_branch_goes_back_to_what_was_kept_and_no_farther():
    async def steps(root):
        await root.generate()
        start = root.position
        (fork,) = root.fork()
        await act(root, "a")
        between = root.position
        await act(root, "b")
        root.rewind(between + 1)  # behind "b", whose act is before it
        assert await look(root) == "ab"
        with pytest.raises(ValueError, match=rf"rewind\({between - 1}\): what the environment was there has not been"):
            root.rewind(between - 1)
        root.rewind(start - 1)  # where the fork was
        assert await look(root) == ""
        await act(fork, "c")
        (inner,) = fork.fork()
        await act(fork, "d")
        await act(inner, "e")
        assert [await look(each) for each in (root, fork, inner)] == ["", "cd", "ce"]

    steer(steps)


def test_tokens_that_are_only_replaced_leave_the_environment_as_it_is():
    """As where a chat template takes the stop token of a turn away, behind which a tool has acted."""

    async def steps(root):
        await root.generate()
        (branch,) = root.fork()
        end = branch.position
        (await branch.environment()).state.append("a")
        branch.rewind(end - 1, keep_rewards=True)
        assert await look(branch) == "a"
        branch.observe(encode("result"))
        branch.rewind(end)  # inside the result
        assert await look(branch) == "a"
        branch.rewind(end - 2)
        assert await look(branch) == await look(root) == ""

    steer(steps)


def test_calls_at_the_same_time_act_in_one_environment_and_branches_each_in_their_own():
    class Slow(CopiedEnvironment):
        async def snapshot(self):
            await asyncio.sleep(0.01)
            return await super().snapshot()

    class Concurrent(Cursor):
        async def open_environment(self, **_):
            await asyncio.sleep(0.01)
            return Slow([])

        @staticmethod
        async def steps(root):
            await root.generate()
            forks = root.fork(3)
            await asyncio.gather(*(act(branch, note) for branch in forks for note in "ab"))
            assert [sorted(await look(branch)) for branch in forks] == [["a", "b"]] * 3
            assert await look(root) == ""

    run(Concurrent, lambda _: "x")


def test_a_branch_that_shares_acts_in_the_other_and_its_own_forks_do_not():
    async def steps(root):
        await root.generate()
        await act(root, "a")
        (child,) = root.fork(shares_environment=True)
        child.restart(encode("task"))
        await act(child, "b")
        child.rewind(1)  # of its tokens alone
        (fork,) = child.fork()
        await act(fork, "c")
        assert [await look(each) for each in (root, child, fork)] == ["ab", "ab", "abc"]

    steer(steps)


def test_a_loop_without_an_environment_says_what_to_override():
    class Bare(BranchingAgentLoop):
        async def run_branches(self, root, **_):
            await root.environment()

    with pytest.raises(SessionFailed, match="Bare has no environment: override open_environment"):
        run(Bare, lambda _: "x")
