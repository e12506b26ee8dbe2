"""Checks that the user's agent loops and tools exist; `objects` has rewards and data sets.

A user's module may need what only Ray's processes have, so it is read (`source`) and only the packages around it are
imported. What is missing is only a warning where those processes may be on other machines or bring modules along.
"""

import ast
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_tree.launch.checks.loop_entries import (
    AGENT_FORMAT,
    LOOPS_KEY,
    bases_of,
    check_entry,
    needs_fork,
    rewinds,
)
from verl_tree.launch.checks.refusals import (
    DATA_KEYS,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    columns,
    data_files,
    missing,
    refusal,
    refusal_here,
    value_of,
)
from verl_tree.launch.checks.source import NotInSourceError, look_up, module_problem, source_of, way_to
from verl_tree.launch.command.composition import prompt_router
from verl_tree.launch.command.misspelt import did_you_mean

DEFAULT_LOOP_KEY = f"{ROLLOUT}.agent.default_agent_loop"
MANAGER_KEY = f"{ROLLOUT}.agent.agent_loop_manager_class"
TOOL_KEYS = (f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.function_tool_path")
CUTTING = ("single_turn_agent", "tool_agent", "parallel_tools", "subagents", "tree_search")
CUTS, MEMORY = "rollout_hooks.loops.base.BranchingAgentLoop", "rollout_hooks.loops.memory.MemoryAgentLoop"
"""Loops that cut a row's prompt, and the base class that does; `memory` writes a prompt anew."""
ROUTER_KEY = f"{ROLLOUT}.router_config_path"
TREE_ROUTER = "rollout_hooks.capture.prompt_router.PromptRouter"
TREE_SEARCH = "rollout_hooks.loops.tree_search.TreeSearchAgentLoop"
TREE_MANAGER = "rollout_hooks.worker.TreeAgentLoopManager"
LOOPS_FORMAT = "it must be a YAML list, each entry with `name` and `_target_` (docs/agent_loops.md)"


def check_manager(config: DictConfig) -> Findings:
    """Find an agent loop manager that does not exist, and say what is lost with another one than ours."""
    manager = value_of(config, MANAGER_KEY)
    if manager == TREE_MANAGER:
        return
    if manager and (problem := _class_problem(manager)):
        yield refusal_here(config, MANAGER_KEY, problem, brings_code=True)
    lost = (
        f"the rows that it writes are trained as trees. Unless it is a subclass of {TREE_MANAGER}, calls are not "
        "recorded: branches that a loop does not return are lost, tree.drift has no effect, and nobody reports why "
        "sessions failed (docs/capture.md, Rows that others make)"
    )
    yield Finding(f"{MANAGER_KEY}={manager}: {lost}", is_warning=True)
    if value_of(config, "reward.num_workers") == 0:
        fails = "verl's agent loop workers fail every session whose loop gives no reward; set 1 or more"
        yield Finding(f"reward.num_workers=0: {fails}", is_warning=True)


def _class_problem(path: str) -> str | None:
    """Return why a path names no class, or None."""
    from verl.utils.import_utils import load_class_from_fqn

    if problem := module_problem(path):
        return f"{problem}; {way_to(path)}"
    module, name = path.rpartition(".")[::2]
    try:
        source = source_of(module)
        found = look_up(source, name)
        # What is compiled may be imported: it is none of the user's.
        is_other = not isinstance(load_class_from_fqn(path), type) if source is None else False
    except (NotInSourceError, AttributeError) as error:
        return f"{error}; name a class"
    is_function = found is not None and not isinstance(found.node, ast.ClassDef)
    return "this is no class; name one" if is_other or is_function else None


def check_router(config: DictConfig) -> Findings:
    """Find a router's file or class that does not exist, and what ours cannot take, before servers start."""
    import yaml

    name = value_of(config, ROUTER_KEY)
    if not name:
        return
    path = _config_file(name)
    if path is None:
        yield refusal_here(config, ROUTER_KEY, missing(name, "file"))
        return
    try:
        settings = yaml.safe_load(path.read_text())
        router = settings["router_class"]
        if problem := _class_problem(router):
            yield refusal_here(config, ROUTER_KEY, f"router_class={router}: {problem}", brings_code=True)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError):
        yield refusal(config, ROUTER_KEY, "it must be YAML with `router_class`, the path of a class")
        return
    if router == TREE_ROUTER:
        yield from _check_prompt_router(config, settings, is_packaged=name == prompt_router(False))


