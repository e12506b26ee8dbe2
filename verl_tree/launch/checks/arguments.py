"""Which arguments a class or function takes, told from its source; see `source`."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace

from verl_tree.launch.checks.source import Found, NotInSourceError, look_up

_REFUSES = "refuse_unknown_options"
"""`rollout_hooks.loops.base`: a class whose `__init__` calls it refuses what no class of its bases takes."""
_MAX_BASES = 32
_WITHOUT_INIT = {"ABC", "Generic", "Protocol", "object"}
"""Bases of the standard library, some of which have no file."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """Keyword arguments that a call takes: `names`, and any others if it `takes_others`, which then have no effect.

    `refuses_others` is true of a loop of ours: it takes them to say which one is wrong. `bases` are the full names of a
    class and its bases; `sets_up` those of them that have an `__init__`.
    """

    names: frozenset[str]
    takes_others: bool
    refuses_others: bool
    bases: tuple[str, ...] = ()
    sets_up: tuple[str, ...] = ()


def arguments_of(found: Found) -> Arguments | None:
    """Return what a call of a class or function takes; None if its source does not tell."""
    if not isinstance(found.node, ast.ClassDef):
        return None if found.node.decorator_list else _of_functions([found.node])
    bases = with_bases(found)
    if bases is None:
        return None
    inits = {each.full_name: _init_of(each) for each in bases}
    read = _of_functions([init for init in inits.values() if init is not None])
    if read is None:
        return None
    sets_up = tuple(name for name, init in inits.items() if init is not None)
    return replace(read, bases=tuple(inits), sets_up=sets_up)


def with_bases(found: Found) -> list[Found] | None:
    """Return a class and its bases, itself first; None if one of them cannot be told."""
    assert isinstance(found.node, ast.ClassDef)
    known, waiting = [], [found]
    while waiting:
        each = waiting.pop(0)
        if not isinstance(each.node, ast.ClassDef) or len(known) > _MAX_BASES or _may_be_changed(each.node):
            return None
        known.append(each)
        for base in each.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)  # Generic[T]
            if name.rpartition(".")[2] in _WITHOUT_INIT:
                continue
            try:
                behind = look_up(each.source, name)
            except NotInSourceError:
                return None
            if behind is None:
                return None
            waiting.append(behind)
    return known


def _may_be_changed(node: ast.ClassDef) -> bool:
    """Whether a decorator may have made another class of it; verl's `register` does not."""
    names = [ast.unparse(each.func if isinstance(each, ast.Call) else each) for each in node.decorator_list]
    return any(name.rpartition(".")[2] != "register" for name in names)


def _init_of(found: Found) -> ast.FunctionDef | None:
    assert isinstance(found.node, ast.ClassDef)
    inits = [each for each in found.node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return inits[-1] if inits else None


def _of_functions(functions: Iterable[ast.FunctionDef | ast.AsyncFunctionDef]) -> Arguments | None:
    """Return what functions take together, each of which hands its `**kwargs` to the next; None if one reads them."""
    names: set[str] = set()
    refuses = is_open = False
    for function in functions:
        given = function.args
        names |= {each.arg for each in (*given.args, *given.kwonlyargs)}
        refuses |= any(isinstance(node, ast.Name) and node.id == _REFUSES for node in ast.walk(function))
        is_open = given.kwarg is not None
        if given.kwarg is None:
            break
        if _reads(function, given.kwarg.arg):
            return None
    return Arguments(frozenset(names - {"self"}), takes_others=is_open, refuses_others=refuses)


def _reads(function: ast.FunctionDef | ast.AsyncFunctionDef, kwargs: str) -> bool:
    """Whether a function does more with its `**kwargs` than to hand them to another `__init__`: it may take options."""
    handed_on: set[int] = set()
    for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
            handed_on |= {id(word.value) for word in call.keywords if word.arg is None}
        elif isinstance(call.func, ast.Name) and call.func.id == _REFUSES:
            handed_on |= {id(argument) for argument in call.args}
    uses = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == kwargs]
    return any(id(use) not in handed_on for use in uses)
