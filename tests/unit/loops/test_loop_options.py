"""The options of the built-in loops, and the names under which verl knows the loops."""

import functools

import pytest
from scripted_llm import ScriptedClient, make_loop
from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

from rollout_hooks.loops.blackbox import BlackboxAgentLoop
from rollout_hooks.loops.compaction import CompactionAgentLoop
from rollout_hooks.loops.memory import MemoryAgentLoop
from rollout_hooks.loops.parallel_tools import ParallelToolsAgentLoop
from rollout_hooks.loops.subagents import SubagentsAgentLoop
from rollout_hooks.loops.tree_search import TreeSearchAgentLoop

LOOPS = {
    "blackbox": BlackboxAgentLoop,
    "compaction": CompactionAgentLoop,
    "memory": MemoryAgentLoop,
    "parallel_tools": ParallelToolsAgentLoop,
    "subagents": SubagentsAgentLoop,
    "tree_search": TreeSearchAgentLoop,
}


def make(loop_class, options, **rollout):
    settings = {"prompt_length": 1024, "response_length": 1024, "multi_turn__max_assistant_turns": 6, **rollout}
    return make_loop(functools.partial(loop_class, **options), ScriptedClient(lambda _: "x"), **settings)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_are_registered_with_verl(name):
    module, _, loop_class = _agent_loop_registry[name]["_target_"].rpartition(".")
    assert (module, loop_class) == (f"rollout_hooks.loops.{name}", LOOPS[name].__name__)


@pytest.mark.parametrize(
    ("loop_class", "options", "message"),
    [
        (CompactionAgentLoop, {"max_context_len": 0}, "max_context_len=0"),
        (CompactionAgentLoop, {"max_context_len": 2048}, "below rollout.prompt_length"),
        (CompactionAgentLoop, {"max_summary_len": 0}, "max_summary_len=0"),
        (MemoryAgentLoop, {"max_notes": -1}, "max_notes=-1"),
        (MemoryAgentLoop, {"max_found": 0}, "max_found=0"),
        (ParallelToolsAgentLoop, {"max_turn_len": 0}, "max_turn_len=0"),
        (ParallelToolsAgentLoop, {"tool_errors": "hide"}, "tool_errors='hide'"),
        (
            ParallelToolsAgentLoop,
            {"tool_rewards": "train"},
            r"='train': must be one of \('report', 'add'\)",
        ),
        (ParallelToolsAgentLoop, {"leaf_roles": "yes"}, "leaf_roles='yes': must be true or false"),
        (SubagentsAgentLoop, {"max_children": 0}, "max_children=0"),
        (SubagentsAgentLoop, {"max_depth": 0}, "max_depth=0"),
        (TreeSearchAgentLoop, {"num_trees": 0}, "num_trees=0"),
        (TreeSearchAgentLoop, {"num_expansions": 0}, "num_expansions=0"),
        (TreeSearchAgentLoop, {"num_samples": 0}, "num_samples=0"),
        (TreeSearchAgentLoop, {"num_rounds": -1}, "num_rounds=-1"),
        (TreeSearchAgentLoop, {"select": "best"}, "select='best'"),
        (SubagentsAgentLoop, {"max_snapshots": -1}, "max_snapshots=-1: must be at least 0, or null"),
        (ParallelToolsAgentLoop, {"call_timeout_s": 0}, "call_timeout_s=0: must be a number"),
        (ParallelToolsAgentLoop, {"call_timeout_s": "5"}, "call_timeout_s='5': must be a number"),
    ],
)
def test_options_are_checked(loop_class, options, message):
    with pytest.raises(ValueError, match=message):
        make(loop_class, options)


@pytest.mark.parametrize("loop_class", [CompactionAgentLoop, MemoryAgentLoop])
def test_a_loop_that_would_not_end_needs_a_limit_of_turns(loop_class):
    with pytest.raises(ValueError, match="max_assistant_turns=null"):
        make(loop_class, {}, multi_turn__max_assistant_turns=None)


def test_an_entry_of_the_loops_file_makes_a_loop():
    """The whole entry, its name included, is handed on by verl."""
    make(ParallelToolsAgentLoop, {"name": "mine", "call_timeout_s": 5})


@pytest.mark.parametrize(
    ("loop_class", "option", "meant"),
    [
        (
            ParallelToolsAgentLoop,
            "call_timeout",
            "did you mean call_timeout_s[?] It takes: .*tool_errors",
        ),
        (MemoryAgentLoop, "max_note", "did you mean max_notes[?]"),
        (TreeSearchAgentLoop, "num_tree", "did you mean num_trees[?] .*tool_errors"),
        (BlackboxAgentLoop, "agents", "did you mean agent[?]"),
    ],
)
def test_a_misspelt_option_is_refused(loop_class, option, meant):
    with pytest.raises(ValueError, match=f"{option}=5: {loop_class.__name__} has no such option; {meant}"):
        make(loop_class, {option: 5})
