"""Hydra configuration of verl_tree: `tree_ppo.yaml` and its groups, found as `pkg://verl_tree.configs`."""
