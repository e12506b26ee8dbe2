"""Refuses settings that cannot work or would be ignored, before Ray starts: one small function per reason.

Each check takes the composed configuration and raises a ValueError that names the key, its value and the remedy.
Checks that need the model or the rows read only what is already on this machine, so nothing is downloaded here.
"""

import os
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from verl_tree.config import FLAT_STRATEGY, TREE_STRATEGY, TreeConfig
from verl_tree.launch.validation.code import (
    check_agent_loops,
    check_data_code,
    check_legacy_reward_keys,
    check_reward_code,
    check_tool_files,
)
from verl_tree.launch.validation.inputs import (
    check_data_files,
    check_dump_dir,
    check_model_folders,
    check_text_model,
    check_text_rows,
)
from verl_tree.launch.validation.refusals import (
    ACTOR,
    ENGINES,
    MODELS,
    REF,
    ROLLOUT,
    refuse,
    refuse_true,
    uses_critic,
    uses_reference,
    value_of,
)

Check = Callable[[DictConfig], None]


def check_tree_options(config: DictConfig) -> None:
    """Builds the options, and looks up the packing method and the attention backend."""
    from verl_tree.attention import BACKENDS
    from verl_tree.packing import pack
    from verl_tree.tree import TokenForest

    tree = TreeConfig.from_mapping(OmegaConf.to_container(config.tree, resolve=True))
    try:
        pack(TokenForest.from_sequences([[0]]), method=tree.packing)
    except ValueError as error:
        raise ValueError(f"tree.packing={tree.packing}: {error}") from error
    if tree.backend != "auto" and tree.backend not in BACKENDS:
        refuse(config, "tree.backend", f"choose one of {', '.join(['auto', *BACKENDS])}")


def check_flat_has_no_tree_objective(config: DictConfig) -> None:
    """The flat engine sums over trajectories; another objective would silently be dropped."""
    if not config.tree.enabled and config.tree.shared_tokens != "sum":
        refuse(config, "tree.shared_tokens", "tree.enabled=false knows only tree.shared_tokens=sum")


def check_model_engine(config: DictConfig) -> None:
    """Only verl's FSDP family is supported, not Megatron, VeOmni or TorchTitan."""
    if config.model_engine != "dp":
        refuse(config, "model_engine", "verl_tree trains with FSDP2 only; remove the option or set model_engine=dp")


def check_strategies(config: DictConfig) -> None:
    """`tree.enabled` decides the engine, and all roles use the same one."""
    keys = [f"{ACTOR}.strategy", f"{REF}.strategy"] + (["critic.strategy"] if uses_critic(config) else [])
    allowed = (TREE_STRATEGY,) if config.tree.enabled else (FLAT_STRATEGY, "fsdp")
    for key in keys:
        if value_of(config, key) not in allowed:
            remedy = (
                f"tree.enabled={config.tree.enabled} needs {' or '.join(allowed)}; leave the strategy to tree.enabled"
            )
            refuse(config, key, remedy)


def check_trainer(config: DictConfig) -> None:
    """Groups are kept together by our subclass of verl's synchronous v1 trainer."""
    if not config.trainer.use_v1:
        refuse(config, "trainer.use_v1", "the legacy trainer is not supported; set trainer.use_v1=true")
    if config.trainer.v1.trainer_mode != "sync":
        refuse(config, "trainer.v1.trainer_mode", "set trainer.v1.trainer_mode=sync")
    if not config.actor_rollout_ref.hybrid_engine:
        refuse(config, "actor_rollout_ref.hybrid_engine", "trainer_mode=sync needs hybrid_engine=true")


