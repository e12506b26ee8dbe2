"""What the trainer is before there is a cluster: its registrations, workers, prompts and refusals."""

import pytest

pytest.importorskip("verl")

import numpy as np
from omegaconf import DictConfig
from tensordict.tensorclass import NonTensorStack
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.utils import Role
from verl.utils.skip.base_skip import SKIP_REGISTRY

from verl_tree.launch.composition import compose_config
from verl_tree.trainer.advantages import ESTIMATORS
from verl_tree.trainer.replay import TreeRolloutSkip
from verl_tree.trainer.task_runner import TreeTaskRunner
from verl_tree.trainer.trainer import POLL_INTERVAL_S, TreePPOTrainerSync, count_flat
from verl_tree.trainer.worker import TreeActorRolloutRefWorker, TreeTrainingWorker


def config_of(*overrides: str) -> DictConfig:
    """The composed configuration of a CPU run."""
    return compose_config(["profile=cpu", "actor_rollout_ref.model.path=unused", *overrides])


def test_a_trainer_registers_what_its_process_needs() -> None:
    trainer = TreePPOTrainerSync(config_of())
    assert get_adv_estimator_fn("tree_grpo") is ESTIMATORS["tree_grpo"]
    assert SKIP_REGISTRY["rollout_tq"] is TreeRolloutSkip
    assert trainer.replay_buffer.poll_interval == POLL_INTERVAL_S
    assert trainer.trainer_mode == "sync"


@pytest.mark.parametrize(
    ("overrides", "roles"),
    [
        ([], {Role.ActorRollout: TreeActorRolloutRefWorker}),
        (["actor_rollout_ref.actor.use_kl_loss=true"], {Role.ActorRolloutRef: TreeActorRolloutRefWorker}),
        (
            ["algorithm.adv_estimator=gae"],
            {Role.ActorRollout: TreeActorRolloutRefWorker, Role.Critic: TreeTrainingWorker},
        ),
    ],
    ids=["actor", "reference", "critic"],
)
def test_every_role_runs_on_our_worker(overrides: list[str], roles: dict[Role, type]) -> None:
    trainer = TreePPOTrainerSync(config_of(*overrides))
    trainer._init_resource_pool_mgr()
    # Ray wraps the class in a subclass of its own.
    classes = {role: worker.__ray_metadata__.modified_class for role, worker in trainer.role_worker_mapping.items()}
    assert set(classes) == set(roles)
    assert all(issubclass(classes[role], worker) for role, worker in roles.items())


def test_a_critic_with_other_mini_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"critic\.ppo_mini_batch_size=3"):
        TreePPOTrainerSync(config_of("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=3"))


def test_uids_sort_in_the_order_in_which_prompts_were_drawn() -> None:
    trainer = TreePPOTrainerSync(config_of())
    prompts = [{"raw_prompt": np.array([f"question {n}" for n in range(3)], dtype=object)} for _ in range(4)]
    trainer.train_dataloader_it = iter(prompts)
    batches = [trainer._fetch_one_gen_batch() for _ in range(4)]
    uids = [uid for batch in batches for uid in batch["uid"]]
    assert uids == sorted(uids) and len(set(uids)) == 12
    assert not any("_" in uid for uid in uids), "verl splits row keys at underscores"
    assert isinstance(batches[0].get("uid"), NonTensorStack), "what verl's agent loop workers index"


def test_flat_counts_are_of_the_cells_that_a_tree_engine_would_share() -> None:
    sequences = [np.array(row) for row in ([1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9])]
    # Cells: rows 0 and 1 (7 flat, 5 tree tokens); row 2 and padding (3, 3); row 3 (1, 1); padding alone
    # (nothing)
    counts = count_flat(sequences, row_order=(0, 1, 2, 4, 3, 5, 6, 7), cells=((2, 2), (1, 3)))
    assert (counts.num_flat_tokens, counts.num_tree_tokens, counts.num_packed_tokens) == (11, 9, 11)
    assert counts.num_leaves == 4
    metrics = counts.metrics()
    assert metrics["tree/por"] == pytest.approx(2 / 11)
    assert metrics["tree/err"] == 0.0 and metrics["tree/compression"] == 1.0


def test_the_task_runner_refuses_other_modes() -> None:
    runner = TreeTaskRunner.__ray_metadata__.modified_class()
    with pytest.raises(ValueError, match=r"trainer\.v1\.trainer_mode=sync"):
        runner.run(config_of("trainer.v1.trainer_mode=colocate_async"))
