"""What computes tokens twice, as relayed trees and tiled modules do, must compute the same twice: nothing at random.

Randomness is found in two ways. Before a model runs, in its settings, so that the message can say which one to change.
While it runs, by the generator, which moves with every number drawn, whatever draws it: PhiMoE draws in its router
without any setting.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

RANDOM_SETTING = re.compile("drop|jitter|noise")
"""Parts of the names that transformers gives to settings of layers that draw: `resid_pdrop`, `router_jitter_noise`."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """A reason why something runs twice, which refuses a model that would come out different.

    Attributes:
        reason: A clause for the message.
        instead: What a user can do but to change the model.
    """

    reason: str
    instead: str

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model in training mode that a setting makes random.

        Raises:
            ValueError: A module has an active dropout or noise.
        """
        for name, module in model.named_modules():
            if not module.training:
                continue
            found = None
            if isinstance(module, torch.nn.Dropout) and module.p > 0:
                found = f"{name} drops out {module.p} of its activations"
            for attribute, value in vars(module).items():
                if isinstance(value, float) and value > 0 and RANDOM_SETTING.search(attribute):
                    found = f"{name}.{attribute}={value} draws at random"
            if found is not None:
                raise ValueError(
                    f"{found}, and {self.reason}: set it to 0 in the config of the {type(model).__name__}, or "
                    f"{self.instead}"
                )

    @contextmanager
    def watch(self, model: torch.nn.Module, *, device: torch.device) -> Iterator[None]:
        """Refuse a model that draws random numbers on its device in this context, in which it runs.

        Raises:
            ValueError: The generator of the device has moved.
        """
        before = _generator_state(device)
        yield
        if torch.equal(before, _generator_state(device)):
            return
        # OPT draws a number for every layer even if none is dropped. If some are, `check` has found that.
        if not any("layerdrop" in vars(module) for module in model.modules()):
            raise ValueError(
                f"{type(model).__name__} draws random numbers in training mode, and {self.reason}: {self.instead}"
            )


def _generator_state(device: torch.device) -> Tensor:
    """Return a copy on the host; no device is waited for."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
