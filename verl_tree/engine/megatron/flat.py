"""verl's own Megatron engines on a CPU: the flat baseline where there is no GPU."""

from typing import cast

from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngine,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from verl_tree.engine.megatron.build import BuildOnAnyDevice


# verl's registry types its classes as any engine, so the casts say that these two are Megatron engines.
class CPUEngineWithLMHead(BuildOnAnyDevice, cast(type[MegatronEngine], MegatronEngineWithLMHead)):
    """verl's policy and reference engine on a CPU."""


class CPUEngineWithValueHead(BuildOnAnyDevice, cast(type[MegatronEngine], MegatronEngineWithValueHead)):
    """verl's critic engine on a CPU."""