def check_estimator(config: DictConfig) -> None:
    """verl would notice an unknown estimator only after the first rollout."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    from verl_tree.trainer.advantages import ESTIMATORS

    known = [*ESTIMATORS, *sorted(ADV_ESTIMATOR_REGISTRY.keys() - ESTIMATORS.keys())]
    if config.algorithm.adv_estimator not in known:
        remedy = f"choose one of {', '.join(known)}, or register yours in a module of VERL_USE_EXTERNAL_MODULES"
        refuse(config, "algorithm.adv_estimator", remedy)


def check_capture(config: DictConfig) -> None:
    """Without a capturing manager sessions have no leaves of their own and no forest."""
    key = f"{ROLLOUT}.agent.agent_loop_manager_class"
    if not value_of(config, key):
        refuse(config, key, "set it to rollout_hooks.worker.TreeAgentLoopManager or a subclass of it")


def check_fused_kernels(config: DictConfig) -> None:
    """Fused kernels never make the logits that branches are scored from."""
    keys = [f"{model}.use_fused_kernels" for model in MODELS] + [f"{ACTOR}.use_fused_kernels"]
    refuse_true(config, tuple(keys), "fused log-prob kernels are not supported; set it to false")


def check_sequence_parallelism(config: DictConfig) -> None:
    """Ulysses would cut a pack where its tree does not."""
    keys = [f"{ACTOR}.ulysses_sequence_parallel_size", f"{REF}.ulysses_sequence_parallel_size"]
    keys += ["critic.ulysses_sequence_parallel_size", *(f"{each}.ulysses_sequence_parallel_size" for each in ENGINES)]
    for key in keys:
        if (value_of(config, key) or 1) > 1:
            refuse(config, key, "Ulysses sequence parallelism is not supported; set it to 1")


def check_dynamic_batches(config: DictConfig) -> None:
    """Micro-batches are packs: cut by tokens, never by a number of rows."""
    keys = [f"{ACTOR}.use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz"]
    keys += [f"{REF}.log_prob_use_dynamic_bsz"] if uses_reference(config) else []
    keys += ["critic.use_dynamic_bsz"] if uses_critic(config) else []
    for key in keys:
        if not value_of(config, key):
            refuse(config, key, "a row may have many leaves, so micro-batches are cut by tokens; set it to true")


def capacity_keys(config: DictConfig) -> list[str]:
    """Returns the keys that bound the tokens of a micro-batch of the roles in use."""
    if config.tree.enabled and config.tree.capacity is not None:
        return ["tree.capacity"]
    keys = [f"{ACTOR}.ppo_max_token_len_per_gpu", f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
    if uses_reference(config):
        keys.append(f"{REF}.log_prob_max_token_len_per_gpu")
    if uses_critic(config):
        keys += ["critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"]
    return keys


def longest_trajectory_len(config: DictConfig) -> int:
    """Returns the tokens of the longest row that verl lets a session end in: all turns count as response."""
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    return longest if rollout.max_model_len is None else min(longest, rollout.max_model_len)


def _name_longest_trajectory(config: DictConfig) -> str:
    """Returns the tokens of `longest_trajectory_len` with the options that they come from."""
    rollout, longest = config.actor_rollout_ref.rollout, longest_trajectory_len(config)
    if longest < rollout.prompt_length + rollout.response_length:
        return f"{longest} tokens ({ROLLOUT}.max_model_len)"
    lens = f"data.max_prompt_length={rollout.prompt_length} + data.max_response_length={rollout.response_length}"
    return f"{longest} tokens ({lens})"


def check_capacity(config: DictConfig) -> None:
    """A trajectory must fit into one pack."""
    longest, named = longest_trajectory_len(config), _name_longest_trajectory(config)
    for key in capacity_keys(config):
        if value_of(config, key) < longest:
            refuse(config, key, f"less than the longest possible trajectory, {named}; raise it or shorten them")
    response = config.actor_rollout_ref.rollout.response_length
    limits = {
        "tree.max_path_len": (longest, f"longest possible trajectory, {named}"),
        "tree.max_loss_terms": (response, f"longest possible response, data.max_response_length={response} tokens"),
    }
    for key, (most, what) in limits.items():
        limit = value_of(config, key)
        if config.tree.enabled and limit is not None and limit < most:
            refuse(config, key, f"less than the {what}; raise it, shorten them, or set null for no limit")


def check_loss_normalisation(config: DictConfig) -> None:
    """Without the factor verl divides by the padded width of a micro-batch, which depends on the cut."""
    for role in [ACTOR] + (["critic"] if uses_critic(config) else []):
        is_norm = value_of(config, f"{role}.loss_agg_mode") == "seq-mean-token-sum-norm"
        if is_norm and value_of(config, f"{role}.loss_scale_factor") is None:
            remedy = "loss_agg_mode=seq-mean-token-sum-norm needs it; data.max_response_length is the usual value"
            refuse(config, f"{role}.loss_scale_factor", remedy)


def check_prefix_grouper(config: DictConfig) -> None:
    """The switch has no effect in verl 0.9.1, and here it is not needed."""
    refuse_true(config, (f"{ACTOR}.use_prefix_grouper",), "without effect in verl 0.9.1; tree.enabled shares prefixes")


def check_unsupported_outputs(config: DictConfig) -> None:
    """The tree engine computes log-probs, entropy and values only."""
    if config.tree.enabled:
        refuse_true(config, (f"{ACTOR}.calculate_sum_pi_squared",), "not computed on a tree; set tree.enabled=false")


def check_padding_to_length(config: DictConfig) -> None:
    """Padding packed rows to a length has no meaning for a tree."""
    if config.tree.enabled:
        keys = [f"{ACTOR}.pad_to_length", *(f"{engine}.pad_to_length" for engine in ENGINES)]
        refuse_true(config, tuple(keys), "a pack is not padded; set it to false, or tree.enabled=false")


def check_quantisation(config: DictConfig) -> None:
    """Quantisation-aware training patches the modules; an fp8 rollout needs a GPU."""
    keys = [f"{ACTOR}.qat.enable", *(f"{engine}.qat.enable" for engine in ENGINES)]
    refuse_true(config, tuple(keys), "quantisation-aware training is not supported; set it to false")
    if config.trainer.device == "cpu" and value_of(config, f"{ROLLOUT}.quantization") is not None:
        refuse(config, f"{ROLLOUT}.quantization", "not supported on a CPU; set it to null")


def check_router_replay(config: DictConfig) -> None:
    """Recorded expert routes belong to rows; shared tokens have one route only."""
    refuse_true(
        config, (f"{ROLLOUT}.enable_rollout_routing_replay",), "router replay is not supported; set it to false"
    )
    for engine in ENGINES:
        if value_of(config, f"{engine}.router_replay.mode") not in (None, "disabled"):
            refuse(config, f"{engine}.router_replay.mode", "router replay is not supported; set it to disabled")


def check_distillation(config: DictConfig) -> None:
    """Teacher logits are not computed on a tree."""
    refuse_true(config, ("distillation.enabled",), "distillation is not supported; set it to false")


def check_critic_cut(config: DictConfig) -> None:
    """Actor and critic share the cut of a batch into mini-batches of groups."""
    key = "critic.ppo_mini_batch_size"
    if uses_critic(config) and value_of(config, key) != value_of(config, f"{ACTOR}.ppo_mini_batch_size"):
        refuse(
            config, key, f"must equal {ACTOR}.ppo_mini_batch_size={value_of(config, f'{ACTOR}.ppo_mini_batch_size')}"
        )


def check_cpu_settings(config: DictConfig) -> None:
    """Settings of a CUDA device that fail late, or hang, on a CPU."""
    if config.trainer.device != "cpu":
        return
    if config.actor_rollout_ref.rollout.name != "vllm":
        refuse(config, f"{ROLLOUT}.name", "profile=cpu generates with vLLM's CPU engine; set it to vllm")
    keys = tuple(f"{model}.use_remove_padding" for model in MODELS)
    refuse_true(config, keys, "needs flash-attn's CUDA kernels; set it to false on a CPU")
    sleeping = (f"{ROLLOUT}.enable_sleep_mode", f"{ROLLOUT}.free_cache_engine")
    refuse_true(config, sleeping, "vLLM cannot sleep on a CPU; set it to false")
    interprets = config.tree.backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if config.tree.enabled and config.tree.backend in ("fa4", "triton") and not interprets:
        refuse(config, "tree.backend", "its kernels need CUDA, and trainer.device=cpu; set auto, varlen or dense")


def check_device(config: DictConfig) -> None:
    """A CUDA profile on a machine without CUDA would fail in the workers."""
    import torch

    if config.trainer.device == "cuda" and not torch.cuda.is_available() and config.trainer.nnodes == 1:
        refuse(config, "trainer.device", "torch sees no CUDA device; use profile=cpu, or profile=auto to choose")


CHECKS: tuple[Check, ...] = (
    check_tree_options,
    check_flat_has_no_tree_objective,
    check_model_engine,
    check_strategies,
    check_trainer,
    check_estimator,
    check_device,
    check_cpu_settings,
    check_capture,
    check_fused_kernels,
    check_sequence_parallelism,
    check_dynamic_batches,
    check_capacity,
    check_loss_normalisation,
    check_prefix_grouper,
    check_unsupported_outputs,
    check_padding_to_length,
    check_quantisation,
    check_router_replay,
    check_distillation,
    check_critic_cut,
    check_data_files,
    check_text_rows,
    check_model_folders,
    check_text_model,
    check_agent_loops,
    check_tool_files,
    check_data_code,
    check_legacy_reward_keys,
    check_reward_code,
    check_dump_dir,
)
"""Every check, in the order in which a user should hear of the problems."""


def validate(config: DictConfig) -> None:
    """Runs every check on a composed configuration.

    Args:
        config: The whole configuration, interpolations allowed.

    Raises:
        ValueError: The first setting that cannot work, with its remedy.
    """
    for check in CHECKS:
        check(config)
