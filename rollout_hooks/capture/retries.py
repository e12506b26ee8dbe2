"""verl's manager, which starts a dead worker anew and runs the prompts again that it had not ended.

What these prompts had written is cleared before, so no session is trained twice and none is missing. A prompt that was
on a worker when it died is not proven guilty, and several run together: so none of them is given up for the others, and
the run ends if the same prompts lose their worker again (`MAX_DEATHS`).

Other workers go on meanwhile. Whoever waits for prompts calls `retry_lost`; nothing else looks for dead workers.
"""

import asyncio
import copy
import logging
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils import tensordict_utils as tu

logger = logging.getLogger(__name__)

MAX_DEATHS = 2
"""So many workers may die under a prompt: with the last one the run ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """Prompts that a worker was given together; `worker` is its place in the manager's list."""

    worker: int
    prompts: TensorDict
    uids: tuple[str, ...]
    num_deaths: int = 0  # of workers that had them before

    @property
    def partition(self) -> str:
        """The partition of TransferQueue with their rows, as verl's worker chooses it."""
        return "val" if tu.get_non_tensor_data(self.prompts, "validate", default=False) else "train"


class RetryingManager(AgentLoopManagerTQ):
    """verl's manager for workers that may die."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.retries = False
        """Whether somebody calls `retry_lost`; if nobody does, nothing is remembered, and a death is an error."""
        self._given: list[Given] = []
        """The oldest first; those whose prompts have all ended leave at the next look."""
        self._pings: list[ray.ObjectRef] = []
        """A question to each worker. It fails when the worker has died, and waits while it is busy."""
        self._num_retried = {"train": 0, "val": 0}

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Deal prompts to the workers as verl does, and remember who got which."""
        if not self.retries:
            super().generate_sequences(prompts)
            return
        for worker, part in enumerate(prompts.chunk(len(self.agent_loop_workers))):
            self._given.append(Given(worker, part, tuple(map(str, part["uid"]))))
        try:
            super().generate_sequences(prompts)
        except ActorDiedError:
            logger.info("an agent loop worker died before it got its prompts; they run once it is started anew")

    def retry_lost(self, open_uids: Set[str]) -> None:
        """Look for workers that have died since the last look; start them anew and run their open prompts again.

        Args:
            open_uids: Prompts that had not ended when the caller listed them.

        Raises:
            RuntimeError: The same prompts have lost `MAX_DEATHS` workers.
        """
        self._given = [each for each in self._given if not open_uids.isdisjoint(each.uids)]
        if not self._pings:
            self._pings = [worker.__ray_ready__.remote() for worker in self.agent_loop_workers]
        answered, _ = ray.wait(self._pings, num_returns=len(self._pings), timeout=0)
        for ping in answered:
            worker = self._pings.index(ping)
            try:
                ray.get(ping)
            except ActorDiedError as error:
                self._retry(worker, error)
            except ActorUnavailableError:
                logger.debug("an agent loop worker cannot be reached; Ray will know whether it has died")
            self._pings[worker] = self.agent_loop_workers[worker].__ray_ready__.remote()

    def _retry(self, worker: int, error: ActorDiedError) -> None:
        """Start a worker anew and run its open prompts on it."""
        tags = tq.kv_list() or {}
        lost = []
        for given in [each for each in self._given if each.worker == worker]:
            self._given.remove(given)
            of_partition = tags.get(given.partition, {})
            for uid, prompt in zip(given.uids, given.prompts.split(1), strict=True):
                # A prompt that has ended and was sampled has no key any more.
                status = of_partition.get(uid, {}).get("status")
                if status in ("pending", "running"):
                    # One that is pending never reached the worker.
                    lost.append(Given(worker, prompt, (uid,), given.num_deaths + (status == "running")))
        again = [each.uids[0] for each in lost if each.num_deaths >= MAX_DEATHS]
        if again:
            raise RuntimeError(
                f"{MAX_DEATHS} agent loop workers, one after the other, died while they ran the same {len(again)} "
                f"prompts (first: {again[0]}): {error}\nIf they needed too much memory, run fewer sessions at a time "
                "(data.train_batch_size, actor_rollout_ref.rollout.n) or let agents need less; if their code crashes, "
                "see the worker's log. A smaller share of prompts is on each of more workers "
                "(actor_rollout_ref.rollout.agent.num_workers)"
            )
        logger.warning("an agent loop worker died; %d prompts run again from their beginning: %s", len(lost), error)
        for partition in self._num_retried:
            uids = {each.uids[0] for each in lost if each.partition == partition}
            rows = [key for key in tags.get(partition, {}) if key not in uids and key.rsplit("_", 2)[0] in uids]
            if rows:
                tq.kv_clear(keys=rows, partition_id=partition)
            self._num_retried[partition] += len(uids)
        self.agent_loop_workers[worker] = self._start_worker()
        self._given += lost
        for each in lost:
            self.agent_loop_workers[worker].generate_sequences.remote(each.prompts)

    def _start_worker(self) -> Any:
        """Start one worker as verl starts them all, on a node that lives."""
        one = copy.copy(self)
        one.rollout_config = OmegaConf.merge(self.rollout_config, {"agent": {"num_workers": 1}})
        asyncio.run(one._init_agent_loop_workers())
        return one.agent_loop_workers[0]
