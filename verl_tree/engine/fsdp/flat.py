"""verl's own FSDP engines on a CPU: the flat baseline where there is no GPU.

They differ from verl's only in how a model is built, with the class with which the tree engine builds its own, too.
"""

from typing import cast

from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_tree.engine.fsdp.build import BuildOnAnyDevice


# verl's registry types its classes as any engine, so the casts say that these two are FSDP engines.
class CPUEngineWithLMHead(BuildOnAnyDevice, cast(type[FSDPEngine], FSDPEngineWithLMHead)):
    """verl's policy and reference engine on a CPU."""


class CPUEngineWithValueHead(BuildOnAnyDevice, cast(type[FSDPEngine], FSDPEngineWithValueHead)):
    """verl's critic engine on a CPU."""
