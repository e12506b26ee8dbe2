"""Where in a cluster the ranks of the trainer go."""

import ray
from ray._private.state import available_resources_per_node
from typing_extensions import override
from verl.single_controller.ray.base import ResourcePoolManager
from verl.utils.device import get_resource_name

TRAINING = "global_pool"
"""verl's name of the pool in which the policy is trained."""


def near_trainer(ranks_of_nodes: list[int]) -> str | None:
    """Return a resource that only this process's node has, if that node has room for all ranks; else None.

    `ranks_of_nodes` has the ranks that each node of a pool shall have. The trainer runs on the node of the command.
    """
    free = available_resources_per_node().get(ray.get_runtime_context().get_node_id(), {})
    if len(ranks_of_nodes) > 1 or free.get(get_resource_name(), 0) < ranks_of_nodes[0]:
        return None
    return next(name for name in free if name.startswith("node:") and name != "node:__internal_head__")


class PoolsNearTrainer(ResourcePoolManager):
    """verl's pools; ranks of one node go to the trainer's, where it has accelerators enough.

    Their checkpoints then lie on the disk on which the trainer looks for them.
    """

    @override
    def create_resource_pool(self) -> None:
        """Make the pools; see verl's."""
        super().create_resource_pool()
        pool = self.resource_pool_dict[TRAINING]
        # verl asks for a little of this resource with each rank.
        pool.accelerator_type = near_trainer(pool.store)
