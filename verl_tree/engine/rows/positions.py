"""The positions that rows bring along: one number per token, or several where the processor knows M-RoPE.

verl gives the tokens of a text row the same number in every component (text, time, height, width) and stores (C, L)
per row (`AgentLoopWorker._compute_position_ids`, verl 0.9.1). TransferQueue packs such rows as it finds them: jagged
over the tokens if their lengths differ, jagged over the components if all have one length. verl's engines read only
the first form.

Legend: B rows, F_all flat tokens of all rows, C components, L tokens of a row.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PretrainedConfig


def positions_of(position_ids: Tensor) -> Tensor:
    """Return the positions of all rows one after another, (C, F_all), in whichever form they were packed."""
    if position_ids.dim() == 2:
        return position_ids.values().unsqueeze(0)
    return torch.cat(position_ids.unbind(), dim=-1)


def takes_components(hf_config: PretrainedConfig) -> bool:
    """Return whether a model reads several positions per token (M-RoPE)."""
    return "mrope_section" in (hf_config.get_text_config().to_dict().get("rope_parameters") or {})


def settle_positions(data: TensorDict, *, keep_components: bool) -> None:
    """Pack positions of several components jagged over the tokens, in place.

    Without `keep_components`, components that agree become one position per token, which is what a model without
    M-RoPE reads.
    """
    position_ids = data["position_ids"]
    if position_ids.dim() == 2:
        return
    input_ids: Any = data["input_ids"]
    positions_CF, offsets = positions_of(position_ids), input_ids.offsets()
    if not keep_components and bool((positions_CF == positions_CF[0]).all()):
        data["position_ids"] = torch.nested.nested_tensor_from_jagged(positions_CF[0], offsets)
    else:
        data["position_ids"] = torch.nested.nested_tensor_from_jagged(positions_CF, offsets, jagged_dim=2)
