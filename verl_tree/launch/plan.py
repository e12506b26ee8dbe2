"""What a resolved and translated configuration will run, as lines of text: capacity of packs, ranks and roles."""

from omegaconf import DictConfig

from verl_tree.launch.validation.refusals import uses_critic, uses_reference, uses_tree, value_of
from verl_tree.launch.validation.settings import capacity_keys, longest_trajectory, rollout_ranks

RELAY = {
    "auto": "a larger tree is relayed or cut into packs, whichever should be faster",
    "always": "a larger tree is relayed",
    "never": "a larger tree is cut into packs",
}


def capacity_lines(config: DictConfig) -> list[str]:
    """Return the most tokens of a pack, role by role, and whether the longest trajectory fits."""
    longest, named = longest_trajectory(config)
    lines = [f"longest trajectory: {named}"]
    for key in capacity_keys(config):
        limit = value_of(config, key)
        if limit == "auto":
            memory = "the free memory" if config.tree.memory_gib is None else f"{config.tree.memory_gib} GiB"
            lines.append(f"{key}=auto: as many tokens as fit into {memory}")
        elif isinstance(limit, int):
            fits = "fits" if limit >= longest else "is longer" + _relayed(config)
            lines.append(f"{key}={limit}: the longest trajectory {fits}")
    if uses_tree(config) and config.tree.relay in RELAY:
        lines.append(f"tree.relay={config.tree.relay}: {RELAY[config.tree.relay]}")
    return lines


def _relayed(config: DictConfig) -> str:
    return ", so it is relayed in sections" if uses_tree(config) and config.tree.relay != "never" else ""


def layout_lines(config: DictConfig) -> list[str]:
    """Return the device, the trainer, and each role with its engine and its ranks."""
    ranks = f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} ranks"
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    lines = [
        f"trainer: {config.trainer.v1.trainer_mode}, {ranks} (nodes x devices), {config.trainer.device}",
        f"actor: {actor.strategy}, {model.path}",
        f"reference: {config.actor_rollout_ref.ref.strategy}" if uses_reference(config) else "reference: none",
        f"critic: {config.critic.strategy}, {config.critic.model.path}" if uses_critic(config) else "critic: none",
        _rollout_line(config),
        _agent_line(config),
        _reward_line(config),
    ]
    if config.distillation.enabled:
        pool = f"{config.distillation.nnodes} x {config.distillation.n_gpus_per_node} ranks of their own"
        paths = ", ".join(str(each.model_path) for each in config.distillation.teacher_models.values())
        lines.append(f"teachers: {paths}, on {pool}")
    num_prompts, num_sessions = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    lines.append(
        f"step: {num_prompts} x {num_sessions} sessions (prompts x n), advantages {config.algorithm.adv_estimator}, "
        f"mini-batches of {actor.ppo_mini_batch_size} prompts, ppo_epochs={actor.ppo_epochs}"
    )
    return lines


def _rollout_line(config: DictConfig) -> str:
    rollout, size = config.actor_rollout_ref.rollout, rollout_ranks(config)
    num_ranks, where = config.trainer.nnodes * config.trainer.n_gpus_per_node, "the trainer's"
    if not config.actor_rollout_ref.hybrid_engine:
        num_ranks, where = rollout.nnodes * rollout.n_gpus_per_node, "its own"
    return f"rollout: {rollout.name}, {num_ranks // size} x {size} ranks (replicas x size), {where}"


def _agent_line(config: DictConfig) -> str:
    agent = config.actor_rollout_ref.rollout.agent
    loops = f"loops of {agent.agent_loop_config_path}, " if agent.agent_loop_config_path else ""
    return f"agents: {loops}default {agent.default_agent_loop}, num_workers={agent.num_workers}"


def _reward_line(config: DictConfig) -> str:
    reward = config.reward
    function = reward.custom_reward_function.path or "verl's function for the data source"
    line = f"reward: {function}, manager {reward.reward_manager.name}, num_workers={reward.num_workers}"
    if not reward.reward_model.enable:
        return line
    model, where = reward.reward_model, "the trainer's ranks"
    if model.enable_resource_pool:
        where = f"{model.nnodes} x {model.n_gpus_per_node} ranks of its own"
    return f"{line}, model {model.model_path} on {where}"
