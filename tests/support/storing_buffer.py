"""A replay buffer that stores what an asynchronous run samples, for `skip.rollout_tq` of a later run to replay.

verl's own storing leaves out the warm-up, so that every step would train its own prompts.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from typing_extensions import override

from verl_tree.trainer.rows.replay_buffer import POLL_INTERVAL_S, TreeReplayBufferAsync


class StoringBuffer(TreeReplayBufferAsync):
    """A buffer that writes each training mini-batch to `sampler_kwargs.folder/STEP/NUMBER`, over what is there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, poll_interval=POLL_INTERVAL_S)
        self._num_stored: Counter[int] = Counter()

    @override
    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict]:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        if partition_id == "train":
            number = self._num_stored[global_steps]
            self._num_stored[global_steps] += 1
            store(batch, Path(self.sampler_kwargs.folder) / str(global_steps) / str(number), step=global_steps)
        return batch, metrics


def store(batch: KVBatchMeta, folder: Path, *, step: int) -> None:
    """Write the rows of a sampled batch in the format of `skip.rollout_tq`."""
    folder.mkdir(parents=True, exist_ok=True)
    assert batch.partition_id is not None
    rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
    payload = {"tensordict": rows, "tags": batch.tags, "keys": list(batch.keys), "global_steps": step}
    torch.save(payload, folder / "tq_batch.pt")
    (folder / "meta.json").write_text(json.dumps({"global_steps": step, "num_trajectories": len(batch.keys)}))


def storing_options(folder: Path) -> tuple[str, ...]:
    """Return options of an asynchronous run that stores its rollouts where `skip.rollout_tq.dump_dir=FOLDER` looks."""
    names = "${trainer.experiment_name}_${trainer.project_name}"
    # verl's asynchronous trainers draw one prompt at a time, whatever the batch size.
    sizes = "GBS1_N${actor_rollout_ref.rollout.n}_in${data.max_prompt_length}_out${data.max_response_length}"
    return (
        f"trainer.v1.sampler.custom_sampler.path={__file__}",
        f"trainer.v1.sampler.custom_sampler.name={StoringBuffer.__name__}",
        f"+trainer.v1.sampler.sampler_kwargs.folder={folder}/{names}/{sizes}",
    )
