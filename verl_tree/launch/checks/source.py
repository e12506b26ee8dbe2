"""Python files read without running them: which names a module has, and which arguments a class or function takes.

A user's module may need what only Ray's processes have, so it is not imported. What its text does not tell for sure (a
name that a decorator, an assignment or `import *` makes) counts as right.
"""

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from verl_tree.launch.command.misspelt import did_you_mean

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_MAX_IMPORTS = 8
"""Most modules through which a name is followed that one imports from another."""
_MAKES_NAMES = {"exec", "globals", "setattr", "vars"}


class NotInSourceError(ValueError):
    """A name that a module does not have, or a module that cannot be read; the message has the remedy."""


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a module. `bindings` has the statement that makes each name, None where that is not known."""

    module: str
    path: Path
    tree: ast.Module
    bindings: Mapping[str, ast.stmt | None]
    has_other_names: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A class or function, and the module that defines it."""

    source: Source
    node: Definition

    @property
    def full_name(self) -> str:
        """Its name with that of its module; a nested class has its own name only."""
        return f"{self.source.module}.{self.node.name}"


def find_target(target: str) -> Found | None:
    """Return the class or function `package.module.Name`; None if that cannot be told.

    Raises:
        NotInSourceError: There is no such module, or the module has no such name.
    """
    if problem := module_problem(target):
        raise NotInSourceError(f"{problem}; {way_to(target)}")
    module, name = split_target(target)
    return look_up(source_of(module), name) if name else None


def way_to(target: str) -> str:
    """Return what to do about a module that cannot be found."""
    if target.partition(".")[0] in ("verl", "verl_tree", "rollout_hooks"):
        return "the installed release lacks it; correct it, or write it anew in a module of yours"
    return "correct it, or add its folder to PYTHONPATH"


def module_problem(target: str) -> str | None:
    """Return why the module of `package.module.Class` cannot be found; its packages are imported, it is not."""
    parts = target.split(".")
    if len(parts) < 2:
        return "not the full name of a class (package.module.Class)"
    for end in range(1, len(parts)):
        module = ".".join(parts[:end])
        try:
            spec = importlib.util.find_spec(module)
        except ImportError as error:
            return f"a package of it cannot be imported ({error})"
        if spec is None:
            return f"no module named {module}"
        if spec.submodule_search_locations is None:
            return None  # a module: what follows are names in it
    return None


def split_target(target: str) -> tuple[str, str]:
    """Split `package.module.Class.Nested` behind the longest part that is a module."""
    parts = target.split(".")
    num_modules = next((end for end in range(len(parts) - 1, 0, -1) if _module_file(".".join(parts[:end]))), 1)
    return ".".join(parts[:num_modules]), ".".join(parts[num_modules:])


def _module_file(module: str) -> str | None:
    """Return the file of a module; no package around it is imported. None if there is none."""
    first, *others = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand, such as __main__
        return None
    for number in range(len(others)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = ".".join([first, *others[: number + 1]])
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return None if spec is None else spec.origin


def source_of(module: str) -> Source | None:
    """Return the text of a module; None if it has no Python file.

    Raises:
        NotInSourceError: It is not valid Python, or imports a module that does not exist.
    """
    file = _module_file(module)
    return read_source(Path(file), module=module) if file is not None and file.endswith(".py") else None


def read_source(path: Path, *, module: str = "") -> Source:
    """Read a Python file.

    Raises:
        NotInSourceError: It is not valid Python, or imports a module that does not exist.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise NotInSourceError(f"{path}:{line}: not valid Python ({error}); correct it") from None
    for statement in tree.body:
        for name in _imported_packages(statement):
            if _has_no_module(name):
                raise NotInSourceError(f"{path}:{statement.lineno}: no module named {name}; install or correct it")
    bindings: dict[str, ast.stmt | None] = {}
    for name, statement in _bound_names(tree.body):
        bindings[name] = None if name in bindings else statement
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    is_open = "*" in bindings or "__getattr__" in bindings or bool(called & _MAKES_NAMES)
    has_global = any(isinstance(node, ast.Global) for node in ast.walk(tree))
    return Source(module, path, tree, bindings, has_other_names=is_open or has_global)


def look_up(source: Source | None, name: str, *, num_imports: int = 0) -> Found | None:
    """Return the class or function `name` (`Outer.Inner` for a nested class); None if that cannot be told.

    Raises:
        NotInSourceError: The module has no such name.
    """
    if source is None or num_imports > _MAX_IMPORTS:
        return None
    first, *inner = name.split(".")
    if first not in source.bindings:
        is_submodule = bool(source.module) and _module_file(f"{source.module}.{first}") is not None
        if source.has_other_names or is_submodule:
            return None
        raise NotInSourceError(f"{source.path} has no {first}{did_you_mean(first, source.bindings)}")
    node = source.bindings[first]
    if isinstance(node, ast.ImportFrom):
        return _look_behind(source, node, first, inner, num_imports=num_imports)
    for part in inner:
        members = [each for each in node.body if _is_named(each, part)] if isinstance(node, ast.ClassDef) else []
        node = members[0] if len(members) == 1 else None
    return Found(source, node) if isinstance(node, Definition) else None


def _look_behind(
    source: Source, node: ast.ImportFrom, name: str, inner: list[str], *, num_imports: int
) -> Found | None:
    """Follow an import; what is wrong in the other module is not this name's fault, and is left to Python."""
    package = source.module.split(".")
    # `from . import x` in a module is relative to its package, in a package's __init__ to itself.
    num_dropped = node.level - (source.path.name == "__init__.py")
    base = package[: len(package) - num_dropped] if node.level else []
    module = ".".join([*base, *filter(None, [node.module])])
    original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
    try:
        return look_up(source_of(module), ".".join([original, *inner]), num_imports=num_imports + 1)
    except NotInSourceError:
        return None


def _is_named(node: ast.stmt, name: str) -> bool:
    return isinstance(node, Definition) and node.name == name


def _imported_packages(statement: ast.stmt) -> list[str]:
    """Return the first parts of the modules that an import names; those inside `try` and `if` may be missing."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
        return [statement.module.partition(".")[0]]
    return []


def _has_no_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ValueError:
        return False  # a module that was made by hand


def _bound_names(statements: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield each name that statements of a module bind, `*` for an `import *`."""
    for statement in statements:
        if isinstance(statement, Definition):
            yield statement.name, statement
            continue
        if isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name.partition(".")[0], statement
            continue
        for node in ast.walk(statement):
            # Inside `if`, `try`, `with` and loops.
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id, ast.Pass()
            elif node is not statement and isinstance(node, Definition):
                yield node.name, ast.Pass()
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name.partition(".")[0], ast.Pass()) for alias in node.names)
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
                yield node.name, ast.Pass()
