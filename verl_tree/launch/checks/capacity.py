"""Checks of how many tokens a pass may hold, of the longest trajectory, and of the memory."""

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ACTOR,
    REF,
    ROLLOUT,
    Check,
    Findings,
    refusal,
    uses_cpu,
    uses_critic,
    uses_reference,
    uses_tree,
    value_of,
)
from verl_tree.launch.checks.ulysses import team_size


def check_memory(config: DictConfig) -> Findings:
    """Find a memory limit that nothing reads, and a missing one where there is no device to ask."""
    if not uses_tree(config):
        return
    if config.tree.capacity != "auto":
        if config.tree.memory_gib is not None:
            yield refusal(config, "tree.memory_gib", "only tree.capacity=auto reads it; set that, or null")
    elif config.tree.memory_gib is None and uses_cpu(config):
        remedy = "tree.capacity=auto needs it with trainer.device=cpu; give the GiB that one rank may use"
        yield refusal(config, "tree.memory_gib", remedy)


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


CHECKS: tuple[Check, ...] = (check_memory, check_capacity)
