"""Recurrent layers of transformers on trees: functions of each mixer instance are replaced while it is bound.

A lost plan would be silent: the pack would be computed as one sequence. So a bound mixer without a plan raises, and
after each forward pass of the decoder every mixer must have run once with the plan of this pass. `stand_ins.py` says
what is replaced.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from verl_tree.recurrence.stand_ins import FORWARD, RULE, StandIn, mixing_of, stand_in_class

_ABSENT = object()


class RecurrentLayers:
    """The recurrent layers of a transformers model that is not wrapped, ready to be bound.

    Attributes:
        stacks: The decoder that has them; none if there are none.

    Raises:
        ValueError: A layer is compiled.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        mixers = {
            name: stand_in_class(module)(name, module, model.get_submodule(name.rpartition(".")[0]))
            for name, module in model.named_modules()
            if _is_served(module)
        }
        # model.layers.3.linear_attn is called by model.layers.3, and that by model.
        stacks = {".".join(name.split(".")[:-3]) for name in mixers}
        assert len(stacks) <= 1, f"recurrent layers of one model, but of several decoders: {stacks}"
        self._mixers = list(mixers.values())
        self.stacks = [model.get_submodule(name) for name in stacks]
        self._handles: list[RemovableHandle] = []
        self._before: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def bound(self) -> Iterator[None]:
        """Bind the layers, and restore them, also on error; what is bound already stays as it is."""
        if all(_is_bound(mixer.module) for mixer in self._mixers):
            yield
            return
        self.bind()
        try:
            yield
        finally:
            self._restore()

    @contextmanager
    def unbound(self) -> Iterator[None]:
        """Give layers that `bind` has bound back to the model, and bind them again, also on error."""
        self._restore()
        try:
            yield
        finally:
            self.bind()

    def bind(self) -> None:
        """Bind the layers for the life of the model."""
        replaced = [(vars(module), name) for mixer in self._mixers for module, name, _ in mixer.replacements()]
        self._before = [(attributes, name, attributes.get(name, _ABSENT)) for attributes, name in replaced]
        self._handles = [mixer.bind() for mixer in self._mixers]
        for stack in self.stacks:
            self._handles.append(stack.register_forward_pre_hook(self._begin))
            self._handles.append(stack.register_forward_hook(self._check, with_kwargs=True))

    def _restore(self) -> None:
        for handle in self._handles:
            handle.remove()
        for attributes, name, value in self._before:
            del attributes[name]
            if value is not _ABSENT:
                attributes[name] = value

    def _begin(self, _stack: torch.nn.Module, _args: Any) -> None:
        for mixer in self._mixers:
            mixer.ran_on.clear()

    def _check(self, _stack: torch.nn.Module, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        plan = kwargs.get("tree_plan")
        for mixer in self._mixers:
            if plan is None or len(mixer.ran_on) != 1 or mixer.ran_on[0] is not plan.runs:
                raise RuntimeError(
                    f"{mixer.name} ran {len(mixer.ran_on)} times in one forward pass, or on another pack: a recurrent "
                    "layer that does not follow the tree would be silently wrong, so call model(..., tree_plan=plan) "
                    "with a model whose layers all run once"
                )


def unbound_mixers(model: torch.nn.Module) -> list[str]:
    """Return the names of the recurrent layers that are served, but not bound."""
    return [name for name, module in model.named_modules() if _is_served(module) and not _is_bound(module)]


def num_bound_mixers(model: torch.nn.Module) -> int:
    """Return how many recurrent layers are bound."""
    return sum(_is_bound(module) for module in model.modules())


def _is_served(module: torch.nn.Module) -> bool:
    return mixing_of(module) is not None


def _is_bound(module: torch.nn.Module) -> bool:
    functions = (vars(module).get(name) for name in (RULE, FORWARD))
    return any(isinstance(each, MethodType) and isinstance(each.__self__, StandIn) for each in functions)
