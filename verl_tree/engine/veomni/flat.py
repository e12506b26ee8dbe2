"""verl's own VeOmni engines on a CPU: the flat baseline where there is no GPU."""

from typing import cast

from verl.workers.engine.veomni import VeOmniEngineWithLMHead, VeOmniEngineWithValueHead
from verl.workers.engine.veomni.transformer_impl import VeOmniEngine

from verl_tree.engine.veomni.build import BuildOnAnyDevice


# verl's registry types its classes as any engine, so the casts say that these two are VeOmni engines.
class CPUEngineWithLMHead(BuildOnAnyDevice, cast(type[VeOmniEngine], VeOmniEngineWithLMHead)):
    """verl's policy and reference engine on a CPU."""


class CPUEngineWithValueHead(BuildOnAnyDevice, cast(type[VeOmniEngine], VeOmniEngineWithValueHead)):
    """verl's critic engine on a CPU."""
