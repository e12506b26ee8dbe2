"""Options of agent loops: what `loops.yaml` sets beside `_target_`. verl would take a misspelt one without a word."""

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

_OF_VERL = frozenset(inspect.signature(AgentLoopBase.__init__).parameters) | {"tools", "name"}
"""What verl's worker gives to every loop; `name` is that of an entry of `loops.yaml`."""


def refuse_unknown_options(loop_class: type[AgentLoopBase], arguments: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that neither verl nor the loop's classes know.

    Args:
        loop_class: The class of the loop; options are the named arguments of its `__init__` and of its bases'.
        arguments: What no class has taken.

    Raises:
        ValueError: Naming option, value and the options that there are.
    """
    for name, value in arguments.items():
        if name not in _OF_VERL:
            options = loop_options(loop_class)
            close = get_close_matches(name, options, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"{name}={value!r}: {loop_class.__name__} has no such option; {meant}It takes: {', '.join(options)}"
            )


def loop_options(loop_class: type[AgentLoopBase]) -> list[str]:
    """The names of a loop's options, sorted."""
    names: set[str] = set()
    for base in loop_class.__mro__:
        if "__init__" in vars(base) and base is not object:
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
    return sorted(names - _OF_VERL)
