"""Refusals that several backends have in common."""

import torch

HALF_DTYPES = (torch.bfloat16, torch.float16)
MIN_COMPUTE_CAPABILITY = (8, 0)


def dtype_reasons(*inputs: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Refuse inputs unless all have the same dtype, and it is one of `dtypes`."""
    found = {each.dtype for each in inputs}
    if len(found) == 1 and found <= set(dtypes):
        return []
    wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return [f"dtype {' and '.join(sorted(map(str, found)))} is none of {wanted} throughout"]


def value_dim_reasons(q_QHD: torch.Tensor, v_THD: torch.Tensor) -> list[str]:
    """Refuse values whose head dim differs from that of the queries."""
    if v_THD.shape[-1] == q_QHD.shape[-1]:
        return []
    return [f"value head dim {v_THD.shape[-1]} differs from the query head dim {q_QHD.shape[-1]}"]


def gpu_reasons(device: torch.device) -> list[str]:
    """Refuse AMD's GPUs, and CUDA devices that are too old."""
    if torch.version.hip is not None:
        return ["the device is an AMD GPU, on which nothing has been tried"]
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_COMPUTE_CAPABILITY:
        return [f"compute capability {capability} is below {MIN_COMPUTE_CAPABILITY}"]
    return []