def _check_prompt_router(config: DictConfig, settings: dict[str, Any], *, is_packaged: bool) -> Findings:
    if not is_packaged:  # else every start would import the router and Ray
        from rollout_hooks.capture.prompt_router import PromptRouter

        try:
            PromptRouter({}, settings)
        except ValueError as error:
            yield refusal(config, ROUTER_KEY, str(error))
    if value_of(config, f"{ROLLOUT}.full_determinism"):
        lost = f"it chooses by how busy servers are, which {ROLLOUT}.full_determinism=True excludes; set null"
        yield refusal(config, ROUTER_KEY, lost)


def check_agent_loops(config: DictConfig) -> Findings:
    """Check the file of agent loops, what its entries name, and the names of the loops that rows run."""
    entries, problem = _read_loops(config)
    if problem is not None:
        yield problem
        return
    for entry in entries:
        yield from check_entry(config, entry)
    in_file = {entry["name"] for entry in entries}
    unknown = [(key, name) for key, name in _loops_in_use(config) if name not in in_file]
    registered = _registered_loops(config) if unknown else None
    if registered is None:
        return
    known = sorted({*in_file, *registered})
    for key, name in unknown:
        column = "" if key == DEFAULT_LOOP_KEY else f"the column agent_name has {name!r}: "
        if name not in known:
            meant = did_you_mean(str(name), known)  # a column may have anything
            remedy = f"choose one of {', '.join(known)}, or add it to the file of {LOOPS_KEY}"
            yield refusal_here(config, key, f"{column}no such agent loop{meant or ';'} {remedy}", brings_code=True)
        elif name == "blackbox":
            remedy = f"it has no agent; {AGENT_FORMAT} in an entry of {LOOPS_KEY} (docs/gateway.md)"
            yield refusal(config, key, f"{column}{remedy}")


def _read_loops(config: DictConfig) -> tuple[list[dict[str, Any]], Finding | None]:
    """Return the entries of the file of agent loops, or what is wrong with it."""
    import yaml

    name = value_of(config, LOOPS_KEY)
    if not name:
        return [], None
    path = _config_file(name)
    if path is None:
        return [], refusal_here(config, LOOPS_KEY, missing(name, "file"))
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path))
    except yaml.YAMLError as error:
        return [], refusal(config, LOOPS_KEY, f"{LOOPS_FORMAT}, but it is not YAML: {error}")
    if not isinstance(entries, list) or not entries:
        return [], refusal(config, LOOPS_KEY, LOOPS_FORMAT)
    for number, entry in enumerate(entries, start=1):
        lacks = [each for each in ("name", "_target_") if not isinstance(entry, dict) or not entry.get(each)]
        if lacks:
            return [], refusal(config, LOOPS_KEY, f"{LOOPS_FORMAT}; entry {number} lacks {', '.join(lacks)}")
    return entries, None


def _loops_in_use(config: DictConfig) -> list[tuple[str, Any]]:
    """Return (option, name) of every loop that rows run: those of data files, and the default if a file has none."""
    import pyarrow
    import pyarrow.parquet

    named, has_unnamed = {}, False
    for key in DATA_KEYS:
        for name in data_files(config, key):
            if "agent_name" in columns(name):
                column = pyarrow.parquet.read_table(name, columns=["agent_name"]).column(0)
                # Lists and structs, which are no names, cannot be compared.
                values = column[:1] if pyarrow.types.is_nested(column.type) else column.unique()
                named |= {(key, each if each is None else str(each)): None for each in values.to_pylist()}
            else:
                has_unnamed = True
    default = [(DEFAULT_LOOP_KEY, value_of(config, DEFAULT_LOOP_KEY))] if has_unnamed else []
    return [*default, *named]


def cuts_prompts(config: DictConfig) -> bool:
    """Whether a loop in use is known to cut a row's prompt to `rollout.prompt_length` and to go on from it."""
    targets = {entry["name"]: entry["_target_"] for entry in _read_loops(config)[0]}

    def cuts(name: str) -> bool:
        if name not in targets:
            return name in CUTTING
        bases = bases_of(targets[name])
        return CUTS in bases and MEMORY not in bases

    return any(cuts(name) for _, name in _loops_in_use(config))


