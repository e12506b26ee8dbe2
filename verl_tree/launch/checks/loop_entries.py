"""Checks of what an entry of the file of agent loops names: its class, its options, a gateway agent, other hooks.

The user's modules are read, not imported (`source`).
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from verl_tree.launch.checks.arguments import Arguments, arguments_of, with_bases
from verl_tree.launch.checks.refusals import ROLLOUT, Finding, Findings, refusal_here
from verl_tree.launch.checks.source import NotInSourceError, find_target, split_target
from verl_tree.launch.command.misspelt import did_you_mean

LOOPS_KEY = f"{ROLLOUT}.agent.agent_loop_config_path"
BLACKBOX = "rollout_hooks.loops.blackbox.BlackboxAgentLoop"
VERL_BASE = "verl.experimental.agent_loop.agent_loop.AgentLoopBase"
AGENT_FORMAT = "name an async function as package.module:function"

READ_REWARDS = ("branpo", "trace")
"""Policies of `rollout_hooks.loops.places` that read the rewards of leaves during the search."""

GIVEN_BY_VERL = frozenset(
    {
        "data_config",
        "dataset_cls",
        "hf_model_type",
        "name",
        "processor",
        "server_manager",
        "tokenizer",
        "tools",
        "trainer_config",
    }
)
"""The arguments that verl's worker (`AgentLoopWorker._run_agent_loop`) gives to a loop beside its options."""


def check_entry(config: DictConfig, entry: Mapping[str, Any]) -> Findings:
    """Find what an entry names that does not exist, and options that its class does not take."""
    target, loop = entry["_target_"], entry["name"]
    try:
        found = find_target(target)
    except NotInSourceError as error:
        yield _refusal(config, f"_target_={target} of the loop {loop}: {error}")
        found = None
    taken = None if found is None else arguments_of(found)
    if found is not None and taken is not None:
        yield from _check_options(config, entry, name=found.node.name, taken=taken)
        # A subclass may choose the agent itself.
        if BLACKBOX in taken.bases and ("agent" in entry or taken.sets_up[0] == BLACKBOX):
            agent = entry.get("agent")
            problem = _agent_problem(agent) if isinstance(agent, str) else AGENT_FORMAT
            if problem is not None:
                yield _refusal(config, f"agent={agent} of the loop {loop}: {problem}")
    if entry.get("select") in READ_REWARDS and rewards_later(target):
        remedy = "reads the rewards of leaves during the search, and `leaf_reward` gives None; let it return a number"
        yield _refusal(config, f"select={entry['select']} of the loop {loop}: {remedy}, or select another policy")
    for hook in _hooks(_options(entry)):
        if lack := _hook_problem(hook):
            yield _refusal(config, f"_target_={hook['_target_']} in the loop {loop}: {lack}")


def bases_of(target: str) -> tuple[str, ...]:
    """Return the full names of a class and its bases; none if they cannot be told."""
    try:
        found = find_target(target)
    except NotInSourceError:
        return ()
    taken = None if found is None else arguments_of(found)
    return () if taken is None else taken.bases


def rewinds(target: str) -> bool:
    """Whether a loop is known to go back to places behind which tools have acted."""
    calls = (node for each in _classes(target) for node in ast.walk(each) if isinstance(node, ast.Call))
    # With `keep_rewards` only tokens are replaced.
    return any(
        ast.unparse(call.func).endswith(".rewind") and "keep_rewards" not in {word.arg for word in call.keywords}
        for call in calls
    )


def rewards_later(target: str) -> bool:
    """Whether a search is known to reward its leaves only at its end: its `leaf_reward` says nothing but None."""
    methods = (node for each in _classes(target) for node in each.body if isinstance(node, ast.AsyncFunctionDef))
    own = next((node for node in methods if node.name == "leaf_reward"), None)
    values = [] if own is None else [node.value for node in ast.walk(own) if isinstance(node, ast.Return)]
    return own is not None and all(each is None or ast.unparse(each) == "None" for each in values)


def needs_fork(target: str) -> bool:
    """Whether a tool is known to keep a state and not to fork it, as `loops.tool_environments` says it."""
    classes = _classes(target)
    own = [each for each in classes if each.name != "BaseTool"]
    methods = {each.name for node in own for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
    keeps_state = bool(methods & {"create", "release"}) and not methods >= {"snapshot", "fork"}
    said = any(isinstance(node, ast.Name) and node.id == "keeps_state" for each in own for node in ast.walk(each))
    return len(own) < len(classes) and keeps_state and not said


def _classes(target: str) -> list[ast.ClassDef]:
    """Return a class and its bases; none if they cannot be told."""
    try:
        found = find_target(target)
    except NotInSourceError:
        return []
    bases = with_bases(found) if found is not None and isinstance(found.node, ast.ClassDef) else None
    return [each.node for each in bases or [] if isinstance(each.node, ast.ClassDef)]


def _refusal(config: DictConfig, problem: str) -> Finding:
    return refusal_here(config, LOOPS_KEY, problem, brings_code=True)


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    # Names such as _target_ and _partial_ are Hydra's.
    return {name: value for name, value in arguments.items() if not (name.startswith("_") and name.endswith("_"))}


def _check_options(config: DictConfig, entry: Mapping[str, Any], *, name: str, taken: Arguments) -> Findings:
    """Find options that the class `name` does not take, and a class that does not take what verl gives."""
    known = sorted(taken.names - GIVEN_BY_VERL)
    for option, value in _options(entry).items():
        if option in taken.names | GIVEN_BY_VERL:
            continue
        lack = f"{option}={value!r} of the loop {entry['name']}: {name} has no such option"
        meant = f"{did_you_mean(option, known) or '.'} It takes: {', '.join(known) or 'none'}"
        if taken.refuses_others or not taken.takes_others:
            yield _refusal(config, lack + meant)
        else:
            yield replace(_refusal(config, f"{lack}, and verl drops it{meant}"), is_warning=True)
    missing = sorted(GIVEN_BY_VERL - taken.names)
    if VERL_BASE in taken.bases and not taken.takes_others and missing:
        remedy = f"{name}.__init__ does not take {', '.join(missing)}, which verl gives to every loop; add **kwargs"
        yield _refusal(config, f"_target_={entry['_target_']} of the loop {entry['name']}: {remedy}")


def _agent_problem(agent: str) -> str | None:
    """Return why `BlackboxAgentLoop` cannot use an agent."""
    if "${" in agent:
        return None
    target = agent.replace(":", ".", 1)
    _, name = split_target(target)
    try:
        found = find_target(target) if name else None
    except NotInSourceError as error:
        return str(error)
    is_other = found is not None and not found.node.decorator_list and not isinstance(found.node, ast.AsyncFunctionDef)
    return f"not an async function; {AGENT_FORMAT}" if is_other or not name else None


def _hooks(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects inside an option that Hydra makes from a `_target_`."""
    if isinstance(value, list):
        for each in value:
            yield from _hooks(each)
    elif isinstance(value, dict):
        if isinstance(value.get("_target_"), str):
            yield value
        for each in value.values():
            yield from _hooks(each)


def _hook_problem(hook: Mapping[str, Any]) -> str | None:
    target = hook["_target_"]
    if "${" in target:
        return None
    try:
        found = find_target(target)
    except NotInSourceError as error:
        return str(error)
    taken = None if found is None else arguments_of(found)
    if taken is None or (taken.takes_others and not taken.refuses_others):
        return None
    unknown = [name for name in _options(hook) if name not in taken.names]
    return f"it takes no {unknown[0]}{did_you_mean(unknown[0], taken.names)}" if unknown else None
