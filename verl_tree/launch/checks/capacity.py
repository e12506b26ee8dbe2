"""Checks of a pass: how many tokens it may hold, the longest trajectory, and the ranks that compute it together."""

from math import prod

from omegaconf import DictConfig

from verl_tree.clashes import doubled_experts
from verl_tree.families import EXPERTS
from verl_tree.launch.checks.refusals import (
    ACTOR,
    REF,
    ROLLOUT,
    Check,
    Findings,
    engines_of,
    models_of,
    ranks_of,
    refusal,
    text_settings,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)
from verl_tree.launch.command.composition import model_engine

FORMER = "ulysses_sequence_parallel_size"
"""A key of actor and reference, beside that of the engine config; verl calls it deprecated."""


def team_keys(config: DictConfig) -> list[str]:
    """Return the key that says for each role in use how many ranks are in a team; the actor's comes first.

    verl reads a role's own key where it is above 1; that of the critic not at all.
    """
    ulysses = model_engine(config).ulysses
    return [
        f"{role}.{FORMER}" if role != "critic" and _of(config, f"{role}.{FORMER}") > 1 else f"{group}.{ulysses}"
        for role, group in engines_of(config).items()
    ]


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


def check_layouts(config: DictConfig) -> Findings:
    """Find roles whose ranks are laid out otherwise than the actor's, and a replica that does not divide the ranks.

    A process has one layout, the first.
    """
    (_, first), *others = engines_of(config).items()
    keys = [f"{first}.{name}" for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")]
    sizes, num_ranks = [_of(config, key) for key in keys], ranks_of(config, "trainer")
    if num_ranks % prod(sizes):
        remedy = f"times {keys[1]}={sizes[1]}, does not divide the {num_ranks} ranks; give divisors"
        yield refusal(config, keys[0], remedy)
    for name in model_engine(config).layout:
        size = value_of(config, f"{first}.{name}")
        for key in (f"{group}.{name}" for _, group in others):
            if value_of(config, key) != size:
                yield refusal(config, key, f"must equal {first}.{name}={size}, because a process has one layout")


def check_parts(config: DictConfig) -> Findings:
    """Find models whose layers, heads or experts Megatron's ranks cannot share.

    A model that is not on this machine is not looked into.
    """
    group = engines_of(config)[ACTOR]
    given = value_of(config, f"{group}.override_transformer_config") or {}
    tensor, pipeline, virtual = (
        f"{group}.{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "virtual_pipeline")
    )
    parts = {"num_attention_heads": [tensor], "num_key_value_heads": [tensor]}
    if not any("pipeline" in name or "num_layers" in name for name in given if given[name] is not None):
        parts["num_hidden_layers"] = [pipeline, virtual]
    if value_of(config, virtual) is not None and _of(config, pipeline) == 1:
        yield refusal(
            config, virtual, f"a pipeline of one rank has no virtual stages; set it to null, or set {pipeline}"
        )
    experts, of_experts = f"{group}.expert_model_parallel_size", f"{group}.expert_tensor_parallel_size"
    are_doubled = doubled_experts(
        experts,
        parallel=_of(config, experts),
        of_experts=value_of(config, of_experts),
        tensor=_of(config, tensor),
    )
    for model in models_of(config):
        path = value_of(config, f"{model}.path")
        if are_doubled and any(text_settings(path).get(name) for name in EXPERTS):
            yield refusal(config, of_experts, are_doubled)
        for name, keys in parts.items():
            number = text_settings(path).get(name)
            if number and number % prod(_of(config, key) for key in keys):
                divides = f"{' times '.join(keys)} must divide"
                yield refusal(config, keys[0], f"{model}.path={path} has {name}={number}, which {divides}")


def check_heads(config: DictConfig) -> Findings:
    """Find models whose heads a team cannot share. A model that is not on this machine is not looked into."""
    from verl_tree.tree.sharding import why_not_dealt

    key, size = team_keys(config)[0], team_size(config)
    for model in models_of(config):
        settings = text_settings(value_of(config, f"{model}.path"))
        num_heads = settings.get("num_attention_heads")
        num_kv_heads = settings.get("num_key_value_heads") or num_heads
        if size > 1 and num_heads and num_kv_heads:
            reason = why_not_dealt(num_heads, num_kv_heads, num_ranks=size)
            if reason:
                yield refusal(config, key, f"{model}.path={value_of(config, f'{model}.path')}: {reason}")


def _of(config: DictConfig, key: str) -> int:
    return value_of(config, key) or 1


def capacity_keys(config: DictConfig) -> list[str]:
    """Return the keys that bound the tokens of a micro-batch of the roles in use."""
    if uses_tree(config) and config.tree.capacity is not None:
        return ["tree.capacity"]
    keys = [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
    if uses_reference(config):
        keys.append(f"{REF}.log_prob_max_token_len_per_gpu")
    if uses_critic(config):
        keys += ["critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"]
    return keys


def ranks_of_limit(config: DictConfig, key: str) -> int:
    """Return by how many ranks the value of one of `capacity_keys` is multiplied: `per_gpu` means one of a team."""
    return team_size(config) if key.endswith("_per_gpu") else 1


def longest_trajectory(config: DictConfig) -> tuple[int, str]:
    """Return the length of the longest possible trajectory, and text that names the options behind it."""
    rollout = config.actor_rollout_ref.rollout
    # All turns after the first prompt count as response.
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        return rollout.max_model_len, f"{rollout.max_model_len} tokens ({ROLLOUT}.max_model_len)"
    lens = f"data.max_prompt_length={rollout.prompt_length} + data.max_response_length={rollout.response_length}"
    return longest, f"{longest} tokens ({lens})"


def check_capacity(config: DictConfig) -> Findings:
    """Find limits below the longest possible trajectory, which must fit into one pass if it cannot be relayed."""
    longest, named = longest_trajectory(config)
    response = config.actor_rollout_ref.rollout.response_length
    limits = []
    if not uses_tree(config) or config.tree.relay == "never":
        remedy = "raise it, shorten them, or set tree.relay=auto" if uses_tree(config) else "raise it or shorten them"
        limits += [(key, longest, f"trajectory, {named}; {remedy}") for key in capacity_keys(config)]
    if uses_tree(config):
        remedy = "raise it, shorten them, or set null for no limit"
        limits.append(("tree.max_path_len", longest, f"trajectory, {named}; {remedy}"))
        named = f"data.max_response_length={response} tokens"
        limits.append(("tree.max_loss_terms", response, f"response, {named}; {remedy}"))
    for key, least, what in limits:
        value = value_of(config, key)
        num_ranks = ranks_of_limit(config, key)
        if isinstance(value, int) and value * num_ranks < least:
            per_rank = f", times {num_ranks} ranks," if num_ranks > 1 else ""
            yield refusal(config, key, f"less{per_rank} than the longest possible {what}")


CHECKS: tuple[Check, ...] = (check_capacity, check_team_sizes, check_layouts, check_parts, check_heads)
