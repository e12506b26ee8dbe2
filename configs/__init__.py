"""Hydra configuration of verl_tree (`tree_ppo.yaml` and its groups), and the engine names that it chooses between."""

TREE_STRATEGY = "fsdp_tree"
"""Name under which the tree engine on FSDP2 is registered with verl."""

FLAT_STRATEGY = "fsdp2"
"""verl's own engine: what `tree.enabled=false` selects."""

VEOMNI_TREE_STRATEGY = "veomni_tree"
"""The tree engine on VeOmni."""

FLAT_STRATEGIES = {TREE_STRATEGY: FLAT_STRATEGY, VEOMNI_TREE_STRATEGY: "veomni"}
"""By the name of each tree engine, verl's own on which it is built."""
