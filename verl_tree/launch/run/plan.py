"""What a resolved and translated configuration will run, as lines of text: capacity, ranks, roles, objective."""

from omegaconf import DictConfig

from verl_tree.clashes import run_keeps_all_rows
from verl_tree.launch.checks.capacity import capacity_keys, longest_trajectory, ranks_of_limit, team_size
from verl_tree.launch.checks.modes import is_separate, rollout_pools, rollout_ranks
from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    TEACHER_PATH,
    corrections,
    engines_of,
    ranks_of,
    uses_critic,
    uses_reference,
    uses_teacher_here,
    uses_tree,
    value_of,
)
from verl_tree.launch.command.composition import model_engine

RELAY = {
    "auto": "a larger tree is relayed or cut into packs, whichever should be faster",
    "always": "a larger tree is relayed",
    "never": "a larger tree is cut into packs",
}


def capacity_lines(config: DictConfig) -> list[str]:
    """Return the most tokens of a pass, role by role, and whether the longest trajectory fits."""
    longest, named = longest_trajectory(config)
    lines = [f"longest trajectory: {named}"]
    for key in capacity_keys(config):
        limit, num_ranks = value_of(config, key), ranks_of_limit(config, key)
        if limit == "auto":
            memory = "the free memory" if config.tree.memory_gib is None else f"{config.tree.memory_gib} GiB per rank"
            lines.append(f"{key}=auto: as many tokens as fit into {memory}")
        elif isinstance(limit, int):
            whole = f"{limit * num_ranks} tokens on the {num_ranks} ranks of a team; " if num_ranks > 1 else ""
            fits = "fits" if limit * num_ranks >= longest else "is longer" + _relayed(config)
            lines.append(f"{key}={limit}: {whole}the longest trajectory {fits}")
    if uses_tree(config) and config.tree.relay in RELAY:
        lines.append(f"tree.relay={config.tree.relay}: {RELAY[config.tree.relay]}")
    return lines


def _relayed(config: DictConfig) -> str:
    return ", so it is relayed in sections" if uses_tree(config) and config.tree.relay != "never" else ""


def layout_lines(config: DictConfig) -> list[str]:
    """Return the device, the trainer, each role with its engine and its ranks, and what a step does."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    lines = [
        f"trainer: {config.trainer.v1.trainer_mode}, {_pool(config, 'trainer')} (nodes x devices), "
        f"{config.trainer.device}{_teams(config)}",
        f"actor: {actor.strategy}, {model.path}",
        _reference_line(config),
        f"critic: {config.critic.strategy}, {config.critic.model.path}" if uses_critic(config) else "critic: none",
        *_rollout_lines(config),
        _agent_line(config),
        _reward_line(config),
    ]
    if config.distillation.enabled and not uses_teacher_here(config):
        paths = ", ".join(str(each.model_path) for each in config.distillation.teacher_models.values())
        lines.append(f"teachers: {paths}, {_pool(config, 'distillation')} of their own")
    return [*lines, *_step_lines(config)]


def _reference_line(config: DictConfig) -> str:
    if not uses_reference(config):
        return "reference: none"
    strategy, teacher = config.actor_rollout_ref.ref.strategy, value_of(config, TEACHER_PATH)
    return f"teacher: {strategy}, {teacher}" if uses_teacher_here(config) else f"reference: {strategy}"


def _pool(config: DictConfig, key: str) -> str:
    return f"{value_of(config, f'{key}.nnodes')} x {value_of(config, f'{key}.n_gpus_per_node')} ranks"


def _teams(config: DictConfig) -> str:
    size = team_size(config)
    teams = _divided(ranks_of(config, "trainer"), size, what="teams")
    line = f", {teams} compute each model call together" if size > 1 else ""
    engine = engines_of(config)[ACTOR]
    sizes = {name: value_of(config, f"{engine}.{name}") or 1 for name in model_engine(config).layout}
    return line + "".join(f", {name}={size}" for name, size in sizes.items() if size > 1)


def _divided(num_ranks: int, size: int, *, what: str) -> str:
    """Return how many parts of so many ranks there are; of a refused command they may not divide them."""
    if size < 1 or num_ranks % size:
        return f"{num_ranks} ranks not divisible into {what} of {size}"
    return f"{num_ranks // size} x {size} ranks ({what} x size)"


def _rollout_lines(config: DictConfig) -> list[str]:
    rollout, size, lines = config.actor_rollout_ref.rollout, rollout_ranks(config), []
    for pool, num_ranks in rollout_pools(config).items():
        where = "the trainer's"
        if pool != "trainer":
            engine = rollout.checkpoint_engine.backend
            where = f"{_pool(config, pool)} (nodes x devices) of its own, which get the weights over {engine}"
        lines.append(f"rollout: {rollout.name}, {_divided(num_ranks, size, what='replicas')}, {where}")
    return lines


def _step_lines(config: DictConfig) -> list[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    num_prompts, num_sessions = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    lines = [
        f"step: {num_prompts} x {num_sessions} sessions (prompts x n), mini-batches of {actor.ppo_mini_batch_size} "
        f"prompts, ppo_epochs={actor.ppo_epochs}"
    ]
    if is_separate(config):
        num_updates = config.trainer.v1.separate_async.parameter_sync_step
        lines.append(f"weight sync: every {num_updates} updates (parameter_sync_step)")
    loss = f"{actor.policy_loss.loss_mode}, {actor.loss_agg_mode}, session_weight={config.tree.session_weight}"
    if config.tree.role_weight:
        loss += f", role_weight={config.tree.role_weight}"
    if uses_tree(config):
        kept = run_keeps_all_rows(config)
        left_out = f"computes all rows ({', '.join(kept)})" if kept else "leaves out rows whose advantages are all 0"
        keep = config.tree.keep_tokens
        drawn = "" if keep is None else f", and draws {keep:g} of the tokens of the others"
        lines.append(f"update: {left_out}{drawn}")
    corrected = [f"{name}={value_of(config, f'{CORRECTION}.{name}')}" for name in corrections(config)]
    return [*lines, ", ".join([f"objective: advantages {algorithm.adv_estimator}, loss {loss}", *corrected])]


def _agent_line(config: DictConfig) -> str:
    agent = config.actor_rollout_ref.rollout.agent
    loops = f"loops of {agent.agent_loop_config_path}, " if agent.agent_loop_config_path else ""
    return f"agents: {loops}default {agent.default_agent_loop}, num_workers={agent.num_workers}"


def _reward_line(config: DictConfig) -> str:
    reward = config.reward
    if reward.num_workers == 0 and not reward.reward_model.enable:
        return "reward: that of the agents (reward.num_workers=0)"
    function = reward.custom_reward_function.path or "verl's function for the data source"
    line = f"reward: {function}, manager {reward.reward_manager.name}, num_workers={reward.num_workers}"
    if not reward.reward_model.enable:
        return line
    model, where = reward.reward_model, "the trainer's ranks"
    if model.enable_resource_pool:
        where = f"{_pool(config, 'reward.reward_model')} of its own"
    return f"{line}, model {model.model_path} on {where}"
