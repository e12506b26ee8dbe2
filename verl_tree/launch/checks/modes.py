"""Checks of `trainer.v1.trainer_mode` and of the ranks that generate; verl looks once Ray has started, or never."""

from importlib.util import find_spec

from omegaconf import DictConfig

from verl_tree.launch.checks.refusals import (
    ACTOR,
    CORRECTION,
    ROLLOUT,
    Check,
    Finding,
    Findings,
    corrections,
    lacks_cuda,
    ranks_of,
    refusal,
    refusal_here,
    value_of,
)
from verl_tree.launch.command.environment import joins_running_cluster

_MODE, _HYBRID = "trainer.v1.trainer_mode", "actor_rollout_ref.hybrid_engine"
_SAMPLER = "trainer.v1.sampler"


def is_separate(config: DictConfig) -> bool:
    """Whether the rollout has GPUs of its own."""
    return value_of(config, _MODE) == "separate_async"


def rollout_ranks(config: DictConfig) -> int:
    """Return how many ranks one replica of the rollout engine takes."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size


def rollout_pools(config: DictConfig) -> dict[str, int]:
    """Return how many ranks generate: those that train (`trainer`), ranks of their own (`ROLLOUT`), or both."""
    pools = {"trainer": bool(value_of(config, _HYBRID)), ROLLOUT: is_separate(config)}
    return {pool: ranks_of(config, pool) for pool, generates in pools.items() if generates}


def check_rollout_ranks(config: DictConfig) -> Findings:
    """Find replicas of the rollout engine that do not divide the ranks on which they run."""
    size = rollout_ranks(config)
    for pool, num_ranks in rollout_pools(config).items():
        if size < 1 or num_ranks % size:
            remedy = (
                f"a replica takes {size} ranks, which must divide {pool}.nnodes x {pool}.n_gpus_per_node={num_ranks}"
            )
            yield refusal(config, f"{ROLLOUT}.tensor_model_parallel_size", remedy)


def check_ray_cpus(config: DictConfig) -> Findings:
    """Find fewer CPUs than Ray must count: verl waits for ever for a placement that does not fit."""
    key, given = "ray_kwargs.ray_init.num_cpus", value_of(config, "ray_kwargs.ray_init.num_cpus")
    num_ranks = ranks_of(config, "trainer")
    # Three of each rank, one of TransferQueue's controller and one of its storage are held for good.
    least = 3 * num_ranks + 2
    if given is not None and given < least and config.trainer.nnodes == 1 and not joins_running_cluster(config):
        remedy = f"verl would wait for ever for {least}; give at least 5 and 3 for each of the {num_ranks} ranks "
        yield refusal(config, key, f"{remedy}(trainer.nnodes x trainer.n_gpus_per_node): places, not cores")


def check_separate_batches(config: DictConfig) -> Findings:
    """Compare the batch with the updates between two weight syncs."""
    num_updates = value_of(config, "trainer.v1.separate_async.parameter_sync_step")
    size = value_of(config, f"{ACTOR}.ppo_mini_batch_size")
    if is_separate(config) and value_of(config, "data.train_batch_size") != num_updates * size:
        remedy = (
            f"must equal trainer.v1.separate_async.parameter_sync_step={num_updates} x "
            f"{ACTOR}.ppo_mini_batch_size={size}: each update of a step samples one mini-batch"
        )
        yield refusal(config, "data.train_batch_size", remedy)


def check_separate_gpus(config: DictConfig) -> Findings:
    """Find a rollout without GPUs, or more GPUs than Ray is started with."""
    if not is_separate(config):
        return
    has_gpus = True
    for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node"):
        if value_of(config, key) < 1:
            has_gpus = False
            yield refusal(config, key, f"{_MODE}=separate_async generates on GPUs of its own; give at least 1")
    num_trainer, num_rollout = ranks_of(config, "trainer"), ranks_of(config, ROLLOUT)
    given = value_of(config, "ray_kwargs.ray_init.num_gpus")
    if has_gpus and given is not None and given < num_trainer + num_rollout:
        remedy = f"the trainer needs {num_trainer} and the rollout {num_rollout} more; Ray would wait for ever"
        yield refusal(config, "ray_kwargs.ray_init.num_gpus", remedy)


def check_checkpoint_engine(config: DictConfig) -> Findings:
    """Find a checkpoint engine that is not there."""
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend, module = value_of(config, key), value_of(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module")
    if not is_separate(config) or backend == "naive":
        return
    if module is not None:
        if not _exists(module):
            remedy = "no such module; give one that can be imported and registers the backend"
            yield refusal_here(config, f"{ROLLOUT}.checkpoint_engine.custom_backend_module", remedy, brings_code=True)
    else:
        from verl.checkpoint_engine import CheckpointEngineRegistry

        try:
            CheckpointEngineRegistry.get(backend)
        except ValueError as error:
            # An engine for GPUs may need what a machine without them lacks.
            remedy = f"{error}; install what it needs, or choose a registered backend"
            is_elsewhere = lacks_cuda(config)
            here = " (a warning only: this machine has no CUDA device)" if is_elsewhere else ""
            yield Finding(f"{key}={backend}: {remedy}{here}", is_warning=is_elsewhere)


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # A package around it is missing.
        return False


def check_staleness(config: DictConfig) -> Findings:
    """Warn of rows that are thrown away because of one slow branch, and of old rows that nothing corrects."""
    if value_of(config, _MODE) not in ("colocate_async", "separate_async"):
        return
    threshold = value_of(config, f"{_SAMPLER}.max_off_policy_threshold")
    if threshold is not None and value_of(config, f"{_SAMPLER}.max_off_policy_strategy") == "drop":
        message = (
            f"{_SAMPLER}.max_off_policy_strategy=drop: a prompt that ends {threshold} weight syncs after it began is "
            "thrown away with all of its sessions, even if one branch was slow; set wait, or watch "
            "tree/async/dropped_leaves"
        )
        yield Finding(message, is_warning=True)
    if threshold is None and not corrections(config):
        message = (
            f"{_SAMPLER}.max_off_policy_threshold=None: rows may be any number of weight syncs old, and nothing "
            f"corrects for that; set a threshold, or {CORRECTION}.rollout_is=token"
        )
        yield Finding(message, is_warning=True)


CHECKS: tuple[Check, ...] = (
    check_rollout_ranks,
    check_ray_cpus,
    check_separate_batches,
    check_separate_gpus,
    check_checkpoint_engine,
    check_staleness,
)
