"""Hydra configuration of verl_tree (`tree_ppo.yaml` and its groups), and the engines that it chooses between."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelEngine:
    """A kind of verl's engines on which trees run: a value of `model_engine`.

    Attributes:
        title: What people call it.
        tree: The strategy under which the tree engine is registered with verl.
        flat: Strategies of verl's own; the first is what `tree.enabled=false` selects.
        groups: Where actor, reference and critic have their engine config.
        ulysses: Its key for the ranks that compute each model call together.
        values: verl's file of all values for training with it.
    """

    title: str
    tree: str
    flat: tuple[str, ...]
    groups: tuple[str, str, str]
    ulysses: str
    values: str


FSDP = "dp"
"""What verl calls its engines of FSDP."""

MODEL_ENGINES = {
    FSDP: ModelEngine(
        title="FSDP2",
        tree="fsdp_tree",
        flat=("fsdp2", "fsdp"),
        groups=("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"),
        ulysses="ulysses_sequence_parallel_size",
        values="_generated_ppo_trainer",
    ),
    "veomni": ModelEngine(
        title="VeOmni",
        tree="veomni_tree",
        flat=("veomni",),
        groups=("actor_rollout_ref.actor.veomni", "actor_rollout_ref.ref.veomni", "critic.veomni"),
        ulysses="ulysses_parallel_size",
        values="_generated_ppo_veomni_trainer",
    ),
}
"""By the name in a command line."""

TREE_STRATEGY, FLAT_STRATEGY = MODEL_ENGINES[FSDP].tree, MODEL_ENGINES[FSDP].flat[0]
VEOMNI_TREE_STRATEGY = MODEL_ENGINES["veomni"].tree

MEGATRON_TREE_STRATEGY = "megatron_tree"
"""The tree engine on Megatron, which is reached from Python only."""

FLAT_STRATEGIES = {each.tree: each.flat[0] for each in MODEL_ENGINES.values()} | {MEGATRON_TREE_STRATEGY: "megatron"}
"""By the name of each tree engine, verl's own on which it is built."""
