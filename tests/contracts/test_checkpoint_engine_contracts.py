"""What the engine `gloo` relies on in verl's checkpoint engines (0.9.1)."""

import inspect
from typing import cast

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass

from verl_tree.launch.command.composition import compose_config


def test_verl_finds_the_engine_that_the_profile_names() -> None:
    """The manager imports the module and looks its backend up, and each worker makes one with the backend's options."""
    timeout = "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs={gloo:{timeout_s:3}}"
    composed = compose_config(["profile=cpu", "trainer.v1.trainer_mode=separate_async", timeout])
    settings = composed.actor_rollout_ref.rollout.checkpoint_engine
    no_workers = cast("RayWorkerGroup", None)
    manager = CheckpointEngineManager(config=omega_conf_to_dataclass(settings), actor_wg=no_workers, replicas=[])
    assert manager.backend_cls.__module__ == settings.custom_backend_module
    assert not inspect.isabstract(manager.backend_cls)
    for name in CheckpointEngine.__abstractmethods__:
        assert name in vars(manager.backend_cls), f"{name} is not answered"

    options = settings.engine_kwargs[settings.backend]
    engine = CheckpointEngineRegistry.new(settings.backend, is_master=False, bucket_size=1 << 20, **options)
    assert engine.prepare() is None
    assert engine.wire_format == "named_tensors"
