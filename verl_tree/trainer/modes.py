"""The trainers by the value of `trainer.v1.trainer_mode`: verl's own classes behind `TreeTrainer`."""

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_tree.trainer.trainer import TreeTrainer


class TreePPOTrainerSync(TreeTrainer, PPOTrainerSync):
    """verl's synchronous trainer with trees."""


TREE_TRAINERS: dict[str, type[TreeTrainer]] = {"sync": TreePPOTrainerSync}
"""verl compares the mode with literals, so our trainers take the names of verl's."""
