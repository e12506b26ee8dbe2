"""verl's worker of policy, reference model and rollout, with our training workers."""

from verl.workers.engine_workers import ActorRolloutRefWorker

from verl_tree.trainer.portions.portion import PortionWorker
from verl_tree.trainer.teacher import TeachingWorker
from verl_tree.trainer.worker import TreeTrainingWorker


class TreeActorRolloutRefWorker(PortionWorker, TeachingWorker, ActorRolloutRefWorker):
    """verl's hybrid worker with `TreeTrainingWorker`s, which takes portions of the rows."""

    actor_worker_cls = TreeTrainingWorker
    ref_worker_cls = TreeTrainingWorker