def _registered_loops(config: DictConfig) -> list[str] | None:
    """Return the loops that every agent loop worker knows; None if the manager has no workers of verl's.

    verl's workers know verl's loops and those that the manager's module registers, as ours does.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopManager, _agent_loop_registry
    from verl.utils.import_utils import load_class_from_fqn

    from rollout_hooks.loops import register_built_in

    manager = value_of(config, MANAGER_KEY)
    if manager == TREE_MANAGER:
        # As its module does, which also imports vLLM: that takes 3 s.
        register_built_in()
    elif manager and (_class_problem(manager) or not issubclass(load_class_from_fqn(manager), AgentLoopManager)):
        # `check_manager` refuses the first.
        return None
    return list(_agent_loop_registry)


def check_tool_format(config: DictConfig) -> Findings:
    """Look up the format of tool calls, where rows run other loops than verl's for plain answers."""
    key = f"{ROLLOUT}.multi_turn.format"
    # The default exists. Looking up another name takes an import that the driver does not need otherwise.
    if value_of(config, key) == "hermes":
        return
    in_use = {name for _, name in _loops_in_use(config)}
    if in_use == {"single_turn_agent"}:
        return
    from verl.experimental.agent_loop.tool_parser import ToolParser

    known = ToolParser._registry
    if value_of(config, key) not in known:
        # A module with a loop or an agent of the user's may register a parser when it is imported.
        users = {entry["name"] for entry in _read_loops(config)[0]}
        may_register = bool(in_use & users) or value_of(config, MANAGER_KEY) != TREE_MANAGER
        remedy = f"no such format of tool calls; choose one of {', '.join(known)}"
        if may_register:
            remedy = f"{remedy} (a warning only: your code may register it)"
        yield Finding(f"{key}={value_of(config, key)}: {remedy}", is_warning=may_register)


def check_tools(config: DictConfig) -> Findings:
    """Warn of loops that call tools, where there are none."""
    if any(value_of(config, key) for key in TOOL_KEYS):
        return
    for key, name in _loops_in_use(config):
        if name in ("parallel_tools", "tool_agent") and name not in {each["name"] for each in _read_loops(config)[0]}:
            message = f"it has no tools to call, so every session is one answer; name a file of them in {TOOL_KEYS[0]}"
            yield Finding(f"{key}={value_of(config, key)}: {message}", is_warning=True)


def check_tool_files(config: DictConfig) -> Findings:
    """Find files of tools that do not exist."""
    for key in TOOL_KEYS:
        name = value_of(config, key)
        if name and _config_file(name) is None:
            yield refusal_here(config, key, missing(name, "file"))


def check_tool_classes(config: DictConfig) -> Findings:
    """Find classes of tools whose modules do not exist, and those that keep a state where a loop goes back.

    `check_tool_files` names a missing file.
    """
    import yaml

    key = TOOL_KEYS[0]
    form = "it must have `tools`, a YAML list of entries with `class_name`"
    path = _config_file(value_of(config, key)) if value_of(config, key) else None
    if path is None:
        return
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        yield refusal(config, key, f"{form}, but it is not YAML: {error}")
        return
    tools = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(tools, list):
        yield refusal(config, key, form)
        return
    for number, tool in enumerate(tools, start=1):
        name = tool.get("class_name") if isinstance(tool, dict) else None
        if not isinstance(name, str):
            yield refusal(config, key, f"{form}; entry {number} lacks it")
        elif problem := module_problem(name):
            yield refusal_here(config, key, f"class_name={name}: {problem}; {way_to(name)}", brings_code=True)
        elif needs_fork(name):
            for loop in _rewinding_loops(config):
                problem = (
                    f"class_name={name}: it keeps a state, and the loop {loop} goes back to where it was another; give "
                    "it `snapshot` and `fork`, or `keeps_state = False` if nothing of a call is there in the next one "
                    "(docs/own_loop.md, Environments)"
                )
                yield refusal_here(config, key, problem, brings_code=True)


def _rewinding_loops(config: DictConfig) -> list[str]:
    """Return the names of loops that rows run and that go back to earlier places of a session."""
    targets = {"tree_search": TREE_SEARCH} | {entry["name"]: entry["_target_"] for entry in _read_loops(config)[0]}
    return [name for name in {name: None for _, name in _loops_in_use(config)} if rewinds(targets.get(name, ""))]


def _config_file(name: str) -> Path | None:
    """Return the file that verl will read, or None if it does not exist."""
    from verl.utils.import_utils import resolve_config_path

    try:
        path = Path(resolve_config_path(name))
    except FileNotFoundError:
        return None
    return path if path.is_file() else None


CHECKS: tuple[Check, ...] = (
    check_manager,
    check_router,
    check_agent_loops,
    check_tool_format,
    check_tools,
    check_tool_files,
    check_tool_classes,
)
