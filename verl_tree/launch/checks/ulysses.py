"""Checks of Ulysses sequence parallelism: how many ranks compute every model call together."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ACTOR,
    MODELS,
    REF,
    Check,
    Findings,
    ranks_of,
    refusal,
    text_settings,
    uses_cpu,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)

NAME = "ulysses_sequence_parallel_size"


def team_keys(config: DictConfig) -> list[str]:
    """Return the key that says for each role in use how many ranks are in a team; the actor's comes first.

    verl reads a role's own key, which it calls deprecated, where it is above 1; that of the critic not at all.
    """
    roles = [ACTOR, REF] if uses_reference(config) else [ACTOR]
    keys = [f"{role}.{NAME}" if _of(config, f"{role}.{NAME}") > 1 else f"{role}.fsdp_config.{NAME}" for role in roles]
    return [*keys, f"critic.fsdp.{NAME}"] if uses_critic(config) else keys


def team_size(config: DictConfig) -> int:
    """Return how many ranks compute every model call together."""
    return _of(config, team_keys(config)[0])


def check_team_sizes(config: DictConfig) -> Findings:
    """Find sizes that differ between roles, and one that does not divide the ranks."""
    first, *others = team_keys(config)
    size, num_ranks = team_size(config), ranks_of(config, "trainer")
    if size < 1 or num_ranks % size:
        yield refusal(config, first, f"give a divisor of the {num_ranks} ranks (trainer.nnodes x n_gpus_per_node)")
    for key in others:
        if _of(config, key) != size:
            yield refusal(config, key, f"must equal {first}={size}, because rows are dealt to the actor's ranks")


def check_heads(config: DictConfig) -> Findings:
    """Find models whose heads a team cannot share. A model that is not on this machine is not looked into."""
    from verl_tree.tree.sharding import why_not_dealt

    key, size = team_keys(config)[0], team_size(config)
    for model in MODELS if uses_critic(config) else MODELS[:1]:
        settings = text_settings(value_of(config, f"{model}.path"))
        num_heads = settings.get("num_attention_heads")
        num_kv_heads = settings.get("num_key_value_heads") or num_heads
        if size > 1 and num_heads and num_kv_heads:
            reason = why_not_dealt(num_heads, num_kv_heads, num_ranks=size)
            if reason:
                yield refusal(config, key, f"{model}.path={value_of(config, f'{model}.path')}: {reason}")


def check_engine(config: DictConfig) -> Findings:
    """Find verl's own engine on a CPU: it exchanges heads in flash attention."""
    if team_size(config) > 1 and uses_cpu(config) and not uses_tree(config):
        remedy = "verl's own engine needs flash attention, so CUDA, for it; set 1 or tree.enabled=true"
        yield refusal(config, team_keys(config)[0], remedy)


def _of(config: DictConfig, key: str) -> int:
    return value_of(config, key) or 1


CHECKS: tuple[Check, ...] = (check_team_sizes, check_heads, check_engine)
