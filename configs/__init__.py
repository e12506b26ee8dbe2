"""Hydra configuration of verl_tree (`tree_ppo.yaml` and its groups), and the engine names that it chooses between."""

TREE_STRATEGY = "fsdp_tree"
"""Name under which the tree engine is registered with verl."""

FLAT_STRATEGY = "fsdp2"
"""verl's own engine: what `tree.enabled=false` selects."""
