"""How long an update takes on a GPU that nobody has measured: a cost model computed from its data sheet.

FLOPs are those of forward, recomputation (gradient checkpointing) and backward: 8 per parameter and token, and 18 per
pair, head, head dimension and layer (4, 4 and 10). A GPU is taken to reach `REACHED` of its peak in them, which large
matrix products do. What is moved instead, the keys and values of a context, goes at the speed of its memory, as in
`CostModel.prior`. What is launched takes `LAUNCH_S` each, `LAUNCHES` times a layer and pass.

These are no measurements. A run fits the cost model to its own times and logs it (`tree/cost_model/...`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl_tree.cost.model import CostModel
from verl_tree.functional.memory import GIB
from verl_tree.functional.model_size import ModelSize, Sharing

REACHED = 0.4
LAUNCH_S = 5e-6
LAUNCHES = 150


@dataclass(frozen=True, slots=True)
class Device:
    """What the data sheet of a GPU says: dense bfloat16 FLOPs and bytes of memory a second, and bytes of memory.

    `link_bytes_per_s` are those that it sends other GPUs of its node.
    """

    flops: float
    bytes_per_s: float
    memory_bytes: int
    link_bytes_per_s: float


DEVICES: Mapping[str, Device] = {
    "A100": Device(312e12, 2.04e12, 80 * GIB, 300e9),
    "H100": Device(989e12, 3.35e12, 80 * GIB, 450e9),
    "H200": Device(989e12, 4.8e12, 139 * GIB, 450e9),
    "B200": Device(2250e12, 8.0e12, 180 * GIB, 900e9),
}
"""By the name that `verl_tree.check --gpu` takes."""


def computed_costs(size: ModelSize, device: Device) -> CostModel:
    """Compute the cost model of an update of a decoder in bfloat16 with gradient checkpointing."""
    s_per_flop = 1 / (REACHED * device.flops)
    embeddings = size.vocabulary * size.hidden
    layers = size.met_parameters
    # A number of a context is read and written forward, and its gradient is read and its float32 sum changed.
    context_bytes = 14 * 2 * size.key_dims * size.num_layers
    return CostModel(
        s_per_token=8 * layers * s_per_flop,
        s_per_pair=18 * size.query_dims * size.num_layers * s_per_flop,
        s_per_scored=6 * embeddings * s_per_flop,
        s_per_node=0.0,
        s_per_pack=LAUNCH_S * LAUNCHES * size.num_layers,
        s_per_spine=2 * layers * s_per_flop,
        s_per_context=context_bytes / device.bytes_per_s,
        s_per_feature=0.0,
    )


def exchanged_bytes(size: ModelSize, sharing: Sharing) -> float:
    """Compute what a rank sends others for one of its tokens in one layer of an update, in bfloat16.

    In a team of Ulysses (docs/ulysses.md) queries, keys and values go to the ranks of their heads, and the outputs come
    back. Key-value heads are repeated until each rank has one. With tensor parallelism the hidden state goes to all
    others in front of attention and of the MLP, and parts of sums come back. A token goes to the ranks of its experts
    and comes back. All of it forward, when it is recomputed, and backward.
    """
    team = sharing.team
    if sharing.is_gathered:
        key_dims = size.key_dims * max(1, team // size.num_kv_heads)
        numbers = (2 * size.query_dims + 2 * key_dims) * (team - 1) / team
    else:
        numbers = 4 * size.hidden * (team - 1)
    numbers += 2 * size.experts_per_token * size.hidden * (1 - 1 / sharing.experts)
    return 3 * 2 * numbers
