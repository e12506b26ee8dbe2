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
        ulysses: Its key for the ranks that share the tokens of each model call out.
        values: verl's file of all values for training with it.
        package: What must be installed besides.
        layout: Its keys that say how ranks are laid out, once for a process, so all roles have the same.
        optimizers: The names of those that it has; none where any class of torch will do.
        optim_names: Of keys of `optim` that have another name than for FSDP2; a share of the rate becomes a rate.
    """

    title: str
    tree: str
    flat: tuple[str, ...]
    groups: tuple[str, str, str]
    ulysses: str
    values: str
    package: str | None = None
    layout: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    optim_names: tuple[tuple[str, str], ...] = ()


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
        package="veomni",
        layout=("fsdp_size", "expert_parallel_size"),
        optimizers=("adamw", "anyprecision_adamw", "muon"),
        optim_names=(("min_lr_ratio", "lr_min"),),
    ),
    "megatron": ModelEngine(
        title="Megatron",
        tree="megatron_tree",
        flat=("megatron",),
        groups=("actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron", "critic.megatron"),
        ulysses="context_parallel_size",
        values="_generated_ppo_megatron_trainer",
        package="megatron",
        layout=(
            *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
            *("expert_model_parallel_size", "expert_tensor_parallel_size"),
        ),
        optimizers=("adam", "sgd", "muon"),
        optim_names=(("min_lr_ratio", "min_lr"), ("lr_scheduler_type", "lr_decay_style")),
    ),
}
"""By the name in a command line."""

TREE_STRATEGY, FLAT_STRATEGY = MODEL_ENGINES[FSDP].tree, MODEL_ENGINES[FSDP].flat[0]

FLAT_STRATEGIES = {each.tree: each.flat[0] for each in MODEL_ENGINES.values()}
"""By the name of each tree engine, verl's own on which it is built."""
